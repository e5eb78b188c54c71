"""TensorBoard's files hold every step that metrics.jsonl has, also of a run that was killed."""

import math
import os
import signal
import subprocess
import sys

import pytest

from venusrl.observe.events import read_events
from venusrl.observe.run_log import RunLog, read_jsonl

from .. import disk


def shown(workdir) -> dict[tuple[int, str], list[float]]:
    """What TensorBoard shows: values by (step, tag), over all files, what a later start took back left out."""
    found: dict[tuple[int, str], list[float]] = {}
    for path in sorted((workdir / "tensorboard").glob("events.out.tfevents.*")):
        for _, event in read_events(path):
            if event.HasField("session_log"):
                found = {key: value for key, value in found.items() if key[0] < event.step}
            for value in event.summary.value:
                found.setdefault((event.step, value.tag), []).append(value.simple_value)
    return found


def rows(workdir) -> set[tuple[int, str]]:
    return {(row["step"], name) for row in read_jsonl(workdir / "metrics.jsonl") for name in row if name != "step"}


def test_every_row_is_in_the_file_at_once(tmp_path):
    log = RunLog(tmp_path, -1)
    for step in range(1, 4):
        log.metrics(step, {"reward": step / 4, "loss": 0.5})
        assert set(shown(tmp_path)) == rows(tmp_path) and len(rows(tmp_path)) == 2 * step  # nothing is held back
    log.close()


KILLED = """
import sys
from venusrl.observe.run_log import RunLog
log = RunLog(sys.argv[1], int(sys.argv[2]))
for step in range(int(sys.argv[2]) + 1, 10**6):
    log.metrics(step, {"reward": step / 10**6, "loss": 1.0, "entropy": 2.0})
    print(step, flush=True)
"""


def killed(workdir, resume: int, steps: int) -> None:
    """A process that writes rows and is killed with kill -9 some time after `steps` of them."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(workdir), str(resume)], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) >= resume + steps:
            break
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()


def test_kill_9_leaves_tensorboard_every_step_that_the_rows_have(tmp_path):
    resume = 0
    for _ in range(3):
        killed(tmp_path, resume, 40)
        there = set(shown(tmp_path))
        assert rows(tmp_path) <= there and len(there) >= 3 * 40  # before anything is mended
        resume = max(step for step, _ in there) - 15  # of the last checkpoint
    log = RunLog(tmp_path, resume)
    log.metrics(resume + 1, {"reward": -1.0})
    log.close()
    found = shown(tmp_path)
    assert set(found) == rows(tmp_path)
    assert max(step for step, _ in found) == resume + 1
    assert all(len(values) == 1 for values in found.values())  # no step twice
    assert found[resume + 1, "reward"] == [-1.0]


def test_what_an_older_release_or_a_full_disk_left_out_is_added(tmp_path):
    log = RunLog(tmp_path, -1)
    for step in range(5):
        log.metrics(step, {"reward": float(step), "entropy": math.inf})
    log.close()
    for path in (tmp_path / "tensorboard").iterdir():
        path.write_bytes(path.read_bytes()[:-200])  # several records short, and a part of one
    log = RunLog(tmp_path, 4)
    log.close()
    found = shown(tmp_path)
    assert set(found) == rows(tmp_path) == {(step, name) for step in range(5) for name in ("reward", "entropy")}
    assert [found[step, "reward"] for step in range(5)] == [[float(step)] for step in range(5)]
    assert math.isnan(found[4, "entropy"][0]) or math.isinf(found[4, "entropy"][0])


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 100, os.urandom(1000)])
def test_a_file_that_is_damaged_is_taken_for_empty(tmp_path, content):
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events.out.tfevents.0000000001.host").write_bytes(content)
    log = RunLog(tmp_path, -1)
    log.metrics(0, {"reward": 1.0})
    log.close()
    assert shown(tmp_path) == {(0, "reward"): [1.0]}


def test_a_full_disk_ends_nothing_and_everything_is_there_once_it_has_room(tmp_path):
    with disk.small_disk(tmp_path / "disk") as small:
        log = RunLog(small, -1)
        log.metrics(0, {"reward": 0.0})
        filler = disk.fill(small)
        for step in range(1, 400):
            log.metrics(step, {"reward": float(step)})
        log.plot()
        assert log.failures > 0 and len(rows(small)) < 400
        filler.unlink()
        log.metrics(400, {"reward": 400.0})
        log.plot()
        assert rows(small) == {(step, "reward") for step in range(401)} == set(shown(small))
        assert (small / "reward.png").read_bytes().startswith(b"\x89PNG")
        log.close()

"""What a run writes, and what is left of it after a crash."""

import json
import logging
import math

import pytest

from venusrl.core.group import Batch, Group
from venusrl.core.trajectory import Trajectory
from venusrl.observe.run_log import JsonLines, RunLog, read_jsonl

from .. import disk


def written(path, steps, resume=0):
    lines = JsonLines(path, resume)
    lines.write({"step": step, "value": step * 10} for step in steps)
    lines.close()


def steps_of(path):
    return [row["step"] for row in read_jsonl(path)]


def test_no_file_is_no_rows(tmp_path):
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_rows_come_back(tmp_path):
    written(tmp_path / "m.jsonl", [1, 2, 3])
    assert read_jsonl(tmp_path / "m.jsonl")[-1] == {"step": 3, "value": 30}


@pytest.mark.parametrize("resume", range(5))
def test_going_on_drops_what_is_after_the_step(tmp_path, resume):
    path = tmp_path / "m.jsonl"
    written(path, [1, 2, 2, 3, 4])
    written(path, [resume + 1], resume)
    assert steps_of(path) == [s for s in [1, 2, 2, 3, 4] if s <= resume] + [resume + 1]


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_last_line_that_was_cut_is_dropped(tmp_path, cut):
    path = tmp_path / "m.jsonl"
    written(path, [1, 2, 3])
    whole = path.read_bytes()
    assert len(whole.splitlines()[-1]) == 24
    path.write_bytes(whole[: -1 - cut])
    assert steps_of(path) == [1, 2]
    written(path, [3], resume=2)
    assert path.read_bytes() == whole


def test_only_the_line_break_was_cut(tmp_path):
    path = tmp_path / "m.jsonl"
    written(path, [1, 2, 3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    written(path, [], resume=3)
    assert path.read_bytes() == whole


def test_no_temporary_file_stays(tmp_path):
    written(tmp_path / "m.jsonl", [1])
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_rows_are_there_at_once(tmp_path):
    lines = JsonLines(tmp_path / "m.jsonl", 0)
    lines.write([{"step": 1}])
    assert steps_of(tmp_path / "m.jsonl") == [1]  # a kill after this loses nothing
    lines.close()


def batch() -> Batch:
    t = Trajectory("g0/0", "g0", 0)
    t.append_observation([1, 2])
    t.append_generated([3, 4], [-0.5, -0.25], 6)
    t.append_observation([5])
    t.append_generated([6], [-0.5], 7)
    t.turns[0].generate_s, t.turns[0].tool_s, t.turns[1].stop = 0.123456, 2.0, "length"
    steps = [
        {"reply": "r0", "command": "ls", "exit_code": 0, "observation": "é\nb"},
        {"reply": "r1", "command": None, "observation": ""},
    ]
    t.complete(0.5, steps=steps, messages=[{"role": "user", "content": "Fix"}])
    return Batch((Group("g0", prompt_id=12, epoch=3, opened_version=6, trajectories=[t]),), version=7)


def test_a_run_log(tmp_path):
    log = RunLog(tmp_path)
    log.metrics(1, {"reward": 0.5, "entropy": 1.25})
    log.trajectories(1, batch())
    log.close()
    assert read_jsonl(log.metrics_path) == [{"step": 1, "reward": 0.5, "entropy": 1.25}]
    (row,) = read_jsonl(log.trajectories_path)
    turns = row.pop("turns")
    assert row == {
        "step": 1,
        "id": "g0/0",
        "prompt_id": 12,
        "epoch": 3,
        "reward": 0.5,
        "start_version": 6,
        "tokens": 6,
        "generated": 3,
        "messages": [{"role": "user", "content": "Fix"}],
    }
    assert turns[0] == {
        "reply": "r0",
        "command": "ls",
        "exit_code": 0,
        "observation": "é\nb",
        "stop": "stop",
        "generate_s": 0.1235,
        "tool_s": 2.0,
    }
    assert (turns[1]["command"], turns[1]["stop"]) == (None, "length")
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_a_number_that_is_not_finite_is_null_in_every_row(tmp_path):
    """NaN and -Infinity are not JSON: other readers refuse the whole line."""
    log = RunLog(tmp_path)
    log.metrics(1, {"ratio_max": -math.inf, "loss": math.nan, "reward": 0.5})
    odd = batch()
    odd.groups[0].trajectories[0].info["steps"][0]["score"] = {"deep": [math.inf, 1.0]}
    log.trajectories(1, odd)
    log.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    for path in (log.metrics_path, log.trajectories_path):
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=refuse)
    assert read_jsonl(log.metrics_path) == [{"step": 1, "ratio_max": None, "loss": None, "reward": 0.5}]
    assert read_jsonl(log.trajectories_path)[0]["turns"][0]["score"] == {"deep": [None, 1.0]}


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00\n", b"[1, 2]\n", b"{}\n", b'{"step": "x"}\n', b"{{{{\n", b"null\n"])
def test_a_damaged_row_costs_no_row_after_it(tmp_path, damage, caplog):
    path = tmp_path / "m.jsonl"
    written(path, [1, 2, 3])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage + lines[1] + lines[2])
    assert steps_of(path) == [1, 2, 3]
    with caplog.at_level(logging.WARNING):
        written(path, [4], resume=3)
    assert steps_of(path) == [1, 2, 3, 4] and path.read_bytes().startswith(b"".join(lines))
    assert "1 lines are no rows" in caplog.text


def test_going_on_needs_no_room_on_the_disk(tmp_path):
    with disk.small_disk(tmp_path / "disk") as small:
        path = small / "m.jsonl"
        written(path, range(1, 1001))
        filler = disk.fill(small)
        lines = JsonLines(path, 500)
        assert steps_of(path) == list(range(1, 501))
        filler.unlink()
        lines.write([{"step": 501}])
        lines.close()
        assert steps_of(path)[-1] == 501


def test_both_files_go_on_together(tmp_path):
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.metrics(step, {"reward": 0.0})
        log.trajectories(step, batch())
    log.close()
    log = RunLog(tmp_path, resume_step=2)
    log.metrics(3, {"reward": 1.0})
    log.close()
    assert read_jsonl(log.metrics_path)[-1] == {"step": 3, "reward": 1.0}
    assert steps_of(log.metrics_path) == [1, 2, 3]
    assert steps_of(log.trajectories_path) == [1, 2]
    assert all(json.dumps(row) for row in read_jsonl(log.trajectories_path))

"""`python -m launchers.train` as a process: to the end, killed, interrupted, and started wrongly."""

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from venusrl.observe.events import read_events
from venusrl.observe.run_log import read_jsonl
from venusrl.observe.trace import read_trace
from venusrl.scheduling import POLICIES

from .. import disk
from . import programs
from .programs import STEPS


def test_a_run_leaves_its_records(finished):
    workdir, output = finished
    rows = read_jsonl(workdir / "metrics.jsonl")
    assert programs.steps(workdir) == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "heldout_success" in row] == [0, STEPS]
    for row in rows:
        if "reward" in row:
            assert 0.0 <= row["reward"] <= 1.0 and row["staleness_max"] == 0.0  # async_factor 1.0
            assert row["generated_tokens"] > 0 and row["failed_groups"] == 0 and row["checkpoint_failures"] == 0
            assert all(value is not None for value in row.values())  # no number that JSON has no word for
            sources = {name: row[f"length_from_{name}"] for name in ("predictor", "group_mean", "run_mean", "none")}
            assert sources["predictor"] == 0 and sum(sources.values()) > 0  # nothing predicts live
            assert row["nothing_to_learn"] in (0.0, 1.0) and row["nonfinite_steps"] == 0
    minutes = [row["train_minutes"] for row in rows]
    assert minutes == sorted(minutes) and minutes[-1] > 0

    episodes = read_jsonl(workdir / "trajectories.jsonl")
    assert len(episodes) == STEPS * 2 * 2  # groups of an update, trajectories of a group
    assert len({e["id"] for e in episodes}) == len(episodes)
    assert len({(e["epoch"], e["prompt_id"]) for e in episodes}) == STEPS * 2
    for episode in episodes:
        assert episode["messages"][0]["role"] == "user" and 1 <= len(episode["turns"]) <= 2
        assert episode["start_version"] == episode["step"] - 1
        assert all({"reply", "command", "observation", "stop"} <= set(turn) for turn in episode["turns"])

    assert (workdir / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list((workdir / "tensorboard").glob("events.*"))
    assert {p.name for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()} == {str(STEPS - 1), str(STEPS)}
    assert f"{STEPS} of {STEPS}" in output and "Traceback" not in output


def test_a_run_says_little(finished):
    """A line a step, a table at the end; no page of the checkpoint library."""
    _, output = finished
    lines = [line for line in output.splitlines() if line.strip()]
    assert sum(line.startswith("step ") for line in lines) == STEPS + 2
    assert len(lines) < STEPS + 30


def test_an_override_arrives(finished):
    workdir, _ = finished
    config = json.loads((workdir / "config.json").read_text())
    assert config["learner"]["learning_rate"] == 2.5e-4
    assert config["steps"] == STEPS and config["rollout"]["prefill_rows"] == [4]


def shown(workdir) -> set[tuple[int, str]]:
    """(step, tag) of what TensorBoard has of a run."""
    files = sorted((workdir / "tensorboard").glob("events.*"))
    events = [event for path in files for _, event in read_events(path)]
    return {(event.step, value.tag) for event in events for value in event.summary.value}


def measured(workdir) -> set[tuple[int, str]]:
    """(step, name) of what metrics.jsonl has of it."""
    rows = read_jsonl(workdir / "metrics.jsonl")
    return {(row["step"], name) for row in rows for name in row if name != "step"}


def kill_and_go_on(checkpoint, workdir, finished, ready, delay: float) -> None:
    process = programs.start(workdir, checkpoint)
    try:
        programs.wait_for(process, ready)
        time.sleep(delay)
        below = programs.descendants(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before the kill; the moment is too late"
    assert measured(workdir) <= shown(workdir)
    deadline = time.monotonic() + 10
    while programs.alive(below):
        assert time.monotonic() < deadline, "processes of the killed run are left"
        time.sleep(0.05)

    code, output = programs.run(workdir, checkpoint)
    assert code == 0, output
    # OpenRLHF#1322 and its kin: prompts that were open at the save were skipped, or trained twice.
    assert programs.trained(workdir) == programs.trained(finished[0])
    assert programs.steps(workdir) == list(range(1, STEPS + 1))
    ids = [row["id"] for row in read_jsonl(workdir / "trajectories.jsonl")]
    assert len(set(ids)) == len(ids)
    evaluated = [row["step"] for row in read_jsonl(workdir / "metrics.jsonl") if "heldout_success" in row]
    assert evaluated == [0, STEPS]  # once each
    assert shown(workdir) == measured(workdir)


def test_kill_9_and_the_same_command_goes_on(checkpoint, tmp_path, finished):
    moment = random.Random().uniform(0.0, 0.5)
    print(f"killed {moment:.3f} s after step 1")
    kill_and_go_on(checkpoint, tmp_path, finished, lambda: programs.steps(tmp_path), moment)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_kill_9_at_other_moments(checkpoint, tmp_path, finished, after):
    moment = random.Random(after).uniform(0.0, 0.3)
    if after == 0:  # in the first step, before there is a checkpoint
        rows = tmp_path / "metrics.jsonl"
        kill_and_go_on(checkpoint, tmp_path, finished, lambda: read_jsonl(rows), moment)
    else:
        kill_and_go_on(checkpoint, tmp_path, finished, lambda: len(programs.steps(tmp_path)) >= after, moment)


@pytest.mark.slow
def test_kill_9_again_and_again(checkpoint, tmp_path, finished):
    rng = random.Random()
    for _ in range(4):
        process = programs.start(tmp_path, checkpoint)
        time.sleep(rng.uniform(2.0, 9.0))
        process.kill()
        process.communicate()
    code, output = programs.run(tmp_path, checkpoint)
    assert code == 0, output
    assert programs.trained(tmp_path) == programs.trained(finished[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # the latter: the terminal is closed
def test_a_signal_saves_and_leaves(checkpoint, tmp_path, number):
    process = programs.start(tmp_path, checkpoint, steps=1000, checkpoint__every=1000)
    try:
        programs.wait_for(process, lambda: programs.steps(tmp_path))
        time.sleep(random.Random().uniform(0.0, 0.5))
        below = programs.descendants(process.pid)
        process.send_signal(number)
        asked = time.monotonic()
        output, _ = process.communicate(timeout=60)
        took = time.monotonic() - asked
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert took < 10, f"{took:.1f} s"
    assert "Traceback" not in output and "stopping: saving" in output
    assert not programs.alive(below)
    done = programs.steps(tmp_path)[-1]
    assert (tmp_path / "checkpoints" / str(done)).is_dir()  # saved, though checkpoint.every is far away
    assert f"{done} of 1000" in output


@pytest.mark.slow
@pytest.mark.parametrize("output", ["| head -1 >/dev/null", ">&-", ">/dev/full"])
def test_a_run_whose_output_goes_nowhere_trains_to_its_end(checkpoint, tmp_path, output):
    """The first ended after two lines, with nothing saved; the second with a traceback."""
    command = ["bash", "-c", f'"$@" {output}; exit ${{PIPESTATUS[0]}}', "bash", *programs.command(tmp_path, checkpoint)]
    done = subprocess.run(command, cwd=programs.ROOT, capture_output=True, text=True, timeout=170)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "checkpoints" / str(STEPS)).is_dir()
    assert programs.steps(tmp_path) == list(range(1, STEPS + 1))


def test_the_time_limit_ends_with_an_evaluation(checkpoint, tmp_path):
    """Also where it passes while trajectories are waited for; without checkpoints but the last."""
    code, output = programs.run(tmp_path, checkpoint, steps=1000, max_minutes=0.02, checkpoint__every=0)
    assert code == 0, output
    evaluated = [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "heldout_success" in row]
    last = max(programs.steps(tmp_path), default=0)
    assert evaluated == sorted({0, last})
    assert (tmp_path / "checkpoints" / str(last)).is_dir()


@pytest.mark.slow
def test_sigterm_during_the_first_evaluation_then_on(checkpoint, tmp_path, finished):
    process = programs.start(tmp_path, checkpoint, eval__tasks=400)
    try:
        programs.wait_for(process, lambda: (tmp_path / "tensorboard").is_dir())
        time.sleep(3.0)
        assert not read_jsonl(tmp_path / "metrics.jsonl")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in output
    code, output = programs.run(tmp_path, checkpoint)
    assert code == 0, output
    assert programs.trained(tmp_path) == programs.trained(finished[0])


@pytest.mark.slow
def test_a_finished_run_started_again_changes_nothing(checkpoint, tmp_path, finished):
    again = tmp_path / "again"
    shutil.copytree(finished[0], again)
    code, output = programs.run(again, checkpoint)
    assert code == 0, output
    for name in ("metrics.jsonl", "trajectories.jsonl"):
        assert (again / name).read_text() == (finished[0] / name).read_text()


@pytest.mark.slow
def test_a_longer_run_goes_on_from_a_finished_one(checkpoint, tmp_path, finished):
    again = tmp_path / "again"
    shutil.copytree(finished[0], again)
    code, output = programs.run(again, checkpoint, steps=STEPS + 2)
    assert code == 0, output
    assert programs.steps(again) == list(range(1, STEPS + 3))
    prompts = [(row["epoch"], row["prompt_id"]) for row in read_jsonl(again / "trajectories.jsonl")]
    assert len(set(prompts)) == (STEPS + 2) * 2


@pytest.mark.slow
def test_stale_groups_survive_a_kill(checkpoint, tmp_path):
    """With async_factor 2.0 groups are open and ready at every save."""
    options = {"async_factor": 2.0, "steps": 6}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert programs.run(whole, checkpoint, **options)[0] == 0
    process = programs.start(cut, checkpoint, **options)
    programs.wait_for(process, lambda: len(programs.steps(cut)) >= 3)
    process.kill()
    process.communicate()
    code, output = programs.run(cut, checkpoint, **options)
    assert code == 0, output
    assert [(e, p) for e, p in sorted(t[1:] for t in programs.trained(cut))] == sorted(
        t[1:] for t in programs.trained(whole)
    )
    rows = [row for row in read_jsonl(cut / "metrics.jsonl") if "reward" in row]
    assert max(row["staleness_max"] for row in rows) <= 1.0


@pytest.fixture(scope="module")
def mistakes(checkpoint, finished, forked, tmp_path_factory):
    """Exit code and output of programs that are started wrongly, all at once."""
    folder = tmp_path_factory.mktemp("mistakes")
    damaged, cut = folder / "damaged", folder / "cut"
    for broken in (damaged, cut):
        shutil.copytree(checkpoint, broken)
    (damaged / "model.safetensors").write_bytes(b"\xff" * 4096)
    whole = (checkpoint / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for name in ("other-seed", "other-tasks", "cut-config", "other-state"):
        shutil.copytree(finished[0], folder / name)
    text = (finished[0] / "config.json").read_bytes()
    (folder / "cut-config" / "config.json").write_bytes(text[: len(text) // 2])
    for extra in (folder / "other-state" / "checkpoints").glob("*/extra/*"):
        state = json.loads(extra.read_text()) if extra.name == "metadata" else None
        if state is not None:
            del state["coordinator"]["cursor"]
            extra.write_text(json.dumps(state))
    started = {  # those that read a model or a checkpoint, which a forked process cannot
        "missing": programs.start(folder / "a", folder / "nowhere"),
        "damaged": programs.start(folder / "b", damaged),
        "cut": programs.start(folder / "c", cut),
        "other state": programs.start(folder / "other-state", checkpoint),
    }
    cases = {
        "unknown field": programs.command(folder / "d", checkpoint, learner__learning_rat=1),
        "other seed": programs.command(folder / "other-seed", checkpoint, seed=5),
        "other tasks": programs.command(folder / "other-tasks", checkpoint, env__max_turns=3),
        "no config": programs.command(folder / "g", checkpoint, config="configs/nope.py"),
        "idle switch": programs.command(folder / "h", checkpoint, scheduler__name="slime", scheduler__residency=False),
        "unknown tasks": programs.command(folder / "e", checkpoint, env__name="chess"),
        "bad value": programs.command(folder / "f", checkpoint, rollout__temperature=-0.5),
        "empty workdir": programs.command("", checkpoint),
        "file as workdir": programs.command(damaged / "model.safetensors", checkpoint),
        "below a file": programs.command(damaged / "model.safetensors" / "run", checkpoint),
        "cut config": programs.command(folder / "cut-config", checkpoint),
        "removed field": programs.command(folder / "i", checkpoint, rollout__keep_kv=True),
        "supervised": programs.command(folder / "j", checkpoint, learner__objective="sft"),
        "none of a thousand": programs.command(folder / "k", checkpoint, eval__tasks=1000),
        "negative keep": programs.command(folder / "l", checkpoint, checkpoint__keep=-1),
    }
    answers = forked.run_all([("launchers.train", command[3:]) for command in cases.values()])
    ended = {name: (*p.communicate(timeout=120), p.returncode)[::2] for name, p in started.items()}
    return ended | {name: (output, code) for name, (code, output) in zip(cases, answers, strict=True)}


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("missing", ["nowhere"]),
        ("damaged", ["CheckpointError", "model.safetensors"]),
        ("cut", ["CheckpointError", "model.safetensors"]),
        ("unknown field", ["--config.learner.learning_rat names no field", 'Did you mean "learning_rate"']),
        ("other seed", ["config.seed=5", "started with 0", "--workdir"]),
        ("other tasks", ["config.env.max_turns=3", "started with 2", "--workdir"]),
        ("no config", ["--config cannot be loaded", "configs/nope.py"]),
        ("idle switch", ["scheduler.residency=False", "scheduler.name='slime'", "leave it at True"]),
        ("unknown tasks", ["env.name='chess'", "repair, bash"]),
        ("bad value", ["config.rollout.temperature=-0.5"]),
        ("empty workdir", ["--workdir=''"]),
        ("file as workdir", ["--workdir=", "model.safetensors is no folder"]),
        ("below a file", ["--workdir=", "model.safetensors is no folder"]),
        ("cut config", ["cut-config/config.json is cut short or no JSON", "--workdir"]),
        ("other state", ["checkpoint 4 of", "KeyError: 'cursor'", "--workdir"]),
        ("removed field", ["--config.rollout.keep_kv", "config.rollout.on_update replaced it"]),
        ("supervised", ["config.learner.objective='sft'", "use 'grpo'"]),
        ("none of a thousand", ["config.eval.tasks=1000", "config.env.heldout_tasks=512"]),
        ("negative keep", ["config.checkpoint.keep=-1", "give 0 to"]),
    ],
)
def test_a_mistake_is_one_line(mistakes, mistake, words):
    output, code = mistakes[mistake]
    lines = [line for line in output.splitlines() if line.strip()]
    assert code == 1
    assert "Traceback" not in output
    assert len(lines) == 1, output
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [name for name in sorted(POLICIES) if name != "venus"])
def test_every_scheduler_trains(scheduler, checkpoint, tmp_path):
    """Asynchronously, so that the rule that goes with it has something to say; `venus` is every other test's."""
    code, output = programs.run(tmp_path, checkpoint, scheduler__name=scheduler, async_factor=2.0)
    assert code == 0, output
    assert programs.steps(tmp_path) == list(range(1, STEPS + 1))


def test_a_trace_shows_every_turn(checkpoint, tmp_path):
    """Slots never hold two actions at once; every turn of every trained trajectory is there, and its tools."""
    command = [*programs.command(tmp_path, checkpoint, steps=1), "--trace"]
    done = subprocess.run(command, cwd=programs.ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    events = [e for e in read_trace(tmp_path / "trace-0.json") if e["ph"] == "X"]
    slots = {}
    for e in events:
        if "trajectory" in e["args"] and e["name"] != "generate":
            slots.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for busy in slots.values():
        assert all(b[0] >= a[1] - 1 for a, b in itertools.pairwise(sorted(busy)))
    turns = sum(len(e["turns"]) for e in read_jsonl(tmp_path / "trajectories.jsonl"))
    assert sum(e["name"] == "generate" for e in events) >= turns
    assert sum(e["name"] == "tool" for e in events) >= turns
    assert [e["name"] for e in events if e["name"].startswith("version")] == ["version 1"]


def few_lines(output: str) -> None:
    """Warnings and steps, no traceback and no page of a library."""
    assert "Traceback" not in output, output[-3000:]
    assert len(output.splitlines()) < 60 and all(len(line) < 600 for line in output.splitlines()), output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("freed", [True, False])
def test_a_disk_that_fills_up_ends_no_run(checkpoint, tmp_path, finished, freed):
    """Rows wait and checkpoints are tried again; without room at the end a line says so, and a checkpoint stays."""
    with disk.small_disk(tmp_path / "disk", megabytes=60) as small:
        workdir = small / "run"
        steps = 20 if freed else STEPS
        process = programs.start(workdir, checkpoint, steps=steps)
        programs.wait_for(process, lambda: (workdir / "checkpoints" / "1").is_dir())
        filler = disk.fill(small)
        if freed:
            time.sleep(1.5)  # some steps
            filler.unlink()
        output, _ = process.communicate(timeout=170)
        few_lines(output)
        if freed:
            assert process.returncode == 0 and "No space left on device" in output, output
        else:
            assert process.returncode == 1, output
            last = output.strip().splitlines()[-1]
            assert last.startswith("CheckpointError: saving to ") and "earlier checkpoints are kept: [1" in last
            code, output = programs.run(workdir, checkpoint)
            assert code == 1 and output.count("\n") == 1 and "No space left on device" in output, output
            filler.unlink()
            code, output = programs.run(workdir, checkpoint)
            assert code == 0, output
        assert programs.steps(workdir) == list(range(1, steps + 1))
        assert {step for step, *_ in programs.trained(workdir)} == set(range(1, steps + 1))
        assert freed or programs.trained(workdir) == programs.trained(finished[0])
        assert (workdir / "checkpoints" / str(steps)).is_dir()
        assert shown(workdir) == measured(workdir)


@pytest.mark.slow
def test_a_folder_that_is_removed_under_a_run_is_made_again_and_the_run_saved(checkpoint, tmp_path):
    workdir = tmp_path / "run"
    process = programs.start(workdir, checkpoint)
    programs.wait_for(process, lambda: (workdir / "checkpoints" / "1").is_dir())
    shutil.rmtree(workdir, ignore_errors=True)
    output, _ = process.communicate(timeout=170)
    few_lines(output)
    assert process.returncode == 0, output
    assert (workdir / "checkpoints" / str(STEPS)).is_dir() and (workdir / "config.json").is_file()
    assert programs.steps(workdir)[-1] == STEPS
    code, output = programs.run(workdir, checkpoint, steps=STEPS + 1)
    assert code == 0, output
    assert programs.steps(workdir)[-1] == STEPS + 1


@pytest.mark.slow
def test_a_run_of_an_older_release_goes_on(checkpoint, tmp_path, finished):
    """Its config.json has fields that are gone and lacks others; so does the coordinator's state in its checkpoints."""
    again = tmp_path / "again"
    shutil.copytree(finished[0], again)
    config = json.loads((again / "config.json").read_text())
    config["rollout"]["keep_kv"] = False
    for name in ("on_update", "page", "residency", "stall_s", "workers", "lanes", "attention"):
        del config["rollout"][name]
    (again / "config.json").write_text(json.dumps(config))
    for path in (again / "checkpoints").glob("*/extra/metadata"):
        extra = json.loads(path.read_text())
        del extra["coordinator"]["counters"]["discarded"]
        path.write_text(json.dumps(extra | {"heldout": []}))
    code, output = programs.run(again, checkpoint, steps=STEPS + 1)
    assert code == 0, output
    assert "config.rollout.keep_kv=False is gone; config.rollout.on_update='recompute' replaced it" in output
    assert "what it lacks takes its default: config.rollout.attention='auto'" in output
    assert programs.steps(again) == list(range(1, STEPS + 2))


def test_an_evaluation_that_is_asked_for_wrongly_is_one_line(finished, forked, tmp_path):
    shutil.copytree(finished[0], tmp_path / "damaged")
    for step in (tmp_path / "damaged" / "checkpoints").iterdir():
        for file in step.rglob("*"):
            if file.is_file():
                file.write_bytes(b"\0damaged")
    cases = {
        (f"--workdir={finished[0]}", "--tasks=1000"): "--tasks=1000 is above the 512 held-out tasks",
        (f"--workdir={finished[0]}", "--temperature=-1"): "--temperature=-1.0: give a finite number",
    }
    answers = forked.run_all([("launchers.evaluate", list(case)) for case in cases], processes=1)
    for (case, words), (code, output) in zip(cases.items(), answers, strict=True):
        assert code == 1 and words in output and output.count("\n") == 1, f"{case}: {output}"
    command = [sys.executable, "-m", "launchers.evaluate", f"--workdir={tmp_path / 'damaged'}", "--tasks=1"]
    done = subprocess.run(command, cwd=programs.ROOT, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and "can be read" in said.strip().splitlines()[-1] and "Traceback" not in said, said

"""The generated workload has the distributions it claims; a trace file comes back as it is."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from venusrl.core.errors import ConfigError, TaskError
from venusrl.sim.workload import OUTPUT_TOKENS, TOOL_S, TURNS, Generated, Replay, TrajectorySpec

TRACES = Path(os.environ.get("VENUSRL_TRACES", "../shared/traces"))


@pytest.fixture(scope="module")
def drawn() -> list[list[TrajectorySpec]]:
    workload = Generated(0)
    return [[workload.trajectory(p, 0, i, 0) for i in range(8)] for p in range(250)]


def test_medians_are_those_of_the_traces(drawn):
    specs = [s for group in drawn for s in group]
    assert np.median([len(s.outputs) for s in specs]) == pytest.approx(TURNS[5], rel=0.15)
    assert np.median([n for s in specs for n in s.outputs]) == pytest.approx(OUTPUT_TOKENS[5], rel=0.05)
    assert np.mean([n for s in specs for n in s.outputs]) == pytest.approx(258, rel=0.1)
    assert np.mean([x for s in specs for x in s.tools]) == pytest.approx(3.56, rel=0.25)
    assert np.quantile([x for s in specs for x in s.tools], 0.9) == pytest.approx(TOOL_S[7], rel=0.1)


def test_group_mates_are_alike(drawn):
    turns = np.log([[len(s.outputs) for s in group] for group in drawn])
    within = turns.var(axis=1, ddof=1).mean()
    assert 1 - within / turns.var() == pytest.approx(0.64, abs=0.12)


def test_the_same_numbers_give_the_same_trajectory_and_others_another():
    workload = Generated(3)
    assert workload.trajectory(5, 0, 1, 0) == Generated(3).trajectory(5, 0, 1, 0)
    others = [workload.trajectory(*k) for k in ((6, 0, 1, 0), (5, 1, 1, 0), (5, 0, 2, 0), (5, 0, 1, 1))]
    assert all(workload.trajectory(5, 0, 1, 0) != other for other in others)
    assert workload.trajectory(5, 0, 1, 0).prompt == workload.trajectory(5, 0, 2, 0).prompt


def test_limits_are_kept(drawn):
    assert max(s.length for g in drawn for s in g) <= 131_072
    assert all(len(s.outputs) == len(s.observations) == len(s.tools) >= 1 for g in drawn for s in g)
    spec = TrajectorySpec(10, (5, 5, 5), (3, 3, 3), (1.0, 1.0, 1.0))
    assert spec.cut(100, 2).outputs == (5, 5)
    assert spec.cut(22, 9).outputs == (5,) and spec.cut(23, 9).length == 23
    assert spec.cut(12, 9).outputs == (2,)
    assert spec.cut(7, 9) == TrajectorySpec(6, (1,), (3,), (1.0,))


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="tool_scale=-1"):
        Generated(tool_scale=-1)
    with pytest.raises(ConfigError, match="correlation=2"):
        Generated(correlation=2)


def test_replay_reads_both_kinds_of_runs(tmp_path):
    exact = [
        {"prompt_tokens": 100, "output_tokens": 20, "tools": [{"dur": 1.5}, {"dur": 0.5}]},
        {"prompt_tokens": 150, "output_tokens": 30, "tools": []},
    ]
    chars = [{"out_chars": 40, "obs_chars": 80, "tool_s": 2.5}]
    path = tmp_path / "runs.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for task, turns in (("b", exact), ("a", chars), ("a", [])):
            file.write(json.dumps({"task": task, "turns": turns}) + "\n")
    replay = Replay(path)
    assert replay.num_tasks == 2
    assert replay.trajectory(1, 0, 7, 0) == TrajectorySpec(100, (20, 30), (30, 0), (2.0, 0))
    assert replay.trajectory(0, 0, 0, 0).outputs == (10,)


@pytest.mark.parametrize("text", ["not json", "{}", '{"task": 1, "turns": [{}]}', "[]", ""])
def test_a_damaged_trace_is_told_by_line(tmp_path, text):
    path = tmp_path / "runs.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(TaskError, match=r"runs.jsonl(, line 1: not a run|: no run)"):
        Replay(path)
    with pytest.raises(TaskError, match="cannot be read as a trace"):
        Replay(tmp_path / "missing.jsonl")


@pytest.mark.skipif(not TRACES.is_dir(), reason="real traces are not here; set VENUSRL_TRACES")
@pytest.mark.parametrize("file", ["agentcgroup/trajectories.jsonl.gz", "terminal_bench/miniswe_sonnet4_turns.jsonl.gz"])
def test_real_traces_replay(file):
    replay = Replay(TRACES / file)
    specs = [replay.trajectory(p, 0, i, 0) for p in range(replay.num_tasks) for i in range(4)]
    assert replay.num_tasks > 40 and 10 < np.median([len(s.outputs) for s in specs]) < 60

"""Lanes: jobs at the same time, their errors, and how many there are."""

import threading

import numpy as np
import pytest

from tests.rollout.engine import tiny
from tests.rollout.engine.tiny import ask, run
from venusrl.rollout.engine import lanes
from venusrl.rollout.engine.lanes import Lanes, fitting


def test_jobs_run_at_the_same_time_and_answer_in_order():
    meeting = threading.Barrier(3, timeout=30)

    def job(i):
        meeting.wait()  # passes only while all three run
        return i

    three = Lanes(3)
    assert three.run([lambda i=i: job(i) for i in range(3)]) == [0, 1, 2]
    assert three.run([lambda: 7]) == [7]
    assert three.run([]) == []


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_comes_when_all_have_ended(bad):
    ended = []

    def job(i):
        if i == bad:
            raise ZeroDivisionError(i)
        ended.append(i)

    with pytest.raises(ZeroDivisionError, match=str(bad)):
        Lanes(3).run([lambda i=i: job(i) for i in range(3)])
    assert sorted(ended) == [i for i in range(3) if i != bad]


@pytest.mark.parametrize(
    ("device", "cores", "values", "slots", "expected"),
    [
        ("cpu", 2, 10, 64, 2),
        ("cpu", 1, 10, 64, 1),
        ("cpu", 16, 10, 64, 8),
        ("cpu", 2, 10, 8, 1),
        ("cpu", 2, 10, 3, 1),
        ("cpu", 2, 10**9, 64, 1),
        ("gpu", 2, 10, 64, 1),
    ],
)
def test_as_many_as_fit(monkeypatch, device, cores, values, slots, expected):
    monkeypatch.setattr(lanes.jax, "default_backend", lambda: device)
    monkeypatch.setattr(lanes.os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert fitting({"a": np.broadcast_to(np.float32(0), values)}, slots) == expected


def test_rows_fill_lanes_evenly(weights):
    """Four sequences on five slots of two lanes: two each, whatever was idle longest."""
    engine = tiny.engine(weights, slots=5, lanes=2)
    assert engine.options.lane_rows == 3
    run(engine, [ask("before", tiny.tokens(1, 4), 3)])
    for i in range(4):
        engine.submit(ask(str(i), tiny.tokens(i, 4), 9))
    engine.step()
    rows = [s.row for s in engine._running.values()]
    assert sorted(row // 3 for row in rows) == [0, 0, 1, 1]
    assert len(run(engine, [], {str(i): tiny.Collected() for i in range(4)})) == 4

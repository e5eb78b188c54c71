"""What a client may think of its worker."""

import random

import pytest

from venusrl.rollout.remote.link import Link, State


def connected(reconnect_s: float = 10.0) -> Link:
    link = Link(reconnect_s)
    link.answered("p")
    assert link.state is State.JOINING
    link.joined()
    assert link.state is State.CONNECTED
    return link


def test_a_worker_that_answers_again_in_time_keeps_its_requests():
    link = connected()
    link.silent(100.0, "no answer")
    assert link.state is State.UNREACHABLE
    link.silent(109.0, "no answer", since=104.0)  # counted from the first
    assert link.state is State.UNREACHABLE and link.left(109.0) == 1.0
    link.answered("p")
    assert link.state is State.CONNECTED
    link.silent(200.0, "no answer")  # counted anew
    link.silent(209.0, "no answer")
    assert link.state is State.UNREACHABLE


def test_silence_is_counted_from_the_call_that_was_not_answered():
    link = connected()
    link.silent(105.0, "no answer", since=100.0)
    assert link.left(105.0) == 5.0
    link.passed(110.0)
    assert link.state is State.AWAY


def test_a_worker_that_is_silent_for_too_long_is_away_and_joins_again():
    link = connected()
    link.silent(100.0, "no answer")
    link.passed(110.0)
    assert link.state is State.AWAY
    link.answered("p")
    assert link.state is State.JOINING  # the same process, but it has missed weights


def test_another_process_at_the_address_has_nothing_of_the_first():
    for silent in (False, True):
        link = connected()
        if silent:
            link.silent(0.0, "no answer")
        link.answered("q")
        assert link.state is State.AWAY and "again" in link.reason
        link.answered("q")
        assert link.state is State.JOINING


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_requests_are_only_where_they_can_go_on(seed):
    rng = random.Random(seed)
    reconnect_s = rng.choice([0.0, 1.0, 5.0])
    link, now, silent_since, process = Link(reconnect_s), 0.0, None, None
    for _ in range(400):
        now += rng.random()
        before = link.state
        event = rng.choice(["answered"] * 4 + ["silent"] * 3 + ["joined", "lost", "passed"])
        if event == "answered":
            instance = rng.choice("ppppq")
            link.answered(instance)
            if before is State.AWAY:
                process = instance
        elif event == "silent":
            link.silent(now, "why")
        elif event == "passed":
            link.passed(now)
        elif event == "lost":
            link.lost("why")
        else:
            link.joined()
        if link.state is State.CONNECTED:
            silent_since = None
            assert before is not State.AWAY, "requests before it joined"
            if before is State.JOINING:
                assert event == "joined"
            if event == "answered":
                assert instance == process, "requests of another process"
        if link.state is State.UNREACHABLE:
            silent_since = now if silent_since is None else silent_since
            assert before in (State.CONNECTED, State.UNREACHABLE)
            if event in ("silent", "passed"):
                assert now - silent_since < reconnect_s, "requests wait for too long"
        if event == "lost":
            assert link.state is State.AWAY and link.reason == "why"
        if link.state is not State.UNREACHABLE:
            silent_since = None

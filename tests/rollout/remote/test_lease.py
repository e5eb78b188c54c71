"""A worker belongs to one session of one run at a time."""

import random

import pytest

from venusrl.rollout.remote.lease import LEASE_S, Held, Lease


def test_a_run_keeps_the_worker_from_others_while_it_calls():
    lease = Lease()
    lease.check(0.0, "")  # nobody has it
    assert lease.claim(0.0, "one@host:/runs/a", "p", "s1", start=True)
    for now in (10.0, 20.0, 30.0):
        lease.check(now, "s1")
    for session in ("", "s2"):
        with pytest.raises(Held, match="one@host:/runs/a for 15 s more"):
            lease.check(30.0, session)
    with pytest.raises(Held, match="one@host:/runs/a for 10 s more"):
        lease.claim(35.0, "another", "p", "s2", start=True)
    assert not lease.claim(35.0, "one@host:/runs/a", "p", "s1", start=False)
    lease.check(34.0 + LEASE_S, "s1")


def test_silence_gives_the_worker_up():
    lease = Lease()
    lease.claim(0.0, "one", "p", "s1", start=True)
    assert lease.claim(LEASE_S, "another", "p", "s2", start=True)
    with pytest.raises(Held, match="another"):
        lease.check(LEASE_S, "s1")
    with pytest.raises(Held, match="another"):
        lease.claim(LEASE_S, "one", "p", "s1", start=False)


def test_a_process_may_begin_anew_with_its_worker():
    lease = Lease()
    lease.claim(0.0, "one", "p", "s1", start=True)
    assert lease.claim(1.0, "one", "p", "s2", start=True)
    with pytest.raises(Held):
        lease.check(1.0, "s1")
    with pytest.raises(Held, match="session s1 of run one has ended"):
        lease.claim(2.0, "one", "p", "s1", start=False)
    lease.check(2.0, "s2")


def test_the_same_run_started_again_has_it_at_once_and_its_old_process_has_not():
    """Should both live, they do not take it from each other in turns."""
    lease = Lease()
    lease.claim(0.0, "one", "p", "s1", start=True, first=True)
    assert lease.claim(1.0, "one", "q", "s2", start=True, first=True)
    for session, start in (("s1", False), ("s3", True)):
        with pytest.raises(Held, match="belongs to run one"):
            lease.claim(2.0, "one", "p", session, start)
    lease.check(2.0, "s2")
    assert lease.claim(2.0 + LEASE_S, "one", "p", "s3", start=True)


def test_a_run_that_says_goodbye_is_not_waited_for():
    lease = Lease()
    lease.claim(0.0, "one", "p", "s1", start=True)
    lease.leave("someone")
    with pytest.raises(Held):
        lease.check(0.0, "")
    lease.leave("s1")
    assert lease.left(0.0) == 0.0
    lease.check(0.0, "")
    assert lease.claim(0.0, "another", "p", "s2", start=True)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_two_runs_never_have_it_together(seed):
    """Against a plain model: who called last, and when."""
    rng, lease, now = random.Random(seed), Lease(5.0), 0.0
    owner, until = None, -1.0  # (run, process, session)
    for _ in range(500):
        now += rng.choice([0.0, 0.5, 1.0, 6.0])
        run = rng.choice("abc")
        process = run + rng.choice("pq")
        session, act = (
            process + rng.choice("12"),
            rng.choice(["claim", "start", "first", "check", "anonymous", "leave"]),
        )
        live = owner is not None and now < until
        try:
            if act in ("claim", "start", "first"):
                changed = lease.claim(now, run, process, session, act != "claim", act == "first")
                assert not live or owner[1] == process or (owner[0] == run and act == "first")
                assert changed == (owner is None or owner[2] != session)
                assert act != "claim" or not changed
                owner, until = (run, process, session), now + 5.0
            elif act == "check":
                lease.check(now, session)
                assert owner == (run, process, session)
                until = now + 5.0
            elif act == "anonymous":
                lease.check(now, "")
                assert not live
            else:
                lease.leave(session)
                until = now if owner == (run, process, session) else until
        except Held:
            assert live or act in ("claim", "check")
            assert (owner or ("", "", ""))[2] != session or act == "anonymous"
        assert (lease.left(now) > 0) == (owner is not None and now < until)

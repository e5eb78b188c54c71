"""SimWorker: times that one can reckon, and what must add up whatever happens."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.fixtures import PlainCost
from venusrl.sim.worker import Request, SimWorker


def request(name: str, tokens: int, context: int = 10, priority: int = 0) -> Request:
    return Request(name, name.partition("/")[0], min(10, context), context, tokens, priority)


def run(worker: SimWorker, until: float = float("inf")) -> list[tuple[float, str]]:
    """Ends by time."""
    ended = []
    while (due := worker.next_time()) is not None and due <= until:
        ended += [(due, r.name) for r in worker.handle(due)[1]]
    return ended


def test_one_request_alone():
    worker = SimWorker("w", 4, PlainCost())
    worker.submit(0.0, request("a/0", 10, context=100), 0)
    assert run(worker) == [(pytest.approx(1.0 + 10 * 1.1), "a/0")]
    assert (worker.prefilled, worker.decoded) == (100, 10)
    assert worker.prefill_s == pytest.approx(1.0) and worker.decode_s == pytest.approx(11.0)


def test_two_requests_share_every_step_and_the_second_is_prefilled_first():
    worker = SimWorker("w", 4, PlainCost())
    worker.submit(0.0, request("a/0", 10), 0)
    run(worker, until=0.1)
    worker.submit(0.1 + 5 * 1.1, request("b/0", 10, context=110), 0)  # after 5 tokens of the first
    ends = dict((name, at) for at, name in run(worker))
    stalled = 1.1  # 110 tokens of prefill
    assert ends["a/0"] == pytest.approx(0.1 + 5 * 1.1 + stalled + 5 * 1.2)
    assert ends["b/0"] == pytest.approx(ends["a/0"] + 5 * 1.1)


def test_the_next_turn_prefills_only_what_is_new():
    worker = SimWorker("w", 4, PlainCost(), page=1)
    worker.submit(0.0, request("a/0", 10, context=100), 0)
    ((end, _),) = run(worker)
    worker.submit(end, request("a/0", 5, context=130), 110)
    run(worker)
    assert worker.prefilled == 100 + 20 and (worker.hit, worker.asked) == (110, 110)


def test_a_preempted_request_keeps_what_it_made():
    worker = SimWorker("w", 4, PlainCost())
    worker.submit(0.0, request("a/0", 10), 0)
    run(worker, until=0.1)
    assert worker.preempt(0.1 + 3 * 1.1, "a/0") == 3
    assert worker.next_time() is None and not worker.requests


def test_a_request_can_be_preempted_while_it_waits_and_while_it_is_prefilled():
    worker = SimWorker("w", 4, PlainCost(kv_tokens=600))
    worker.submit(0.0, request("a/0", 10, context=400), 0)
    worker.submit(0.0, request("b/0", 10, context=400), 0)
    assert worker.preempt(0.5, "b/0") == 0 and worker.preempt(1.0, "a/0") == 0
    assert run(worker) == [] and worker.cache.running == 0


def test_new_weights_stop_everything_and_drop_all_kv():
    worker = SimWorker("w", 4, PlainCost())
    worker.submit(0.0, request("a/0", 10), 0)
    run(worker, until=0.1)
    stopped = worker.interrupt(0.1 + 4 * 1.1, 2.0)
    assert [(r.name, r.made) for r in stopped] == [("a/0", 4)]
    assert worker.cache.used == 0 and worker.next_time() == pytest.approx(0.1 + 4 * 1.1 + 2.0)
    worker.submit(5.0, request("a/0", 6, context=14), 0)
    assert run(worker) == [(pytest.approx(6.5 + 0.14 + 6 * 1.1), "a/0")]


def test_when_decoding_runs_out_of_kv_low_priority_is_retracted_and_still_ends():
    worker = SimWorker("w", 4, PlainCost(kv_tokens=1600), page=1)
    worker.submit(0.0, request("low/0", 700, context=300, priority=0), 0)
    worker.submit(0.0, request("high/0", 700, context=300, priority=1), 0)
    ends = [name for _, name in run(worker)]
    assert worker.retracted > 0 and ends == ["high/0", "low/0"]
    assert worker.decoded == 1400


def test_priority_orders_those_that_wait():
    worker = SimWorker("w", 4, PlainCost(kv_tokens=700))
    for name, priority in (("a/0", 0), ("b/0", 0), ("c/0", 1)):
        worker.submit(0.0, request(name, 5, context=400, priority=priority), 0)
    worker.set_priority("b/0", 2)
    assert [name for _, name in run(worker)] == ["a/0", "b/0", "c/0"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_tokens_slots_and_pages_add_up(seed):
    rng = random.Random(seed)
    worker = SimWorker("w", 64, PlainCost(rng.choice([1500, 3000, 20_000])))
    now, made, wanted, context = 0.0, {}, {}, {}
    ended: set[str] = set()
    for i in range(40):
        kind = rng.random()
        due = worker.next_time()
        if kind < 0.5:
            name = f"g{i}/0"
            wanted[name], made[name], context[name] = rng.randint(1, 80), 0, rng.randint(10, 200)
            worker.submit(now, request(name, wanted[name], context[name], rng.randrange(3)), 0)
        elif kind < 0.6 and worker.requests:
            name = rng.choice(sorted(worker.requests))
            made[name] += worker.preempt(now, name)
            left = wanted[name] - made[name]
            if left:
                worker.submit(now, request(name, left, context[name] + made[name]), context[name] + made[name])
            else:
                ended.add(name)
        elif kind < 0.65:
            for r in worker.interrupt(now, rng.random()):
                made[r.name] += r.made
                left = wanted[r.name] - made[r.name]
                if left:
                    worker.submit(now, request(r.name, left, context[r.name] + made[r.name]), 0)
                else:
                    ended.add(r.name)
        elif due is not None:
            now = due
            for r in worker.handle(now)[1]:
                made[r.name] += r.made
                ended.add(r.name)
        assert worker.cache.used <= worker.cache.capacity
        assert len(worker._running) + len(worker._prefilling) <= len(worker.requests)
    for _ in range(10_000):
        due = worker.next_time()
        if due is None:
            break
        assert due >= now
        now = due
        for r in worker.handle(now)[1]:
            made[r.name] += r.made
            ended.add(r.name)
    assert ended == set(wanted) and made == wanted
    assert worker.decoded == sum(wanted.values())
    assert worker.cache.running == 0 and not worker.requests


def test_kv_comes_back_from_host_memory_while_the_rest_is_prefilled():
    worker = SimWorker("w", 4, PlainCost(kv_tokens=700), host_tokens=2000)
    worker.submit(0.0, request("a/0", 5, context=400), 0)
    run(worker)
    worker.submit(50.0, request("b/0", 5, context=400), 0)  # takes the place of some of it
    run(worker)
    kept, held = 10 + 384, worker.cache.held("a/0", "a", 10, 500)  # 384 of 395 tokens are whole pages
    assert held < kept
    worker.submit(100.0, request("a/0", 5, context=500), 405)
    assert worker.hit == kept and worker.returned == kept - held
    assert worker.prefilled == 400 + 400 + 500 - kept
    assert worker.next_time() == pytest.approx(100 + max(0.01 * (500 - kept), 0.002 * (kept - held)))

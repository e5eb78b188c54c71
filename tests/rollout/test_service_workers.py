"""Workers that are away, come late and come back: no trajectory is lost with them."""

import asyncio

import pytest

from tests.rollout.bench import SCRIPT, Bench, until
from tests.rollout.scripted import ScriptedEnv, ScriptedWorker
from venusrl.core.clock import WallClock
from venusrl.core.errors import ConfigError, WorkerLost
from venusrl.core.group import Group
from venusrl.rollout.service import RolloutOptions, RolloutService
from venusrl.scheduling import POLICIES, SchedulerOptions, make_policy


class Away(ScriptedWorker):
    """One in another process, which may be away and come back."""

    service: RolloutService

    def lose(self) -> None:
        self.failure = WorkerLost(f"worker {self.name} is lost: no answer")
        self.fail = lambda request: self.failure
        self.service.worker_away(self)
        self.gate.set()

    async def come(self) -> None:
        self.failure, self.fail = None, lambda request: None
        await self.service.join(self)

    async def update_weights(self, params, version: int) -> None:
        if self.failure is not None:
            raise self.failure
        await super().update_weights(params, version)


class Crew(Bench):
    """A service without workers, which join it later."""

    def __init__(self, *names: str, policy):
        self.workers = [Away(SCRIPT, name, slots=2) for name in names]
        self.policy = policy
        options = RolloutOptions(1.0, 64, 5.0)
        self.service = RolloutService({}, policy, SCRIPT.chat, WallClock(), options, max_length=512)
        self.service.set_weights("w3", 3)
        for worker in self.workers:
            worker.service = self.service

    def open(self, groups: int, size: int = 2):
        started = []
        for g in range(groups):
            self.service.open_group(Group(f"g{g}", g, 0, 3, []))
            started += [self.start(ScriptedEnv(turns=2), f"g{g}/{i}", seed=10 * g + i) for i in range(size)]
        return started


@pytest.mark.parametrize("name", sorted(POLICIES))
async def test_under_every_policy_requests_wait_for_a_worker_and_go_on_where_one_is(name):
    crew = Crew("a", "b", policy=make_policy(name, SchedulerOptions(batch_groups=2, eta=1)))
    a, b = crew.workers
    started = crew.open(groups=4)
    await asyncio.wait_for(crew.service.wait_for_workers(some=False), 1)
    await asyncio.sleep(0.02)
    assert crew.service.outcomes.empty()

    a.gate.clear()
    await a.come()  # late
    await asyncio.wait_for(crew.service.wait_for_workers(some=True), 1)
    assert a.version == 3
    await asyncio.wait_for(until(lambda: len(a.running) == 2), 5)
    a.lose()  # the last one: what it has waits
    await asyncio.wait_for(crew.service.wait_for_workers(some=False), 1)
    await asyncio.wait_for(until(lambda: not a.running), 5)
    await crew.service.update_weights("w4", 4)  # nobody is there to take them
    b.gate.clear()
    await b.come()
    assert b.version == 4
    await asyncio.wait_for(until(lambda: b.running), 5)
    await a.come()
    assert a.version == 4
    b.lose()
    b.lose()  # a second time is no different
    await b.come()
    for _ in started:
        outcome = await crew.outcome()
        assert outcome.lost is None and outcome.trajectory.reward == 1.0
    assert {t.id for t in started} == {r.trajectory for w in crew.workers for r in w.requests}
    await crew.service.close()
    assert all(not w.running for w in crew.workers)


async def test_a_worker_that_joins_while_weights_are_published_has_the_newest():
    crew = Crew("a", policy=make_policy("fcfs_action"))
    (a,) = crew.workers
    give, seen = a.update_weights, []

    async def slow(params, version):
        seen.append(version)
        if version == 3:
            await crew.service.update_weights("w4", 4)  # it is not among the workers yet
        await give(params, version)

    a.update_weights = slow
    await a.come()
    assert seen == [3, 4] and a.version == 4


async def test_an_update_is_over_when_the_workers_that_are_there_have_it():
    crew = Crew("a", "b", policy=make_policy("fcfs_action"))
    a, b = crew.workers
    await a.come()
    await b.come()
    b.failure = WorkerLost("worker b is lost: no answer")  # in the middle of it
    await asyncio.wait_for(crew.service.update_weights("w4", 4), 1)
    assert (a.version, b.version) == (4, 3)


async def test_a_worker_that_takes_shorter_sequences_does_not_join():
    crew = Crew("a", policy=make_policy("fcfs_action"))
    crew.workers[0].max_length = 100
    with pytest.raises(ConfigError, match="max_length=100, the others 512"):
        await crew.workers[0].come()


async def test_tokens_that_a_lost_worker_had_made_are_kept():
    whole = await Bench(policy=make_policy("fcfs_action")).run(ScriptedEnv(turns=1), seed=4)
    crew = Crew("a", policy=make_policy("fcfs_action"))
    (a,) = crew.workers
    await a.come()
    made = []

    def fail(request):
        made.append(request)
        if len(made) == 3:
            asyncio.get_running_loop().call_later(0.01, lambda: asyncio.ensure_future(a.come()))
            a.lose()
            return a.failure

    a.fail = fail
    crew.start(ScriptedEnv(turns=1), seed=4)
    outcome = await crew.outcome()
    assert outcome.lost is None and outcome.trajectory.tokens == whole.trajectory.tokens
    assert len(a.requests[1].tokens) == len(a.requests[0].tokens) + 4

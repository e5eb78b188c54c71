"""Held-out evaluation: every task once, the same result again, lost episodes tried again and then named."""

import pytest

from venusrl.core.errors import SandboxLost
from venusrl.core.group import Group
from venusrl.core.trajectory import Trajectory
from venusrl.rollout.evaluation import Evaluation, evaluate
from venusrl.scheduling import POLICIES, SchedulerOptions, make_policy

from .bench import SCRIPT, Bench
from .scripted import ScriptedEnv, ScriptedWorker

pytestmark = pytest.mark.timeout(30)


class Tasks:
    """`size` tasks; task i fails `fails.get(i, 0)` times, and then has reward i % 2."""

    def __init__(self, size: int, fails: dict[int, int] | None = None):
        self._size = size
        self._fails = dict(fails or {})
        self.made: list[int] = []
        self.live = self.most_live = 0

    def __len__(self) -> int:
        return self._size

    def describe(self, index: int) -> dict:
        return {"index": index}

    def make(self, index: int) -> ScriptedEnv:
        self.made.append(index)
        fails = self._fails.get(index, 0) > 0
        if fails:
            self._fails[index] -= 1

        async def act(what):
            self.live += (what == "reset") - (what == "close")
            self.most_live = max(self.most_live, self.live)
            if what == "step" and fails:
                raise SandboxLost(f"sb-{index}", "node-lost")

        return ScriptedEnv(turns=1 + index % 3, reward=float(index % 2), act=act)


async def run(service, tasks, count, concurrency, seed=0):
    return await evaluate(service, tasks, count, concurrency, temperature=1.0, seed=seed)


async def test_every_task_once():
    bench, tasks = Bench(), Tasks(9)
    result = await run(bench.service, tasks, 7, concurrency=3)
    assert sorted(tasks.made) == list(range(7))
    assert [t.index for t in result.trajectories] == list(range(7))
    assert (result.successes, result.rate, result.lost) == (3.0, 3 / 7, ())
    assert tasks.most_live == 3
    bench.check_idle()


async def test_no_more_tasks_than_there_are():
    assert len((await run(Bench().service, Tasks(3), 100, concurrency=8)).trajectories) == 3


async def test_the_same_weights_give_the_same_result_whatever_the_order():
    results = []
    for concurrency, slots in ((1, 1), (8, 3), (8, 8)):
        bench = Bench(ScriptedWorker(SCRIPT, slots=slots))
        results.append(await run(bench.service, Tasks(8), 8, concurrency, seed=3))
    texts = [[t.tokens for t in r.trajectories] for r in results]
    assert texts[0] == texts[1] == texts[2]
    assert len({t.seed for t in results[0].trajectories}) == 8
    other = await run(Bench().service, Tasks(8), 8, 8, seed=4)
    assert [t.tokens for t in other.trajectories] != texts[0]


async def test_a_service_can_be_used_again():
    """ROLL#215, #253: runs with an evaluation every few steps got stuck."""
    bench = Bench()
    first = await run(bench.service, Tasks(5), 5, concurrency=2)
    for _ in range(4):
        again = await run(bench.service, Tasks(5), 5, concurrency=2)
        assert [t.tokens for t in again.trajectories] == [t.tokens for t in first.trajectories]


async def test_lost_episodes_are_tried_again():
    bench, tasks = Bench(), Tasks(6, fails={1: 1, 4: 2})
    result = await run(bench.service, tasks, 6, concurrency=2)
    assert result.lost == () and len(result.trajectories) == 6
    assert (tasks.made.count(1), tasks.made.count(4)) == (2, 3)
    undisturbed = await run(Bench().service, Tasks(6), 6, concurrency=2)
    assert [t.tokens for t in result.trajectories] == [t.tokens for t in undisturbed.trajectories]


async def test_what_stays_lost_is_named_and_is_no_failure_of_the_policy():
    bench, tasks = Bench(), Tasks(4, fails={1: 99})
    result = await run(bench.service, tasks, 4, concurrency=4)
    assert tasks.made.count(1) == 3
    assert [t.index for t in result.trajectories] == [0, 2, 3]
    assert result.rate == 1 / 3
    assert len(result.lost) == 1 and result.lost[0].startswith("task 1: SandboxLost: sandbox sb-1")


def test_nothing_has_no_rate():
    """Infrastructure that fails is not a policy that fails."""
    assert Evaluation((), ("task 0: SandboxLost",)).rate is None


@pytest.mark.parametrize("name", sorted(POLICIES))
async def test_a_hundred_tasks_change_nothing_for_the_batch_that_training_waits_for(name):
    """Under every policy they come to their end; those that rank groups want eight groups before and after."""
    policy = make_policy(name, SchedulerOptions(batch_groups=8))
    bench = Bench(ScriptedWorker(SCRIPT, slots=8), policy=policy)
    bench.service.open_group(Group("g0", 0, 0, 0, [Trajectory("g0/0", "g0", 0)]))
    result = await run(bench.service, Tasks(100, fails={7: 1}), 100, concurrency=16)
    assert len(result.trajectories) == 100 and result.lost == ()
    if name in ("venus", "fcfs_priority"):
        assert policy._groups._cut._capacity == 8 and len(policy._groups._cut) == 1
        assert not policy._groups._evaluations
    await bench.service.close()

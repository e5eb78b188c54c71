"""The service under every scheduling policy, and what a policy decides carried out: priority, waking, a lost worker."""

import asyncio
import math

import pytest

from venusrl.coordinator.coordinator import CoordinatorOptions
from venusrl.core.errors import ConfigError, ContractError, WorkerError
from venusrl.core.group import Group
from venusrl.core.trajectory import Trajectory
from venusrl.learner.objectives.grpo import Grpo
from venusrl.learner.step import StepOptions
from venusrl.rollout.service import RolloutOptions
from venusrl.scheduling import POLICIES, SchedulerOptions, make_policy
from venusrl.scheduling.groups import CRITICAL, DUE
from venusrl.scheduling.protocol import ActionDone, ActionReady, Admit, Prioritise, Wake

from .bench import SCRIPT, Bench, until
from .scripted import ScriptedEnv, ScriptedWorker

pytestmark = pytest.mark.timeout(30)


class Loose(Bench):
    """A Bench over a policy that keeps no `Slots`."""

    def check_idle(self) -> None:
        assert all(not w.running for w in self.workers)
        assert self.service.waiting == 0 and self.service.outcomes.empty()


@pytest.mark.parametrize("name", sorted(POLICIES))
async def test_every_policy_brings_every_trajectory_to_its_end(name):
    policy = make_policy(name, SchedulerOptions(batch_groups=2, eta=1))
    workers = ScriptedWorker(SCRIPT, "v", slots=2), ScriptedWorker(SCRIPT, "w", slots=1)
    bench = Loose(*workers, policy=policy)
    for g in range(4):
        group = Group(f"g{g}", g, 0, 0, [Trajectory(f"g{g}/{i}", f"g{g}", i, seed=i) for i in range(3)])
        bench.service.open_group(group)
        for t in group.trajectories:
            bench.service.start(t, ScriptedEnv(turns=1 + t.index))
    ended: dict[str, int] = {}
    for _ in range(12):
        outcome = await bench.outcome()
        assert outcome.lost is None and outcome.trajectory.reward == 1.0
        group = outcome.trajectory.group_id
        ended[group] = ended.get(group, 0) + 1
        if ended[group] == 3:
            bench.service.close_group(group)
        if list(ended.values()).count(3) == 2 and ended[group] == 3:
            bench.service.batch_taken(2)
            await bench.service.update_weights(None, 1)
    assert [w.most_running <= w.slots for w in workers] == [True, True]
    assert all(not w.standing for w in workers)
    bench.check_idle()
    await bench.service.close()


async def test_the_service_says_where_the_lengths_of_its_turns_came_from():
    """Nothing predicts live: the first turns have nothing to go by, those of mates of a finished one its length."""
    bench = Loose(ScriptedWorker(SCRIPT, slots=1), policy=make_policy("venus"))
    group = Group("g0", 0, 0, 0, [Trajectory(f"g0/{i}", "g0", i, seed=i) for i in range(3)])
    bench.service.open_group(group)
    for t in group.trajectories:
        bench.service.start(t, ScriptedEnv(turns=2))
        await bench.outcome()
    alone = {"predictor": 0, "group_mean": 4, "run_mean": 0, "none": 2}
    assert bench.service.length_sources == alone
    bench.service.close_group("g0")
    bench.start(ScriptedEnv(turns=1), "g1/0")
    await bench.outcome()
    assert bench.service.length_sources == alone | {"run_mean": 1}
    await bench.service.close()
    for name in sorted(set(POLICIES) - {"venus", "fcfs_priority"}):
        assert Loose(policy=make_policy(name)).service.length_sources == {}


@pytest.mark.parametrize("name", sorted(POLICIES))
async def test_every_policy_goes_on_when_a_worker_fails(name):
    policy = make_policy(name, SchedulerOptions(batch_groups=2, eta=1))
    bad, good = ScriptedWorker(SCRIPT, "bad", slots=2), ScriptedWorker(SCRIPT, "good", slots=2)
    bench = Loose(bad, good, policy=policy)
    bad.gate.clear()
    trajectories = [bench.start(ScriptedEnv(turns=2), f"g{i}/0", seed=i) for i in range(8)]
    await until(lambda: len(bad.running) == 2)
    on_bad = set(bad.running)
    bad.failure = WorkerError("worker bad failed")
    bad.fail = lambda request: bad.failure
    bad.gate.set()
    for _ in trajectories:
        outcome = await bench.outcome()
        assert outcome.lost is None and outcome.trajectory.reward == 1.0
    assert {r.trajectory for r in bad.requests} == on_bad
    assert len(bad.requests) == 2, "a worker that has failed was given more"
    await bench.service.update_weights(None, 1)
    assert good.version == 1
    bench.check_idle()


class Saying:
    """Admits at once, and says what a test wants said."""

    def __init__(self, *decisions):
        self.decisions = list(decisions)
        self.asked: list[float] = []
        self.seen: list = []
        self.where = lambda event: ("w",)

    def observe(self, event):
        self.seen.append(event)
        if isinstance(event, ActionReady):
            self.decisions.append(Admit(event.trajectory, *self.where(event)))

    def decide(self, now):
        self.asked.append(now)
        said, self.decisions = self.decisions, []
        return said


async def test_priority_reaches_the_worker_at_admission_and_while_it_runs():
    policy = Saying()
    bench = Loose(ScriptedWorker(SCRIPT, "w"), policy=policy)
    bench.worker.gate.clear()
    policy.decisions.append(Prioritise("g0/0", 2, True))  # before it has a worker
    bench.start(ScriptedEnv(turns=1), "g0/0")
    await until(lambda: bench.worker.running)
    assert bench.worker.standing == {"g0/0": (2, True)}
    policy.decisions.append(Prioritise("g0/0", 0, False))
    bench.start(ScriptedEnv(turns=1), "g0/1")
    await until(lambda: len(bench.worker.running) == 2)
    assert bench.worker.standing == {"g0/0": (0, False)}
    bench.worker.gate.set()
    for _ in range(2):
        await bench.outcome()
    assert bench.worker.standing == {}


async def test_a_policy_is_asked_again_when_it_wants_to_be():
    policy = Saying()
    bench = Loose(ScriptedWorker(SCRIPT, "w"), policy=policy)
    policy.decisions += [Wake(bench.service._clock.now() + 0.02), Wake(bench.service._clock.now() + 0.05)]
    await bench.run(ScriptedEnv(turns=1))
    asked = len(policy.asked)
    await asyncio.sleep(0.1)
    assert len(policy.asked) == asked + 2
    policy.decisions.append(Wake(bench.service._clock.now() + 0.02))
    await bench.run(ScriptedEnv(turns=1))
    asked = len(policy.asked)
    await bench.service.close()
    await asyncio.sleep(0.05)
    assert len(policy.asked) == asked, "asked after the service was closed"


def moving(turns: int = 2):
    """A service whose second turns go from worker v to worker w, with their KV."""
    policy = Saying()
    policy.where = lambda event: ("w", "v") if event.turn else ("v",)
    bench = Loose(ScriptedWorker(SCRIPT, "v"), ScriptedWorker(SCRIPT, "w"), policy=policy)
    return bench, *bench.workers


async def test_kv_moves_with_an_action():
    bench, source, target = moving()
    outcome = await bench.run(ScriptedEnv(turns=2))
    assert outcome.lost is None
    assert bench.service.moved == 1 and "g0/0" in source.released
    assert [r.trajectory for r in target.requests] == ["g0/0"] and len(source.requests) == 1


async def test_a_worker_that_dies_while_its_kv_moves_costs_a_prefill_only():
    bench, source, target = moving()

    async def die(what):
        if what == "step":
            source.failure = WorkerError("worker v failed")

    outcome = await bench.run(ScriptedEnv(turns=2, act=die))
    assert outcome.lost is None and outcome.trajectory.reward == 1.0
    assert bench.service.moved == 0 and len(target.requests) == 1


async def test_kv_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("venusrl.rollout.dispatch.CARRY_S", 0.05)
    bench, source, target = moving()

    async def hold(what):
        if what == "step":
            source.gate.clear()

    outcome = await bench.run(ScriptedEnv(turns=2, act=hold))
    assert outcome.lost is None and bench.service.moved == 0 and len(target.requests) == 1


async def test_a_trajectory_that_is_cancelled_while_its_kv_moves_gives_its_slot_back():
    bench, source, target = moving()

    async def hold(what):
        if what == "step":
            source.gate.clear()

    bench.start(ScriptedEnv(turns=2, act=hold))
    await until(lambda: bench.service._dispatcher._tasks)
    bench.service.cancel("g0/0")
    await until(lambda: not bench.service._tasks)
    source.gate.set()
    await until(lambda: not bench.service._dispatcher._tasks)
    assert not target.requests
    done = [e for e in bench.policy.seen if isinstance(e, ActionDone)]
    assert [e.preempted for e in done] == [False, True]
    bench.check_idle()


async def test_what_a_lost_worker_had_generated_is_kept():
    """A worker killed in mid-decode: the turn goes on elsewhere, token by token the same."""
    policy = make_policy("fcfs_action")
    bad, good = ScriptedWorker(SCRIPT, "bad"), ScriptedWorker(SCRIPT, "good", slots=1)
    bench = Loose(bad, good, policy=policy)
    whole = await Loose(ScriptedWorker(SCRIPT), policy=make_policy("fcfs_action")).run(ScriptedEnv(turns=1), seed=4)
    chunks = []

    def fail(request):
        chunks.append(request)
        if len(chunks) == 3:
            bad.failure = WorkerError("worker bad failed")
            return bad.failure

    bad.fail = fail
    outcome = await bench.run(ScriptedEnv(turns=1), seed=4)
    assert outcome.trajectory.tokens == whole.trajectory.tokens
    assert len(good.requests[0].tokens) == len(bad.requests[0].tokens) + 4


async def test_the_last_worker_s_failure_ends_its_trajectories():
    bench = Loose(ScriptedWorker(SCRIPT), policy=make_policy("fcfs_action"))

    def fail(request):
        bench.worker.failure = WorkerError("worker w failed")
        return bench.worker.failure

    bench.worker.fail = fail
    assert "worker w failed" in (await bench.run(ScriptedEnv(turns=1))).lost


async def test_kv_that_arrives_damaged_costs_a_prefill_only():
    bench, _, target = moving()

    async def refuse(prefix):
        raise ContractError("KV of 3 bytes is damaged")

    target.import_kv = refuse
    outcome = await bench.run(ScriptedEnv(turns=2))
    assert outcome.lost is None and bench.service.moved == 0 and len(target.requests) == 1


async def test_groups_of_a_run_that_goes_on_are_due_by_the_version_it_goes_on_from():
    policy = make_policy("venus", SchedulerOptions(batch_groups=1, eta=1))
    bench = Loose(policy=policy)
    bench.service.resumed(5)
    for name, version in (("g7", 5), ("g6", 4)):
        bench.service.open_group(Group(name, 0, 0, version, [Trajectory(f"{name}/0", name, 0)]))
    assert (policy._groups.klass("g6"), policy._groups.klass("g7")) == (DUE, CRITICAL)
    await bench.service.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e39])
def test_options_that_are_no_numbers_are_refused(value):
    with pytest.raises(ConfigError, match=r"rollout\.temperature="):
        RolloutOptions(temperature=value)
    with pytest.raises(ConfigError, match=r"rollout\.temperature="):
        StepOptions(temperature=value)
    if value != 1e39:
        with pytest.raises(ConfigError, match="env_s="):
            RolloutOptions(env_s=value)
    if value != 1e39:
        with pytest.raises(ConfigError, match="async_factor="):
            CoordinatorOptions(async_factor=value)
    if not value > 0 or math.isinf(value):
        for name in ("clip_low", "kl_coef", "entropy_coef", "tis_cap"):
            with pytest.raises(ConfigError, match=rf"learner\.{name}="):
                Grpo(**{name: value})

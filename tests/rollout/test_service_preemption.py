"""Preemption and new weights under the rollout service: nothing of a trajectory changes but its time."""

import asyncio

import pytest

from venusrl.scheduling import make_policy
from venusrl.scheduling.protocol import Preempt

from .bench import SCRIPT, Bench, until
from .scripted import ScriptedEnv, ScriptedWorker

pytestmark = pytest.mark.timeout(30)


class Preempting:
    """FcfsAction that also preempts whom a test names."""

    def __init__(self):
        self._inner = make_policy("fcfs_action")
        self.preempt: list[str] = []

    @property
    def _slots(self):
        return self._inner._slots

    def observe(self, event):
        self._inner.observe(event)

    def decide(self, now):
        named, self.preempt = self.preempt, []
        return [*(Preempt(t) for t in named), *self._inner.decide(now)]


@pytest.mark.parametrize("every", [1, 2, 3])
async def test_preemption_changes_nothing_but_time(every):
    undisturbed = (await Bench().run(ScriptedEnv(turns=3))).trajectory
    policy = Preempting()
    bench = Bench(policy=policy)
    t = bench.start(ScriptedEnv(turns=3))
    seen, preempted = 0, 0
    while bench.service.outcomes.empty():
        await asyncio.sleep(0)
        generated = bench.worker.load().generated_tokens
        if t.id in bench.worker.running and generated >= seen + every:
            seen, preempted = generated, preempted + 1
            await bench.worker.preempt(t.id)
    assert (await bench.outcome()).lost is None
    assert preempted >= 3 and len(bench.worker.requests) > 3
    for name in ("tokens", "loss_mask", "logprobs", "versions", "reward"):
        assert getattr(t, name) == getattr(undisturbed, name)
    assert [(x.begin, x.end, x.stop) for x in t.turns] == [(x.begin, x.end, x.stop) for x in undisturbed.turns]
    bench.check_idle()


async def test_the_policy_can_preempt():
    policy = Preempting()
    bench = Bench(ScriptedWorker(SCRIPT, slots=1), policy=policy)
    bench.worker.gate.clear()
    first = bench.start(ScriptedEnv(turns=1), "g0/0")
    await until(lambda: bench.worker.running)
    policy.preempt.append(first.id)
    second = bench.start(ScriptedEnv(turns=1), "g0/1")  # its ActionReady makes the policy decide
    await until(lambda: bench.service.waiting == 1)
    await asyncio.sleep(0.01)
    bench.worker.gate.set()
    assert [(await bench.outcome()).trajectory for _ in range(2)] == [second, first]
    assert first.reward == second.reward == 1.0
    bench.check_idle()


async def test_preemption_keeps_the_budget_of_the_turn():
    undisturbed = (await Bench(max_tokens=5).run(ScriptedEnv(turns=1))).trajectory
    bench = Bench(ScriptedWorker(SCRIPT, chunk=1), max_tokens=5)
    t = bench.start(ScriptedEnv(turns=1))
    for made in range(1, 6):
        await until(lambda made=made: t.num_generated == made)
        await bench.worker.preempt(t.id)  # the last time with nothing left to generate
    await bench.outcome()
    assert t.tokens == undisturbed.tokens and t.num_generated == 5 and t.turns[-1].stop == "length"
    assert len(bench.worker.requests) > 1


async def test_versions_are_per_token():
    """VERL PR#6882, slime#1440: a turn that saw an update carries the version that generated each of its tokens."""
    bench = Bench(ScriptedWorker(SCRIPT, chunk=1))
    t = bench.start(ScriptedEnv(turns=2))
    await until(lambda: t.num_generated == 3)
    await bench.service.update_weights(None, 1)
    await until(lambda: len(t.turns) == 2)
    await bench.service.update_weights(None, 2)
    await bench.outcome()
    first = t.versions[t.turns[0].begin : t.turns[0].end]
    assert first[:3] == [0, 0, 0] and first[-1] == 1 and first == sorted(first)
    generated = [v for v, m in zip(t.versions, t.loss_mask, strict=True) if m]
    assert generated == sorted(generated) and generated[-1] == 2
    assert t.start_version == 0
    t.check()


async def test_an_update_with_many_more_requests_than_slots():
    """verl#7990, #6090: weight sync and a long queue waited for each other."""
    bench = Bench(ScriptedWorker(SCRIPT, "v", slots=2), ScriptedWorker(SCRIPT, "w", slots=1))
    trajectories = [bench.start(ScriptedEnv(turns=2), f"g{i}/0", seed=i) for i in range(40)]
    for version in range(1, 6):
        await until(lambda: bench.service.waiting >= 5)
        await asyncio.wait_for(bench.service.update_weights(None, version), 5)
        assert all(w.version == version for w in bench.workers)
    ended = [await bench.outcome() for _ in trajectories]
    assert {o.trajectory.id for o in ended} == {t.id for t in trajectories}
    assert all(o.lost is None for o in ended)
    assert max(max(t.versions) for t in trajectories) == 5
    assert [w.most_running for w in bench.workers] == [2, 1]
    bench.check_idle()


async def test_turns_of_a_trajectory_stay_on_its_worker():
    """slime#1469: routing each request anew broke the prefix cache."""
    bench = Bench(ScriptedWorker(SCRIPT, "v", slots=3), ScriptedWorker(SCRIPT, "w", slots=3))
    for i in range(6):
        bench.start(ScriptedEnv(turns=4), f"g{i}/0")
    for _ in range(6):
        await bench.outcome()
    homes = [{r.trajectory for r in w.requests} for w in bench.workers]
    assert all(homes) and not homes[0] & homes[1]

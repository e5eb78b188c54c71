"""The rollout service: each trajectory ends once, whatever happens to it, and failure is never a reward of 0."""

import asyncio
import random

import pytest

from venusrl.core.clock import WallClock
from venusrl.core.env import Observation
from venusrl.core.errors import SandboxLost, WorkerError
from venusrl.core.group import Group
from venusrl.core.trajectory import Status, Trajectory
from venusrl.rollout.service import Outcome, RolloutOptions, RolloutService
from venusrl.scheduling import make_policy
from venusrl.scheduling.protocol import Preempt

from .scripted import Script, ScriptedEnv, ScriptedWorker

pytestmark = pytest.mark.timeout(30)
SCRIPT = Script()


class Bench:
    """A service over scripted workers."""

    def __init__(self, *workers: ScriptedWorker, env_s: float = 5.0, max_tokens: int = 64, policy=None):
        self.workers = workers or (ScriptedWorker(SCRIPT),)
        self.worker = self.workers[0]
        self.policy = policy or make_policy("fcfs_action")
        options = RolloutOptions(1.0, max_tokens, env_s)
        by_name = {w.name: w for w in self.workers}
        self.service = RolloutService(by_name, self.policy, self.worker.script.chat, WallClock(), options)

    def start(self, env, name: str = "g0/0", seed: int = 1) -> Trajectory:
        group, index = name.split("/")
        trajectory = Trajectory(name, group, int(index.split("r")[0]), seed=seed)
        self.service.start(trajectory, env)
        return trajectory

    async def outcome(self) -> Outcome:
        return await asyncio.wait_for(self.service.outcomes.get(), 10)

    async def run(self, env, **options) -> Outcome:
        self.start(env, **options)
        outcome = await self.outcome()
        self.check_idle()
        return outcome

    def check_idle(self) -> None:
        """No slot, stream, task or report is left behind."""
        assert self.policy._slots.free == sum(w.slots for w in self.workers)
        assert all(not w.running for w in self.workers)
        assert self.service.waiting == 0
        assert all(self.service.count(status) == 0 for status in Status)
        assert self.service.outcomes.empty()


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


def raises(where: str, error: BaseException):
    async def act(what):
        if what == where:
            raise error

    return act


def waits(where: str):
    async def act(what):
        if what == where:
            await asyncio.Event().wait()

    return act


# An undisturbed episode


async def test_an_episode():
    bench, env = Bench(), ScriptedEnv(turns=3, reward=0.5)
    outcome = await bench.run(env)
    t = outcome.trajectory
    assert outcome.lost is None
    assert (t.status, t.reward) == (Status.DONE, 0.5)
    assert env.calls == ["reset", "step", "step", "step", "grade", "close"]
    assert env.replies == ["say 0 1", "say 1 1", "say 2 1"]
    assert [s["observation"] for s in t.info["steps"]] == ["go on", "go on", ""]
    assert t.info["messages"] == [{"role": "user", "content": "prompt"}] and t.info["truncated"] is False
    assert bench.worker.released == ["g0/0"]
    t.check()


async def test_token_ids_are_what_the_worker_said_and_saw():
    """verl#3720, #3960: the ids that are trained on drifted from those that were generated and shown."""
    bench = Bench()
    t = (await bench.run(ScriptedEnv(turns=4))).trajectory
    requests = bench.worker.requests
    assert len(requests) == len(t.turns) == 4
    for request, turn in zip(requests, t.turns, strict=True):
        assert t.tokens[: turn.begin] == request.tokens
        said = t.tokens[turn.begin : turn.end]
        assert said[-1] == SCRIPT.tokenizer.im_end
        context = list(request.tokens)
        for token in said:
            assert token == SCRIPT.next_token(context, 1)
            context.append(token)
    assert all(0 < turn.generate_s < 10 for turn in t.turns)


async def test_a_turn_is_cut_at_max_tokens():
    bench, env = Bench(max_tokens=3), ScriptedEnv(turns=1)
    t = (await bench.run(env)).trajectory
    assert t.turns[0].stop == "length" and t.num_generated == 3
    assert t.reward == 1.0 and len(env.replies) == 1


async def test_a_full_context_ends_the_episode_and_is_graded():
    bench, env = Bench(ScriptedWorker(SCRIPT, max_length=90)), ScriptedEnv(turns=100, reward=0.25)
    outcome = await bench.run(env)
    t = outcome.trajectory
    assert outcome.lost is None and t.reward == 0.25 and t.info["truncated"] is True
    assert env.calls[-2:] == ["grade", "close"]
    assert 1 < len(t.turns) < 100 and len(t) <= 90
    assert t.loss_mask[-1] == 1  # ends with what was generated, not with half an observation


async def test_generation_up_to_the_longest_sequence():
    script = Script(lambda turn, seed: "wait " * 200)
    t = (await Bench(ScriptedWorker(script, max_length=64), max_tokens=500).run(ScriptedEnv(turns=9))).trajectory
    assert len(t) == 64 and t.turns[-1].stop == "length" and t.info["truncated"] is True
    assert t.status == Status.DONE


async def test_a_prompt_without_room_is_lost():
    outcome = await Bench(ScriptedWorker(SCRIPT, max_length=8)).run(ScriptedEnv())
    assert "leaves no room" in outcome.lost and outcome.trajectory.reward is None


# Failures of an environment


@pytest.mark.parametrize("where", ["reset", "step", "grade"])
async def test_a_crash_is_lost_with_its_reason(where):
    env = ScriptedEnv(act=raises(where, ValueError("broken wheel")))
    outcome = await Bench().run(env)
    assert outcome.lost == f"TaskError: {where} raised ValueError: broken wheel"
    assert outcome.trajectory.reward is None and outcome.trajectory.status != Status.DONE
    assert env.calls.count("close") == 1 and env.calls[-1] == "close"


@pytest.mark.parametrize("where", ["reset", "step", "grade"])
async def test_a_call_that_never_returns_is_lost_after_env_s(where):
    """SkyRL#1173: 3 of 128 workers never returned, and the trainer waited for ever."""
    env = ScriptedEnv(act=waits(where))
    outcome = await Bench(env_s=0.05).run(env)
    assert outcome.lost == f"TaskError: {where} took more than rollout.env_s=0.05 s"
    assert outcome.trajectory.reward is None
    assert env.busy == 0 and env.calls.count("close") == 1


@pytest.mark.parametrize("where", ["reset", "step", "grade"])
@pytest.mark.parametrize("reason", ["oom", "node-lost"])
async def test_a_lost_sandbox_is_lost(where, reason):
    """ROCK#374: a sandbox failure was reported as success; miles#2800: it is refilled, and never a reward."""
    outcome = await Bench().run(ScriptedEnv(act=raises(where, SandboxLost("sb-9", reason))))
    assert outcome.lost.startswith("SandboxLost: sandbox sb-9 is gone") and reason in outcome.lost
    assert outcome.trajectory.reward is None


async def test_an_own_timeout_of_the_environment_is_told_from_ours():
    outcome = await Bench().run(ScriptedEnv(act=raises("step", TimeoutError("the registry"))))
    assert outcome.lost == "TaskError: step raised TimeoutError: the registry"


async def test_a_cancellation_that_nobody_asked_for_is_lost():
    outcome = await Bench().run(ScriptedEnv(act=raises("step", asyncio.CancelledError())))
    assert "CancelledError" in outcome.lost


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, "1.0x"])
async def test_a_grade_that_is_no_number_is_lost(reward):
    outcome = await Bench().run(ScriptedEnv(reward=reward))
    assert outcome.lost is not None and outcome.trajectory.reward is None


async def test_messages_and_observations_that_are_none_are_lost():
    env = ScriptedEnv()
    env.reset = lambda: asyncio.sleep(0, [{"text": "no role"}])
    assert "KeyError" in (await Bench().run(env)).lost
    env = ScriptedEnv()
    env.step = lambda reply: asyncio.sleep(0, None)
    assert "AttributeError" in (await Bench().run(env)).lost


async def test_an_environment_that_is_not_async_is_lost():
    env = ScriptedEnv()
    env.grade = lambda: 1.0
    assert "grade raised TypeError" in (await Bench().run(env)).lost


async def test_an_error_of_close_is_recorded_and_costs_nothing():
    outcome = await Bench().run(ScriptedEnv(act=raises("close", OSError("still mounted"))))
    assert outcome.lost is None and outcome.trajectory.reward == 1.0
    assert outcome.trajectory.info["close_error"] == "close raised OSError: still mounted"


async def test_a_close_that_hangs_is_given_up():
    outcome = await Bench(env_s=0.05).run(ScriptedEnv(act=waits("close")))
    assert outcome.lost is None and "close took more than" in outcome.trajectory.info["close_error"]


async def test_malformed_replies_continue_the_episode():
    """verifiers#1763: truncated tool JSON killed 4 of 16 rollouts; here it is answered, and the policy sees it."""

    class Picky(ScriptedEnv):
        async def step(self, reply: str) -> Observation:
            self.replies.append(reply)
            if reply.startswith("say 2"):
                return Observation("", done=True)
            return Observation("reply with a block", info={"command": None})

    bench, env = Bench(), Picky()
    t = (await bench.run(env)).trajectory
    assert t.reward == 1.0 and len(env.replies) == 3
    shown = SCRIPT.tokenizer.decode(t.tokens[t.turns[0].end : t.turns[1].begin])
    assert "reply with a block" in shown


# Failures of a worker


async def test_a_failed_worker_is_lost_with_its_reason():
    bench, env = Bench(), ScriptedEnv()
    bench.worker.fail = lambda request: WorkerError("worker w failed: out of memory")
    outcome = await bench.run(env)
    assert outcome.lost == "WorkerError: worker w failed: out of memory"
    assert env.calls == ["reset", "close"]


async def test_a_closed_worker_does_not_keep_the_environment_from_closing():
    bench, env = Bench(), ScriptedEnv(turns=50)
    bench.start(env)
    await until(lambda: len(env.replies) == 2)
    await bench.worker.close()
    assert "closed" in (await bench.outcome()).lost
    assert env.calls.count("close") == 1


async def test_an_unexpected_error_is_lost_and_not_silence():
    """miles PR#1012: one sample raised inside a gather; its group vanished and its slot was stuck for hours."""
    bench = Bench()
    bench.worker.fail = lambda request: ZeroDivisionError("a bug")
    assert (await bench.run(ScriptedEnv())).lost == "ZeroDivisionError: a bug"


# Cancellation


async def cancelled(bench: Bench, env, when) -> Trajectory:
    t = bench.start(env)
    await until(when)
    bench.service.cancel(t.id)
    await until(lambda: not bench.service._tasks)
    bench.worker.gate.set()
    await asyncio.sleep(0.01)
    bench.check_idle()  # nothing is reported
    assert env.calls.count("close") == 1 and env.busy == 0
    return t


async def test_cancel_in_the_middle_of_generation():
    """slime PR#2340: an abort was swallowed, the decode went on as an orphan and its slot stayed taken."""
    bench, env = Bench(), ScriptedEnv()

    def partial():
        (request,) = bench.worker.running.values() or [None]
        if request and bench.worker.load().generated_tokens:
            bench.worker.gate.clear()
            return True

    t = await cancelled(bench, env, partial)
    assert t.num_generated > 0 and t.reward is None
    assert env.calls == ["reset", "close"]


@pytest.mark.parametrize("where", ["reset", "step", "grade"])
async def test_cancel_in_the_middle_of_a_tool(where):
    """trl PR#7176: the slot was freed while the environment still ran; here it has stopped before it is closed."""
    bench, env = Bench(), ScriptedEnv(act=waits(where))
    t = await cancelled(bench, env, lambda: env.busy)
    assert t.reward is None


async def test_cancel_while_waiting_for_a_slot():
    bench = Bench(ScriptedWorker(SCRIPT, slots=1))
    bench.worker.gate.clear()
    holder, env = bench.start(ScriptedEnv(), "g0/0"), ScriptedEnv()
    await until(lambda: bench.worker.running)
    waiter = bench.start(env, "g0/1")
    await until(lambda: bench.service.waiting == 1)
    bench.service.cancel(waiter.id)
    await until(lambda: len(bench.service._tasks) == 1)
    assert bench.service.waiting == 0 and env.calls == ["reset", "close"]
    bench.worker.gate.set()
    assert (await bench.outcome()).trajectory is holder
    bench.check_idle()


async def test_cancel_as_the_slot_is_given():
    """The waiter is cancelled in the same moment as the policy admits it: the slot goes to the next one."""
    bench = Bench(ScriptedWorker(SCRIPT, slots=1))
    bench.worker.gate.clear()
    bench.start(ScriptedEnv(), "g0/0")
    await until(lambda: bench.worker.running)
    waiter = bench.start(ScriptedEnv(), "g0/1")
    last = bench.start(ScriptedEnv(), "g0/2")
    await until(lambda: bench.service.waiting == 2)
    bench.service.cancel("g0/0")
    bench.service.cancel(waiter.id)
    bench.worker.gate.set()
    assert (await bench.outcome()).trajectory is last
    await until(lambda: not bench.service._tasks)
    bench.check_idle()


async def test_cancel_before_the_first_step_closes_the_environment():
    bench, env = Bench(), ScriptedEnv()
    t = bench.start(env)
    bench.service.cancel(t.id)
    await until(lambda: not bench.service._tasks)
    assert env.calls.count("close") == 1
    bench.check_idle()


@pytest.mark.parametrize("ticks", range(6))
async def test_cancel_as_a_tool_returns_is_not_forgotten(ticks):
    """asyncio.wait_for of Python 3.11 drops a cancellation that arrives together with the result."""
    bench, go = Bench(), asyncio.Event()

    async def act(what):
        if what == "step":
            await go.wait()

    env = ScriptedEnv(turns=50, act=act)
    t = bench.start(env)
    await until(lambda: env.busy)
    task = bench.service._tasks[t.id]
    go.set()
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and len(env.replies) < 5 and env.calls[-1] == "close"
    bench.check_idle()


async def test_a_clean_up_that_has_begun_is_let_to_its_end():
    """verifiers PR#1750: sandboxes deleted twice, or not at all. Cancelling again does not interrupt the close."""
    bench, go, closed = Bench(), asyncio.Event(), []

    async def act(what):
        if what == "close":
            await go.wait()
            closed.append(True)

    env = ScriptedEnv(act=act)
    t = bench.start(env)
    await until(lambda: env.calls[-1:] == ["close"])
    bench.service.cancel(t.id)
    closing = asyncio.create_task(bench.service.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    go.set()
    await closing
    assert closed == [True] and env.calls.count("close") == 1


async def test_unknown_ids_are_ignored():
    bench = Bench()
    bench.service.cancel("g7/0")
    outcome = await bench.run(ScriptedEnv())
    bench.service.cancel(outcome.trajectory.id)
    await asyncio.sleep(0)


async def test_close_ends_everything():
    bench = Bench(ScriptedWorker(SCRIPT, slots=2))
    bench.worker.gate.clear()
    envs = [ScriptedEnv(act=waits("step") if i % 2 else None) for i in range(8)]
    for i, env in enumerate(envs):
        bench.start(env, f"g0/{i}")
    await until(lambda: bench.worker.running)
    await bench.service.close()
    assert all(env.calls.count("close") == 1 and env.busy == 0 for env in envs)
    bench.check_idle()


# Preemption and new weights


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


# Many at once


@pytest.mark.parametrize("seed", range(4))
async def test_every_trajectory_ends_exactly_once(seed):
    """verifiers PR#1750, ROLL#215: 60 trajectories, failures everywhere, cancels, updates; nothing is left over."""
    rng = random.Random(seed)
    bench = Bench(ScriptedWorker(SCRIPT, "v", slots=3), ScriptedWorker(SCRIPT, "w", slots=2), env_s=0.2)
    for worker in bench.workers:
        worker.fail = lambda request: WorkerError("flaky") if rng.random() < 0.01 else None

    async def act(what):
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        chance = rng.random()
        if chance < 0.04:
            raise rng.choice([OSError("disk"), SandboxLost("sb", "oom"), ValueError("bug"), TimeoutError()])
        if chance < 0.05:
            await asyncio.Event().wait()

    envs, ids = {}, [f"g{i // 4}/{i % 4}" for i in range(60)]
    bench.service.open_group(Group("g0", 0, 0, 0))
    for i, name in enumerate(ids):
        envs[name] = ScriptedEnv(turns=rng.randint(1, 4), act=act)
        bench.start(envs[name], name, seed=i)
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    stopped = set(rng.sample(ids, 8))
    version = 0
    while bench.service._tasks:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        choice = rng.random()
        if choice < 0.2 and stopped:
            bench.service.cancel(rng.choice(sorted(stopped)))
        elif choice < 0.4:
            version += 1
            await bench.service.update_weights(None, version)
        elif choice < 0.7:
            worker = rng.choice(bench.workers)
            if worker.running:
                await worker.preempt(rng.choice(sorted(worker.running)))
        assert all(len(w.running) <= w.slots for w in bench.workers)
        await asyncio.sleep(0.001)

    ended = [bench.service.outcomes.get_nowait() for _ in range(bench.service.outcomes.qsize())]
    names = [o.trajectory.id for o in ended]
    assert len(set(names)) == len(names)
    assert set(ids) - set(names) <= stopped
    for outcome in ended:
        t = outcome.trajectory
        t.check()
        assert (outcome.lost is None) == (t.reward == 1.0) == (t.status == Status.DONE)
        assert outcome.lost is None or t.reward is None
    assert sum(o.lost is None for o in ended) > 10 and sum(o.lost is not None for o in ended) > 3
    assert all(env.calls.count("close") == 1 and env.calls[-1] == "close" for env in envs.values())
    assert all(env.busy == 0 for env in envs.values())
    for worker in bench.workers:
        assert worker.most_running <= worker.slots
        assert sorted(worker.released) == sorted(ids)
    bench.check_idle()

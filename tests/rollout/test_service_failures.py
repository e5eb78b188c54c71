"""What fails around the rollout service is lost and reported: failure is never a reward of 0."""

import asyncio

import pytest

from venusrl.core.env import Observation
from venusrl.core.errors import SandboxLost, WorkerError
from venusrl.core.trajectory import Status

from .bench import SCRIPT, Bench, raises, until, waits
from .scripted import ScriptedEnv

pytestmark = pytest.mark.timeout(30)


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

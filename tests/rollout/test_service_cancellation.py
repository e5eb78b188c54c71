"""The rollout service cancelled, at any moment."""

import asyncio

import pytest

from venusrl.core.trajectory import Trajectory

from .bench import SCRIPT, Bench, until, waits
from .scripted import ScriptedEnv, ScriptedWorker

pytestmark = pytest.mark.timeout(30)


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

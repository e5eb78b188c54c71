"""Environments that take long to close hold back neither the report of their trajectory nor, but for room, the next."""

import asyncio
import contextlib

import pytest

from venusrl.core.errors import SandboxCapacity
from venusrl.rollout import service as service_module
from venusrl.rollout.worker import Chunk
from venusrl.sandbox.gate import Gate

from .bench import SCRIPT, Bench
from .scripted import ScriptedEnv, ScriptedWorker

pytestmark = pytest.mark.timeout(30)
CLOSE_S = 2.0


def slow(done: list, seconds: float = CLOSE_S, gate: Gate | None = None):
    """What an environment does that holds a place of `gate` from reset to the end of its slow close."""

    async def act(what):
        if what == "reset" and gate is not None:
            try:
                await gate.enter(10.0)
            except TimeoutError as error:
                raise SandboxCapacity("no free place") from error
        if what == "close":
            await asyncio.sleep(seconds)
            done.append(1)
            if gate is not None:
                gate.leave()

    return act


async def test_a_trajectory_is_reported_while_its_environment_still_closes():
    bench, closed = Bench(), []
    clock = asyncio.get_running_loop().time
    began = clock()
    for i in range(4):
        bench.start(ScriptedEnv(act=slow(closed)), f"g{i}/0")
    for _ in range(4):
        assert (await bench.outcome()).lost is None
    assert clock() - began < CLOSE_S / 2 and closed == []
    await bench.service.close()
    assert len(closed) == 4  # awaited there
    assert clock() - began < 2 * CLOSE_S  # and all at once
    bench.check_idle()


async def test_the_next_episode_waits_for_the_sandbox_that_is_still_held_and_does_not_fail():
    bench, closed, gate = Bench(), [], Gate(1)
    for i in range(3):
        bench.start(ScriptedEnv(act=slow(closed, 0.3, gate)), f"g{i}/0")
    for number in range(3):
        outcome = await bench.outcome()
        assert outcome.lost is None and len(closed) >= number
    await bench.service.cleaned()
    assert len(closed) == 3


async def test_an_episode_of_the_same_id_begins_after_the_clean_up_of_the_one_before():
    """Evaluations use their ids again; what the first one leaves is forgotten under the id."""
    bench, closed = Bench(), []
    bench.start(ScriptedEnv(act=slow(closed, 0.3)), "eval/0")
    assert (await bench.outcome()).lost is None
    second = ScriptedEnv()
    bench.start(second, "eval/0")
    await asyncio.sleep(0.05)
    assert second.calls == [] and closed == []
    assert (await bench.outcome()).lost is None
    assert closed == [1]
    await bench.service.cleaned()
    bench.check_idle()


async def test_a_cancelled_trajectory_is_cleaned_up_too():
    bench, closed = Bench(), []
    bench.worker.gate.clear()
    bench.start(ScriptedEnv(act=slow(closed, 0.1)), "g/0")
    await asyncio.sleep(0.05)
    bench.service.cancel("g/0")
    await asyncio.sleep(0.01)
    await bench.service.cleaned()
    assert closed == [1] and bench.worker.released == ["g/0"]
    bench.check_idle()


async def test_closing_the_service_gives_up_environments_that_never_close(monkeypatch, caplog):
    monkeypatch.setattr(service_module, "CLOSE_S", 0.1)
    bench, closed = Bench(env_s=60.0), []
    bench.start(ScriptedEnv(act=slow(closed, 50.0)), "g/0")
    assert (await bench.outcome()).lost is None
    await asyncio.wait_for(bench.service.close(), 5)
    assert closed == [] and "1 environments were not closed" in caplog.text


@pytest.mark.parametrize("where, name", [("step", "trajectory-g/0"), ("close", "clean-up-g/0")])
async def test_closing_the_service_leaves_behind_what_does_not_end_when_it_is_cancelled(
    where, name, monkeypatch, caplog
):
    """An environment whose author catches everything; it held up the end of the run for as long as it liked."""
    monkeypatch.setattr(service_module, "CLOSE_S", 0.1)
    monkeypatch.setattr(service_module, "CANCEL_S", 0.1)
    bench, over, there = Bench(env_s=60.0), asyncio.Event(), asyncio.Event()

    async def act(what):
        while what == where and not over.is_set():
            there.set()
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()

    bench.start(ScriptedEnv(act=act), "g/0")
    await asyncio.wait_for(there.wait(), 5)
    closing = asyncio.create_task(bench.service.close())
    done, _ = await asyncio.wait({closing}, timeout=5)
    over.set()
    assert done and f"{name} did not end when cancelled" in caplog.text
    await closing
    await bench.service.cleaned()


class Full(ScriptedWorker):
    """Has room for no token from its `after`-th request on, as an engine whose pages one context fills."""

    after = 0

    async def generate(self, request):
        if len(self.requests) >= self.after:
            self.requests.append(request)
            yield Chunk([], [], self.version, "length")
            return
        async for chunk in super().generate(request):
            yield chunk


@pytest.mark.parametrize("after", [0, 1])
async def test_a_turn_without_a_token_is_never_taken_for_the_one_before(after):
    worker = Full(SCRIPT)
    worker.after = after
    env = ScriptedEnv(turns=3)
    outcome = await Bench(worker).run(env)
    if after == 0:
        assert outcome.lost is not None and "has no KV for a token" in outcome.lost
        assert env.replies == []
    else:
        assert outcome.lost is None and outcome.trajectory.info["truncated"]
        assert len(env.replies) == 1 and len(outcome.trajectory.turns) == 1

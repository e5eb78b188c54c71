"""The engine behind asyncio: streams, cancellation, weight updates, and ends that are never a hang."""

import asyncio
import threading

import numpy as np
import pytest

from venusrl.core.errors import ContractError, WorkerError
from venusrl.rollout.engine.jax_worker import JaxWorker

from . import tiny
from .tiny import ask

SECONDS = 60  # of any wait below: a hang is a failure, not a stuck suite


class Gate:
    """Holds the engine inside its next step until opened, so that tests choose what happens meanwhile."""

    def __init__(self, engine):
        self._inner = engine.step
        self._open = threading.Event()
        self.entered = threading.Event()
        self._open.set()
        engine.step = self._step

    def _step(self):
        self.entered.set()
        assert self._open.wait(SECONDS)
        return self._inner()

    async def shut(self):
        """Returns once the engine waits inside a step."""
        self.entered.clear()
        self._open.clear()
        await asyncio.to_thread(self.entered.wait, SECONDS)

    def open(self):
        self._open.set()


@pytest.fixture
async def worker(weights):
    worker = JaxWorker("w0", tiny.engine(weights))
    worker.gate = Gate(worker._engine)
    await worker.start()
    yield worker
    worker.gate.open()
    await asyncio.wait_for(worker.close(), SECONDS)


async def collect(worker, request):
    done = tiny.Collected()
    async for chunk in worker.generate(request):
        done.add(chunk)
    return done


async def within(awaitable):
    return await asyncio.wait_for(awaitable, SECONDS)


async def idle(worker):
    """Waits until the engine has nothing to do."""
    async with asyncio.timeout(SECONDS):
        while worker._engine.busy or worker._asked:
            await asyncio.sleep(0.005)


async def test_concurrent_turns(worker, weights):
    contexts = {str(i): tiny.tokens(i, 2 + i) for i in range(6)}
    async with asyncio.timeout(SECONDS):
        done = await asyncio.gather(*(collect(worker, ask(name, c, 7)) for name, c in contexts.items()))
    for context, turn in zip(contexts.values(), done, strict=True):
        assert (turn.tokens, turn.stop) == (tiny.greedy(weights, context, 7), "length")
    assert (worker.slots, worker.max_length, worker.load().slots) == (3, tiny.LENGTH, 3)
    assert worker.load().generated_tokens == 42


async def test_closing_early_frees_the_slot(worker, weights):
    streams = [worker.generate(ask(f"s{i}", tiny.tokens(i, 4), 40)) for i in range(3)]
    for stream in streams:
        await within(anext(stream))
    for stream in streams:
        await within(stream.aclose())
    await idle(worker)
    assert worker.load().running == worker.load().waiting == 0 and not worker._streams
    context = tiny.tokens(0, 4)
    again = await within(collect(worker, ask("s0", context, 5)))  # the same trajectory may come back
    assert again.tokens == tiny.greedy(weights, context, 5)


async def test_cancelling_the_reading_task_frees_the_slot(worker):
    task = asyncio.create_task(collect(worker, ask("t", tiny.tokens(0, 4), 40)))
    await worker.gate.shut()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    worker.gate.open()
    await idle(worker)
    assert worker.load().running == 0 and not worker._streams


async def test_one_request_of_a_trajectory_at_a_time(worker):
    first = worker.generate(ask("t", tiny.tokens(0, 4), 8))
    await within(anext(first))
    with pytest.raises(ContractError, match="already has a request"):
        await within(anext(worker.generate(ask("t", tiny.tokens(0, 4), 8))))
    rest = [chunk async for chunk in first]
    assert rest[-1].stop == "length"  # the first one was not disturbed


async def test_impossible_request_is_refused_and_leaves_nothing(worker):
    with pytest.raises(ContractError, match="max_length"):
        await within(anext(worker.generate(ask("t", tiny.tokens(0, tiny.LENGTH), 8))))
    assert not worker._streams


async def test_preempted_turns_resume(worker, weights):
    context = tiny.tokens(0, 4)
    stream = worker.generate(ask("t", context, 30))
    got = list((await within(anext(stream))).tokens)
    await worker.preempt("t")
    async with asyncio.timeout(SECONDS):
        rest = [chunk async for chunk in stream]
    assert rest[-1].stop == "preempted" and rest[-1].tokens == []
    got += [token for chunk in rest for token in chunk.tokens]
    assert len(got) < 30 and worker.load().running == 0
    prefilled = worker.load().prefilled_tokens
    got += (await within(collect(worker, ask("t", context + got, 30 - len(got))))).tokens
    assert got == tiny.greedy(weights, context, 30)
    assert worker.load().prefilled_tokens == prefilled  # partial state was kept


async def test_waiting_requests_can_be_preempted(worker):
    running = [asyncio.create_task(collect(worker, ask(f"r{i}", tiny.tokens(i, 4), 40))) for i in range(3)]
    await asyncio.sleep(0)
    await worker.gate.shut()
    waiting = asyncio.create_task(collect(worker, ask("late", tiny.tokens(5, 4), 40)))
    await asyncio.sleep(0)
    await worker.preempt("late")
    worker.gate.open()
    assert (await within(waiting)).stop == "preempted" and (await waiting).tokens == []
    for done in await within(asyncio.gather(*running)):
        assert len(done.tokens) == 40
    await worker.preempt("nobody")  # unknown: ignored
    await worker.preempt("r0")  # ended: ignored
    assert (await within(collect(worker, ask("r0", tiny.tokens(0, 4), 3)))).stop == "length"


async def test_a_preemption_does_not_reach_the_next_request(worker, weights):
    """Preempted, left and asked again, all while one step is in flight."""
    context = tiny.tokens(0, 4)
    stream = worker.generate(ask("t", context, 40))
    await within(anext(stream))
    await worker.gate.shut()
    await worker.preempt("t")
    await stream.aclose()
    again = asyncio.create_task(collect(worker, ask("t", context, 6)))
    await asyncio.sleep(0)
    worker.gate.open()
    done = await within(again)
    assert (done.tokens, done.stop) == (tiny.greedy(weights, context, 6), "length")


async def test_update_between_chunks(worker, weights, newer):
    context = tiny.tokens(0, 4)
    stream, done = worker.generate(ask("t", context, 20)), tiny.Collected()
    done.add(await within(anext(stream)))
    await worker.gate.shut()
    update = asyncio.create_task(worker.update_weights(newer, 1))
    await asyncio.sleep(0.05)
    assert not update.done()  # never in the middle of a step
    worker.gate.open()
    await within(update)
    async with asyncio.timeout(SECONDS):
        async for chunk in stream:
            done.add(chunk)
    old = done.versions.count(0)
    assert done.versions == [0] * old + [1] * (20 - old) and 4 <= old < 20
    whole = context + done.tokens
    np.testing.assert_allclose(done.logprobs[:old], tiny.score(weights, whole)[4 : 4 + old], atol=1e-4)
    np.testing.assert_allclose(done.logprobs[old:], tiny.score(newer, whole)[4 + old :], atol=1e-4)
    assert worker.load().pause_s > 0


async def test_update_of_an_idle_worker(worker, newer):
    await within(worker.update_weights(newer, 7))
    done = await within(collect(worker, ask("t", tiny.tokens(0, 4), 3)))
    assert done.versions == [7] * 3 and done.tokens == tiny.greedy(newer, tiny.tokens(0, 4), 3)


async def test_release(worker):
    await within(collect(worker, ask("t", tiny.tokens(0, 4), 3)))
    await worker.release("t")
    await worker.release("unknown")
    await within(collect(worker, ask("t", tiny.tokens(0, 4), 3)))
    assert worker.load().prefilled_tokens == 2 * 3  # nothing was left to reuse


async def test_close_ends_every_wait(worker, newer):
    readers = [asyncio.create_task(collect(worker, ask(str(i), tiny.tokens(i, 4), 40))) for i in range(5)]
    await asyncio.sleep(0)
    await worker.gate.shut()
    update = asyncio.create_task(worker.update_weights(newer, 1))
    await asyncio.sleep(0)
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0)
    worker.gate.open()
    await within(closing)
    for wait in (*readers, update):
        with pytest.raises(WorkerError, match="w0 was closed"):
            await within(wait)


async def test_after_close(worker, newer):
    unread = worker.generate(ask("u", tiny.tokens(0, 4), 40))
    await within(anext(unread))
    await within(worker.close())
    for _ in range(2):  # the second time must not say that the first is still there
        with pytest.raises(WorkerError, match="w0 is closed"):
            await within(anext(worker.generate(ask("t", tiny.tokens(0, 4), 3))))
    with pytest.raises(WorkerError, match="closed"):
        await within(worker.update_weights(newer, 1))
    await within(unread.aclose())  # leaving is always possible
    await within(worker.close())


@pytest.mark.parametrize("on_update", ["recompute", "drain"])
async def test_an_engine_failure_reaches_every_reader_and_every_update_that_waits(weights, newer, on_update):
    """The update is asked for while the step that fails is under way, so that it is never made: it must say so."""
    engine = tiny.engine(weights, on_update=on_update)
    worker = JaxWorker("w1", engine)
    inner, broken = engine.step, threading.Event()

    def failing():
        if broken.is_set():
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return inner()

    engine.step = failing
    gate = Gate(engine)
    await worker.start()
    readers = [asyncio.create_task(collect(worker, ask(str(i), tiny.tokens(i, 4), 40))) for i in range(5)]
    await gate.shut()  # inside the step that will fail
    updates = [asyncio.create_task(worker.update_weights(newer, version)) for version in (1, 2)]
    exported = asyncio.create_task(worker.export_kv("0"))
    await asyncio.sleep(0.01)
    assert len(worker._asked) == 3
    broken.set()
    gate.open()
    for reader in readers:
        with pytest.raises(WorkerError, match=r"w1 failed: .*RESOURCE_EXHAUSTED"):
            await within(reader)
    failures = await within(asyncio.gather(*updates, exported, return_exceptions=True))
    assert all(isinstance(failure, WorkerError) for failure in failures), failures
    assert all("w1 failed" in str(failure) and "RESOURCE_EXHAUSTED" in str(failure) for failure in failures)
    assert len({id(failure) for failure in failures}) == 3  # a fresh one for everybody who asks
    assert engine.version == 0
    with pytest.raises(WorkerError, match=r"w1 failed: .*RESOURCE_EXHAUSTED"):
        await within(anext(worker.generate(ask("t", tiny.tokens(0, 4), 3))))
    with pytest.raises(WorkerError, match=r"w1 failed: .*RESOURCE_EXHAUSTED"):
        await within(worker.close())
    assert not [t for t in threading.enumerate() if t.name.startswith("engine-w1")]


async def test_weights_that_fail_fail_their_caller(weights):
    """A weight tree whose buffers the trainer has donated."""
    worker = JaxWorker("w2", tiny.engine(weights))
    await worker.start()
    dead = tiny.params(2)
    for leaf in dead["layer_0"]["attn"].values():
        if hasattr(leaf, "delete"):
            leaf.delete()
    with pytest.raises(WorkerError, match=r"w2 failed: .*deleted"):
        await within(worker.update_weights(dead, 1))
    with pytest.raises(WorkerError, match=r"w2 failed: .*deleted"):
        await within(worker.close())

"""A request that is retracted, abandoned or preempted leaves the worker as it was: the same call, the same turn."""

import asyncio
import contextlib
import random

import pytest

from venusrl.rollout.engine.jax_worker import JaxWorker

from . import tiny
from .tiny import ask

SECONDS = 60


async def collect(worker, request):
    done = tiny.Collected()
    async for chunk in worker.generate(request):
        done.add(chunk)
    return done


async def leave_after(worker, request, chunks: int):
    async with contextlib.aclosing(worker.generate(request)) as stream:
        async for chunk in stream:
            chunks -= 1
            if chunks <= 0 or chunk.stop:
                return


@pytest.mark.parametrize("seed", range(4))
async def test_calls_that_are_left_at_any_moment_change_nothing_for_the_call_that_comes_again(weights, seed):
    """With few pages, so that running requests are retracted for one another."""
    rng = random.Random(seed)
    engine = tiny.engine(weights, kv_tokens=40)
    worker = JaxWorker("w", engine)
    await worker.start()
    requests = [ask(f"t{i}", tiny.tokens(i, 3 + i), 14, temperature=0.9, seed=i) for i in range(6)]
    alone = tiny.run(tiny.engine(weights), requests)

    async def hang_up(request):
        for _ in range(rng.randint(1, 3)):
            kind = rng.random()
            if kind < 0.5:
                task = asyncio.create_task(collect(worker, request))
                await asyncio.sleep(rng.random() * 0.02)
                task.cancel()
                await asyncio.wait({task})
            elif kind < 0.8:
                await leave_after(worker, request, rng.randint(1, 3))
            else:
                task = asyncio.create_task(collect(worker, request))
                await asyncio.sleep(rng.random() * 0.02)
                await worker.preempt(request.trajectory)
                await task
        return await collect(worker, request)

    async with asyncio.timeout(SECONDS):
        ends = await asyncio.gather(*(hang_up(request) for request in requests))
    for request, end in zip(requests, ends, strict=True):
        assert (end.tokens, end.stop) == (alone[request.trajectory].tokens, "length")
    for request in requests:
        await worker.release(request.trajectory)
    async with asyncio.timeout(SECONDS):
        while worker._asked:
            await asyncio.sleep(0.005)
    load = worker.load()
    assert load.running == load.waiting == 0 and not worker._streams
    assert load.free_pages + load.evictable_pages == load.pages  # nothing is locked any more
    assert not engine._claims and not engine._awaited and not engine._queue.priority and not engine._resident
    await worker.close()


def test_a_retracted_request_that_is_cancelled_while_it_waits_leaves_nothing_locked(weights):
    engine = tiny.engine(weights, kv_tokens=40)
    requests = [ask(f"t{i}", tiny.tokens(i, 8), 30, temperature=0.9, seed=i) for i in range(3)]
    for request in requests:
        engine.submit(request)
    for _ in range(50):
        if engine.load().retracted:
            break
        engine.step()
    assert engine.load().retracted and engine.load().waiting
    for request in requests:
        assert engine.cancel(request.trajectory)
        assert not engine.cancel(request.trajectory)
    load = engine.load()
    assert load.running == load.waiting == 0 and load.free_pages + load.evictable_pages == load.pages
    done = tiny.run(engine, [requests[1]])["t1"]
    assert done.tokens == tiny.run(tiny.engine(weights), [requests[1]])["t1"].tokens

"""What fails between two steps: its caller's alone where the engine is as it was, and else the worker's end."""

import asyncio

import pytest

from venusrl.core.errors import WorkerError
from venusrl.rollout.engine.jax_worker import JaxWorker

from . import tiny
from .tiny import ask

SECONDS = 60
CONTEXT = tiny.tokens(1, 18)


def fails(error: Exception):
    def call(*args):
        raise error

    return call


@pytest.fixture(scope="module")
def prefix(weights):
    engine = tiny.engine(weights)
    tiny.run(engine, [ask("t", CONTEXT, 4)])
    return engine.export("t")


@pytest.mark.parametrize("host_tokens", [0, 64])
@pytest.mark.parametrize("error", [RuntimeError("RESOURCE_EXHAUSTED"), ValueError("a bug")], ids=["device", "bug"])
def test_pages_of_kv_that_could_not_be_placed_are_given_back(weights, prefix, error, host_tokens, monkeypatch):
    engine = tiny.engine(weights, kv_tokens=40, host_tokens=host_tokens)
    tiny.run(engine, [ask("other", tiny.tokens(3, 30), 4)])  # what has to leave for it
    tree = engine._kv.tree
    with monkeypatch.context() as patched:
        patched.setattr(engine._kv._programs, "place", fails(error))
        for _ in range(10):
            with pytest.raises((WorkerError, ValueError), match=str(error)):
                engine.bring(prefix)
            engine.check()
            assert tree.free + tree.evictable == tree.capacity
    assert engine.bring(prefix) == len(prefix.tokens)
    engine.check()


def test_pages_are_given_back_where_host_memory_cannot_take_what_leaves(weights, prefix, monkeypatch):
    engine = tiny.engine(weights, kv_tokens=40, host_tokens=64)
    tiny.run(engine, [ask("other", tiny.tokens(3, 30), 4)])
    with monkeypatch.context() as patched:
        patched.setattr(engine._kv._host, "write", fails(MemoryError()))
        with pytest.raises(MemoryError):
            engine.bring(prefix)
    engine.check()
    assert engine._kv.tree.free + engine._kv.tree.evictable == engine._kv.tree.capacity


async def turn(worker, name: str) -> list[int]:
    async with asyncio.timeout(SECONDS):
        return [token async for chunk in worker.generate(ask(name, CONTEXT, 4)) for token in chunk.tokens]


async def test_kv_that_the_device_does_not_take_fails_its_caller_alone(weights, prefix, monkeypatch):
    worker = JaxWorker("w", tiny.engine(weights))
    await worker.start()
    with monkeypatch.context() as patched:
        patched.setattr(worker._engine._kv._programs, "place", fails(RuntimeError("RESOURCE_EXHAUSTED")))
        with pytest.raises(WorkerError, match=r"KV of t was not taken: .*RESOURCE_EXHAUSTED"):
            await worker.import_kv(prefix)
    with monkeypatch.context() as patched:
        patched.setattr(worker._engine, "export", fails(TypeError("a bug that reads")))
        with pytest.raises(WorkerError, match="a bug that reads"):
            await worker.export_kv("t")
    assert worker.failure is None and await turn(worker, "a") == tiny.greedy(weights, CONTEXT, 4)
    await worker.close()


@pytest.mark.parametrize("what", ["bring", "reset"])
async def test_a_call_that_fails_in_the_midst_of_a_change_ends_the_worker(weights, prefix, what, monkeypatch):
    """The worker went on with pages that nobody knew of, and told only the caller."""
    worker = JaxWorker("w", tiny.engine(weights))
    await worker.start()
    broken = {"bring": (worker._engine._kv.tree, "insert"), "reset": (worker._engine._kv, "drop")}[what]
    with monkeypatch.context() as patched:
        patched.setattr(*broken, fails(KeyError("half changed")))
        call = worker.import_kv(prefix) if what == "bring" else worker.reset()
        with pytest.raises(WorkerError, match="half changed"):
            await asyncio.wait_for(call, SECONDS)
    with pytest.raises(WorkerError, match="half changed"):
        await turn(worker, "a")
    with pytest.raises(WorkerError, match="half changed"):
        await worker.close()


async def test_a_device_that_loses_its_pages_while_kv_comes_ends_the_worker(weights, prefix, monkeypatch):
    worker = JaxWorker("w", tiny.engine(weights))
    await worker.start()

    def place(pool, where, blocks):
        for layer in pool:
            for x in layer:
                x.delete()
        raise RuntimeError("device lost")

    monkeypatch.setattr(worker._engine._kv._programs, "place", place)
    with pytest.raises(WorkerError, match=r"w failed: .*device lost"):
        await asyncio.wait_for(worker.import_kv(prefix), SECONDS)
    assert worker.failure is not None
    with pytest.raises(WorkerError, match="device lost"):
        await worker.close()

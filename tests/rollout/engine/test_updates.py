"""New weights in a running worker: told when they are in use, never back to older ones, never of another model."""

import asyncio
import random
import threading

import jax
import pytest

from venusrl.core.errors import ContractError
from venusrl.rollout.engine.jax_worker import JaxWorker

from . import tiny
from .tiny import ask

SECONDS = 60


async def started(weights, **options) -> JaxWorker:
    worker = JaxWorker("w", tiny.engine(weights, **options))
    await worker.start()
    return worker


async def collect(worker, request):
    done = tiny.Collected()
    async for chunk in worker.generate(request):
        done.add(chunk)
    return done


@pytest.mark.parametrize("version", [1, 0])
async def test_a_draining_update_returns_only_once_its_weights_are_in_use(weights, newer, version):
    """Of the same version as before, too: what counts is the weights."""
    worker = await started(weights, on_update="drain")
    async with asyncio.timeout(SECONDS):
        stream, done = worker.generate(ask("t", tiny.tokens(0, 4), 30)), tiny.Collected()
        done.add(await anext(stream))
        update = asyncio.create_task(worker.update_weights(newer, version))
        while done.stop is None:
            assert not update.done()
            done.add(await anext(stream))
        await update
        assert done.tokens == tiny.greedy(weights, tiny.tokens(0, 4), 30)  # of the old weights to its end
        after = await collect(worker, ask("u", tiny.tokens(1, 4), 8))
    assert after.tokens == tiny.greedy(newer, tiny.tokens(1, 4), 8)
    assert after.versions == [version] * 8
    await worker.close()


@pytest.mark.parametrize("on_update", ["recompute", "keep", "drain"])
async def test_an_update_with_an_older_version_is_refused_and_the_worker_goes_on(weights, newer, on_update):
    worker = await started(weights, on_update=on_update)
    async with asyncio.timeout(SECONDS):
        await worker.update_weights(newer, 5)
        for version in (4, 0):
            with pytest.raises(ContractError, match=f"version {version} are older than those of version 5"):
                await worker.update_weights(weights, version)
        for version in (-1, True, 1.5, "6", None):
            with pytest.raises(ContractError, match="whole number"):
                await worker.update_weights(weights, version)
        done = await collect(worker, ask("t", tiny.tokens(0, 4), 5))
        assert done.tokens == tiny.greedy(newer, tiny.tokens(0, 4), 5) and done.versions == [5] * 5
        await worker.update_weights(weights, 5)  # the same version again: taken again
        assert (await collect(worker, ask("u", tiny.tokens(0, 4), 5))).tokens == tiny.greedy(
            weights, tiny.tokens(0, 4), 5
        )
        await worker.reset()  # another run begins
        await worker.update_weights(newer, 2)
        assert (await collect(worker, ask("v", tiny.tokens(0, 4), 5))).versions == [2] * 5
    await worker.close()


async def test_an_update_older_than_one_that_waits_is_refused(weights, newer):
    worker = await started(weights, on_update="drain")
    async with asyncio.timeout(SECONDS):
        reader = asyncio.create_task(collect(worker, ask("t", tiny.tokens(0, 4), 40)))
        while not worker.load().running:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(worker.update_weights(newer, 3))
        await asyncio.sleep(0)
        with pytest.raises(ContractError, match="version 2 are older than those of version 3"):
            await worker.update_weights(weights, 2)
        assert (await reader).versions == [0] * 40
        await waiting
    await worker.close()


async def test_weights_of_another_model_are_refused_and_the_worker_goes_on(weights):
    worker = await started(weights)
    fewer = {name: part for name, part in tiny.params(1).items() if name != "layer_1"}
    wider = jax.tree.map(lambda x: x, tiny.params(1))
    wider["layer_0"] = jax.tree.map(lambda x: x[..., None], wider["layer_0"])
    async with asyncio.timeout(SECONDS):
        for other, says in ((fewer, "layer_1"), (wider, "layer_0"), (None, "they are of another model"), ({}, "embed")):
            with pytest.raises(ContractError, match=says):
                await worker.update_weights(other, 1)
        assert (await collect(worker, ask("t", tiny.tokens(0, 4), 5))).versions == [0] * 5
    await worker.close()


@pytest.mark.parametrize("what", ["a request", "close"])
async def test_what_is_asked_for_while_an_idle_worker_takes_weights_is_not_forgotten(weights, newer, what):
    """It waited until somebody asked for something else."""
    worker = await started(weights)
    take, entered, go_on = worker._engine.set_weights, threading.Event(), threading.Event()

    def slow(*args):
        entered.set()
        assert go_on.wait(SECONDS)
        take(*args)

    worker._engine.set_weights = slow
    update = asyncio.create_task(worker.update_weights(newer, 1))
    await asyncio.to_thread(entered.wait, SECONDS)
    asked = collect(worker, ask("t", tiny.tokens(0, 4), 5)) if what == "a request" else worker.close()
    waiting = asyncio.create_task(asked)
    await asyncio.sleep(0)
    go_on.set()
    async with asyncio.timeout(10):
        await waiting
        if what == "a request":
            await update
            await worker.close()
    update.cancel()
    await asyncio.wait({update})


@pytest.mark.parametrize("on_update", ["recompute", "drain"])
@pytest.mark.parametrize("seed", range(3))
async def test_random_updates_under_load_are_in_use_when_they_return_and_versions_only_grow(
    weights, newer, seed, on_update
):
    rng = random.Random(seed)
    by_version = {0: weights}
    worker = await started(weights, on_update=on_update)
    answers = []

    async def reader(number):
        await asyncio.sleep(rng.random() * 0.3)
        context = tiny.tokens(number, 4)
        answers.append((context, await collect(worker, ask(f"t{number}", context, rng.randint(1, 20)))))

    async def updater():
        newest = 0
        for _ in range(8):
            await asyncio.sleep(rng.random() * 0.05)
            version = newest + rng.choice([-1, 0, 1, 2])
            if version < newest:
                with pytest.raises(ContractError):
                    await worker.update_weights(newer, version)
                continue
            newest = version
            if version not in by_version:
                by_version[version] = rng.choice([weights, newer])
            await worker.update_weights(by_version[version], version)
            assert worker._engine.version == version and worker._engine._next is None

    async with asyncio.timeout(SECONDS):
        await asyncio.gather(updater(), *(reader(i) for i in range(12)))
    assert len(answers) == 12
    for context, done in answers:
        assert done.stop == "length" and done.versions == sorted(done.versions)
        if on_update == "drain":  # one version a turn, and the tokens of just that one
            (version,) = set(done.versions)
            assert done.tokens == tiny.greedy(by_version[version], context, len(done.tokens))
    await worker.close()

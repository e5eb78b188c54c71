"""The worker suite against the workers that there are."""

import asyncio
import time

import flax.linen as nn
import jax
import pytest

from venusrl.core.errors import WorkerError
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import init_params
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.jax_worker import JaxWorker
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.worker import Request

from .scripted import Script, ScriptedWorker
from .worker_suite import WorkerSuite, collect

CONFIG = ModelConfig(24, 16, 1, 2, 1, 8, 24, rope_theta=1e4, max_length=64)
OPTIONS = EngineOptions(
    slots=3, max_length=48, decode_steps=4, prefill_rows=(4,), prefill_tokens=(16,), read_lengths=()
)


@pytest.fixture(scope="session")
def params():
    return [nn.unbox(init_params(CONFIG, jax.random.key(i))) for i in range(2)]


class TestJaxWorker(WorkerSuite):
    STOP = (0, 21)

    @pytest.fixture
    async def worker(self, params):
        worker = JaxWorker("jax", Engine(CONFIG, params[0], 4, self.STOP, OPTIONS))
        await worker.start()
        yield worker
        await worker.close()

    @pytest.fixture
    def new_params(self, params):
        return params[1]


class TestScriptedWorker(WorkerSuite):
    """The double of the service tests keeps the contract too."""

    script = Script(lambda turn, seed: "x" * 35 if seed % 2 else f"say {seed}")
    STOP = (script.tokenizer.im_end,)

    @pytest.fixture
    async def worker(self):
        return ScriptedWorker(self.script, slots=3, max_length=48)

    @pytest.fixture
    def prompt(self):
        return self.script.chat.prompt([{"role": "user", "content": ""}])


async def test_a_crash_of_the_engine_is_told_to_everybody_who_waits(params):
    """miles#1724: whoever waits on a broken worker hears of it, weight updates too."""
    engine = Engine(CONFIG, params[0], 0, (0,), OPTIONS)
    worker = JaxWorker("jax", engine)
    await worker.start()
    late = []

    def crash():
        late.append(asyncio.run_coroutine_threadsafe(worker.update_weights(params[1], 1), loop))
        time.sleep(0.05)
        raise RuntimeError("device lost")

    loop = asyncio.get_running_loop()
    engine.step = crash
    with pytest.raises(WorkerError, match="device lost"):
        await collect(worker, Request("g0/0", [1, 2], 4))
    with pytest.raises(WorkerError, match="device lost"):
        await asyncio.wait_for(asyncio.wrap_future(late[0]), 5)
    with pytest.raises(WorkerError, match="device lost"):
        await worker.update_weights(params[1], 2)
    assert "device lost" in str(worker.failure)  # a driver whose only worker it is can end at once
    with pytest.raises(WorkerError, match="device lost"):
        await worker.close()


async def test_a_worker_that_has_failed_is_known_without_asking(params):
    """A process around it can end, so that another is started."""
    worker = JaxWorker("jax", Engine(CONFIG, params[0], 0, (0,), OPTIONS))
    await worker.start()
    waiting = asyncio.create_task(worker.wait())
    await asyncio.sleep(0.05)
    assert not waiting.done()

    def crash():
        raise RuntimeError("device lost")

    worker._engine.step = crash
    with pytest.raises(WorkerError, match="device lost"):
        await collect(worker, Request("g0/0", [1, 2], 4))
    await asyncio.wait_for(waiting, 5)
    with pytest.raises(WorkerError, match="device lost"):
        await worker.close()

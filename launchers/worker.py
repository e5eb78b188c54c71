"""A worker in a process of its own, for training or serving on other machines or beside others on this one.

    python -m launchers.worker --config=configs/quickstart.py --port=9001
    python -m launchers.train --config=configs/quickstart.py --config.rollout.addresses="('http://127.0.0.1:9001',)"

It begins with the weights of the configuration's checkpoint, as version 0, and takes new ones from whoever trains. The
port is printed when it answers. It ends at SIGTERM, SIGINT or SIGHUP, and with exit code 1 where its engine or its HTTP
server fails. It belongs to one run at a time; see docs/workers.md.
"""

import asyncio

import jax

from launchers import program, system
from launchers.address import Address, define_address
from launchers.configuration import check_config, define_config
from venusrl.core.errors import WorkerError
from venusrl.core.listening import answer
from venusrl.learner.publish import publish
from venusrl.models import hf
from venusrl.models.config import ModelConfig
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.jax_worker import JaxWorker
from venusrl.rollout.engine.transfer import from_bytes, to_bytes
from venusrl.rollout.remote.server import Codec, worker_app

_CONFIG = define_config("configs/quickstart.py", "The model, and the engine's options.")
_ADDRESS = define_address(0)


def codec(engine: Engine, shape: ModelConfig, stop_tokens: tuple[int, ...]) -> Codec:
    """KV and weights of `engine` as bytes. Bodies that hold more than they can are not read to their end."""
    most = 4 * sum(x.size for x in jax.tree.leaves(engine.params)) + (64 << 20)  # float32, and room for names

    def weights(data: bytes) -> dict:
        return publish(hf.from_bytes(data, shape), shape.dtype)

    kv = engine.kv_shape
    return Codec(
        lambda data: from_bytes(data, kv), to_bytes, weights, kv.most_bytes, most, shape.beside_weights(stop_tokens)
    )


async def serve(config, where: Address) -> None:
    """Until it is told to stop.

    Raises:
      WorkerError: the engine or the HTTP server has failed.
    """
    door = where.door()
    model = system.load_model(config)
    shape = model.config
    engine = Engine(shape, publish(model.params, shape.dtype), 0, model.chat.stop_tokens, system.engine_options(config))
    listener, address = where.listen()
    worker = JaxWorker(address, engine)
    await worker.start()

    print(f"worker at {address}", flush=True)
    serving = asyncio.create_task(
        answer(door(worker_app(worker, codec(engine, shape, model.chat.stop_tokens))), listener)
    )
    working = asyncio.create_task(worker.wait())
    try:  # where either fails, the process ends, and whoever watches over it can start another
        await asyncio.wait({serving, working}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (serving, working):
            task.cancel()
        await asyncio.wait({serving, working})
        await worker.close()  # raises what its engine has failed of
    for task, what in ((serving, "HTTP server"), (working, "engine")):
        if not task.cancelled() and (error := task.exception()) is not None:
            raise WorkerError(f"the {what} of the worker at {address} failed: {error!r}") from error


def main(argv) -> None:
    del argv
    check_config(_CONFIG.value)
    system.check(_CONFIG.value)
    system.use_compile_cache()
    asyncio.run(serve(_CONFIG.value, _ADDRESS))


if __name__ == "__main__":
    program.run(main, lasting=True)

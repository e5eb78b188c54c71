"""An OpenAI-compatible server over a model of ours; what passes through it is captured, token by token.

    python -m launchers.serve --config=configs/quickstart.py --port=8000
    python -m launchers.serve --workdir=runs/quickstart --port=8000

With --workdir the newest checkpoint of that run is served, with the run's own configuration. Give every conversation a
header `x-session-id`; GET /sessions/ID returns its tokens, mask, logprobs and versions. A session in which nothing
happens for --idle_s seconds is forgotten.
"""

import asyncio
from pathlib import Path

from absl import flags

from launchers import program, system
from launchers.address import define_address
from launchers.configuration import check_config, define_config, load_config
from launchers.finished import newest
from venusrl.core.listening import answer
from venusrl.learner.publish import publish
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.jax_worker import JaxWorker
from venusrl.rollout.gateway.app import Gateway

_CONFIG = define_config("configs/quickstart.py", "The model, and the engine's options.")
_WORKDIR = flags.DEFINE_string("workdir", "", "Folder of a run whose newest checkpoint is served.")
_IDLE_S = flags.DEFINE_float("idle_s", 3600.0, "Seconds after which an idle session is forgotten.", lower_bound=1.0)
_QUEUE = flags.DEFINE_integer("queue", 1024, "Replies that may wait; one more is refused with 429.", 0)
_ADDRESS = define_address(8000)


async def serve(config, workdir: str) -> None:
    """Until it is told to stop."""
    door = _ADDRESS.door()
    if workdir:  # its model, its tokenizer
        config = load_config(workdir)
        system.check(config)
    model = system.load_model(config)
    version, params = 0, model.params
    if workdir:
        version, state = newest(config, model.config, workdir)
        params = state.params
    listener, address = _ADDRESS.listen()
    shape = model.config
    engine = Engine(shape, publish(params, shape.dtype), version, model.chat.stop_tokens, system.engine_options(config))
    worker = JaxWorker("served", engine)
    await worker.start()
    name = config.model.name or Path(config.model.checkpoint).name
    gateway = Gateway(worker, model.tokenizer, model.chat, name, idle_s=_IDLE_S.value, queue=_QUEUE.value)
    print(f"serving at {address}/v1", flush=True)
    try:
        await answer(door(gateway.app()), listener)
    finally:
        await worker.close()


def main(argv) -> None:
    del argv
    check_config(_CONFIG.value)
    system.check(_CONFIG.value)
    system.use_compile_cache()
    asyncio.run(serve(_CONFIG.value, _WORKDIR.value))


if __name__ == "__main__":
    program.run(main, lasting=True)

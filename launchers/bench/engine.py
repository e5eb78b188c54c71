"""Tokens a second of the engine: decode with every slot busy, and prefill.

    python -m launchers.bench.engine

The last line is one JSON object: tokens_per_s (decode) and prefill_tokens_per_s by model size.
"""

import json
import statistics
import time

import flax.linen as nn
import jax
import numpy as np
from absl import app, flags

from launchers.bench import common
from venusrl.models.config import model_config
from venusrl.models.decoder import init_params
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.worker import Request

_SLOTS = flags.DEFINE_integer("slots", 32, "Requests at once.", lower_bound=1)

SIZES = {"1M": ("tiny", 256), "6M": ("6m", 512)}  # model, length of a row


def measure(name: str, length: int, dtype: str) -> tuple[float, float]:
    """(decode, prefill) tokens a second: prompts of half a row, generated until the row is full."""
    config = model_config(name, dtype=dtype)
    params = nn.meta.unbox(jax.jit(lambda k: init_params(config, k))(jax.random.key(0)))
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    never = (config.vocab_size,)  # no token stops, so every slot stays busy
    engine = Engine(
        config,
        params,
        0,
        never,
        EngineOptions(
            slots=_SLOTS.value, max_length=length, prefill_rows=(16,), prefill_tokens=(128,), read_lengths=()
        ),
    )
    rng = np.random.default_rng(0)
    prompt, decode_rates, prefill_rates = length // 2, [], []
    for repeat in range(common.REPEATS.value + 1):
        for i in range(_SLOTS.value):
            tokens = rng.integers(config.vocab_size, size=prompt).tolist()
            engine.submit(Request(f"{repeat}/{i}", tokens, length - prompt, seed=i))
        started = time.perf_counter()
        first = sum(len(chunk.tokens) for _, chunk in engine.step())  # prefills everything, decodes one chunk
        prefilled = time.perf_counter()
        made = 0
        while engine.busy:
            made += sum(len(chunk.tokens) for _, chunk in engine.step())
        took = time.perf_counter() - prefilled
        if repeat:  # the first round compiles
            decode_rates.append(made / took)
            chunk_s = first / decode_rates[-1]
            prefill_rates.append(_SLOTS.value * prompt / max(1e-9, prefilled - started - chunk_s))
        for i in range(_SLOTS.value):
            engine.release(f"{repeat}/{i}")
    return statistics.median(decode_rates), statistics.median(prefill_rates)


def run() -> dict:
    """The figures, printed as they come."""
    dtype = common.dtype()
    decode, prefill = {}, {}
    for size, (name, length) in SIZES.items():
        decode[size], prefill[size] = measure(name, length, dtype)
        print(
            f"{size}: decode {decode[size]:.0f} tokens/s, prefill {prefill[size]:.0f} tokens/s "
            f"({_SLOTS.value} slots of {length}, {dtype})",
            flush=True,
        )
    return {"tokens_per_s": decode, "prefill_tokens_per_s": prefill, "dtype": dtype, **common.describe()}


def main(argv) -> None:
    del argv
    print(json.dumps(run()))


if __name__ == "__main__":
    app.run(main)

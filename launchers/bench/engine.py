"""Tokens a second of the engine against a plain static cache, and what of its contexts it computes again.

    python -m launchers.bench.engine

Decode: every slot busy, prompts of half a row, generated until the row is full. The static cache beside it is the same
compiled decode on rows alone, in as many lanes, without pages, queue or streams; both take turns, so `paging_overhead`
is a ratio of one run. Turns: twice as many trajectories as slots take turns with observations between;
`reprefill_ratio` is prefilled tokens against tokens that are new. Where `--sglang` names a Python with SGLang, its
server is measured on the tiny model, 16 requests at once, and so is a worker of ours (`vs_sglang`); with `--llamacpp`,
llama.cpp and our engine generate from SmolLM2-135M in float32 (`vs_llamacpp`). The last line is one JSON object.
"""

import dataclasses
import functools
import json
import statistics
import time

import jax.numpy as jnp
import numpy as np
from absl import flags

from launchers import program
from launchers.bench import common, llamacpp, sglang
from venusrl.models.config import ModelConfig, model_config
from venusrl.rollout.engine.attention import choose
from venusrl.rollout.engine.cache import new_caches
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.lanes import Lanes
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.engine.programs import Programs, RowState
from venusrl.rollout.worker import Request

_SLOTS = flags.DEFINE_integer("slots", 32, "Requests at once.", 1, 4096)
_LANES = flags.DEFINE_integer("lanes", 0, "Parts of the slots that decode at once; 0: what fits.", 0, 1024)
_LLAMACPP = flags.DEFINE_bool("llamacpp", False, "Against llama.cpp, too; needs what `make test-parity` installs.")
_SGLANG = flags.DEFINE_string("sglang", "", "A Python interpreter that has SGLang; empty: not measured.")

# Model and tokens of a row. 1M has 0.85 million parameters; tiny is the quick start's.
SIZES = {
    "1M": (ModelConfig(512, 128, 4, 4, 2, 32, 384, rope_theta=1e4, max_length=1024), 256),
    "6M": (model_config("6m"), 512),
    "tiny": (model_config("tiny"), 256),
}


def options(slots: int, length: int, **more) -> EngineOptions:
    return EngineOptions(
        slots=slots,
        max_length=length,
        lanes=_LANES.value,
        decode_steps=16,
        prefill_rows=(16,),
        prefill_tokens=(128,),
        read_lengths=(),
        **more,
    )


class Paged:
    """The engine, one round at a time."""

    def __init__(self, config: ModelConfig, params: dict, slots: int, length: int):
        never = (config.vocab_size,)  # no token stops, so every slot stays busy
        self.engine = Engine(config, params, 0, never, options(slots, length))
        self.config, self.slots, self.length, self.rounds = config, slots, length, 0
        self.rng = np.random.default_rng(0)

    def round(self) -> tuple[float, float]:
        """(decode, prefill) tokens a second of one round."""
        self.rounds += 1
        prompt, names = self.length // 2, [f"{self.rounds}/{i}" for i in range(self.slots)]
        for i, name in enumerate(names):
            tokens = self.rng.integers(self.config.vocab_size, size=prompt).tolist()
            self.engine.submit(Request(name, tokens, self.length - prompt, seed=i))
        started = time.perf_counter()
        first = sum(len(chunk.tokens) for _, chunk in self.engine.step())  # prefills everything, decodes one chunk
        prefilled = time.perf_counter()
        made = 0
        while self.engine.busy:
            made += sum(len(chunk.tokens) for _, chunk in self.engine.step())
        rate = made / (time.perf_counter() - prefilled)
        for name in names:
            self.engine.release(name)
        return rate, self.slots * prompt / max(1e-9, prefilled - started - first / rate)


class Static:
    """The same decode on a static cache; the prompt's KV is whatever is there."""

    def __init__(self, config: ModelConfig, params: dict, slots: int, length: int, lanes: int):
        self.params, self.slots, self.length = params, slots // lanes, length
        self.steps = options(slots, length).decode_steps
        self.programs = Programs(config, (config.vocab_size,), choose("auto", config)[0])
        self.caches = [new_caches(config, self.slots, length) for _ in range(lanes)]
        self.lanes = Lanes(lanes)

    def round(self) -> float:
        """Decode tokens a second of one round."""
        started = time.perf_counter()
        made = sum(self.lanes.run([functools.partial(self._round, lane) for lane in range(len(self.caches))]))
        return made / (time.perf_counter() - started)

    def _round(self, lane: int) -> int:
        slots, position = self.slots, self.length // 2
        token = np.zeros(slots, np.int32)
        made = 0
        while position < self.length - 1:
            left = self.length - 1 - position
            columns = (token, np.full(slots, position), np.full(slots, left), np.ones(slots), np.arange(slots))
            kinds = (np.int32, np.int32, np.int32, np.float32, np.int32)
            state = RowState(*(jnp.asarray(x, kind) for x, kind in zip(columns, kinds, strict=True)))
            caches = self.caches[lane]
            self.caches[lane], out = self.programs.decode(self.steps, self.length, self.params, caches, None, state)
            tokens, _, count = (np.asarray(x) for x in out)
            position += int(count[0])
            token = tokens[int(count[0]) - 1]
            made += int(count.sum())
        return made


def decode(config: ModelConfig, length: int) -> dict[str, float]:
    """Medians of rounds that take turns: decode, static and prefill tokens a second, and what paging costs."""
    params = common.random_params(config)
    paged = Paged(config, params, _SLOTS.value, length)
    static = Static(config, params, _SLOTS.value, length, paged.engine.options.lanes)
    paged.round(), static.round()  # these compile
    rounds = [(*paged.round(), static.round()) for _ in range(common.REPEATS.value)]
    rate, prefill, plain = (statistics.median(column) for column in zip(*rounds, strict=True))
    overhead = statistics.median(p / d - 1 for d, _, p in rounds)
    return {"decode": rate, "best": max(d for d, _, _ in rounds), "static": plain, "prefill": prefill, "cost": overhead}


def reprefill_ratio(turns: int = 6, prompt: int = 100, generated: int = 24, observed: int = 12) -> float:
    """Prefilled tokens against new ones, over the turns of twice as many trajectories as slots, in groups of eight."""
    config = SIZES["1M"][0]
    slots, count = _SLOTS.value, 2 * _SLOTS.value
    o = options(slots, 512, kv_tokens=count * 512)
    engine = Engine(config, common.random_params(config), 0, (config.vocab_size,), o)
    rng = np.random.default_rng(0)

    def fresh(n: int) -> list[int]:
        return rng.integers(config.vocab_size, size=n).tolist()

    prompts = [fresh(prompt) for _ in range(-(-count // 8))]
    contexts = {f"g{i // 8}/{i % 8}": list(prompts[i // 8]) for i in range(count)}
    new = prompt * len(prompts)
    for turn in range(turns):
        for i, (name, context) in enumerate(contexts.items()):
            if turn:
                context += fresh(observed)
                new += observed + 1  # and the last token that was generated
            engine.submit(Request(name, list(context), generated, seed=i))
        while engine.busy:
            for request, chunk in engine.step():
                contexts[request.trajectory] += chunk.tokens
    return engine.load().prefilled_tokens / new


def run() -> dict:
    """The figures, printed as they come."""
    dtype = common.dtype()
    found = {}
    for size, (config, length) in SIZES.items():
        found[size] = decode(dataclasses.replace(config, dtype=dtype), length)
        f = found[size]
        print(
            f"{size}: decode {f['decode']:.0f} tokens/s ({f['best']:.0f} at best), static cache {f['static']:.0f}, "
            f"paging {f['cost']:+.1%}, prefill {f['prefill']:.0f} ({_SLOTS.value} slots of {length}, {dtype})",
            flush=True,
        )
    ratio = reprefill_ratio()
    print(f"turns: {ratio:.3f} tokens prefilled for each new one", flush=True)
    result = {
        "decode_tokens_per_s": {size: round(f["decode"]) for size, f in found.items()},
        "decode_tokens_per_s_best": {size: round(f["best"]) for size, f in found.items()},
        "static_tokens_per_s": {size: round(f["static"]) for size, f in found.items()},
        "paging_overhead": {size: round(f["cost"], 3) for size, f in found.items()},
        "prefill_tokens_per_s": {size: round(f["prefill"]) for size, f in found.items()},
        "reprefill_ratio": round(ratio, 3),
    }
    if _SGLANG.value:
        ours, theirs = sglang.compare(_SGLANG.value)
        print(f"16 at once on the tiny model: {ours:.0f} tokens/s, SGLang {theirs:.0f}: {ours / theirs:.1f}x")
        result |= {"vs_sglang": round(ours / theirs, 2), "sglang_tokens_per_s": round(theirs)}
    if _LLAMACPP.value:
        ours, theirs = llamacpp.compare(_SLOTS.value, rounds=3)
        print(f"SmolLM2-135M, every slot: {ours:.0f} tokens/s, llama.cpp {theirs:.0f}: {ours / theirs:.2f}x")
        result |= {"vs_llamacpp": round(ours / theirs, 2), "llamacpp_tokens_per_s": round(theirs)}
    return {**result, "dtype": dtype, **common.describe()}


def main(argv) -> None:
    del argv
    print(json.dumps(run()))


if __name__ == "__main__":
    program.run(main)

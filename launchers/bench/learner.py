"""Tokens a second of the train step: forward, backward and optimizer, on packed rows of full length.

    python -m launchers.bench.learner

The last line is one JSON object, each figure by model size: tokens_per_s; of_matmul, its FLOP/s as a share of those of
a plain matrix product in the same run; mfu, of the device's peak where that is known.
"""

import json
import statistics
import time

import jax
import numpy as np
from absl import flags

from launchers import program
from launchers.bench import common
from venusrl.core.trajectory import Trajectory
from venusrl.models.config import model_config

_ROWS = flags.DEFINE_integer("rows", 8, "Rows of a step.", 1, 4096)
_LENGTH = flags.DEFINE_integer("length", 512, "Tokens of a row.", 8, 131072)

SIZES = {"1M": "tiny", "6M": "6m"}


def full_row(rng: np.random.Generator, index: int, length: int, vocab: int) -> Trajectory:
    """A trajectory of `length` tokens, half of them generated."""
    trajectory = Trajectory(f"bench/{index}", "bench", index)
    tokens = rng.integers(vocab, size=length).tolist()
    half = length // 2
    trajectory.append_observation(tokens[:half])
    trajectory.append_generated(tokens[half:], [-float(np.log(vocab))] * (length - half), 0)
    trajectory.complete(1.0)
    return trajectory


def measure(name: str, dtype: str) -> float:
    """Tokens a second of one model."""
    config = model_config(name, dtype=dtype)
    learner = common.grpo_learner(config, _LENGTH.value, _ROWS.value)
    learner.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    rows = [full_row(rng, i, _LENGTH.value, config.vocab_size) for i in range(_ROWS.value)]
    advantages = rng.normal(size=len(rows))
    learner.train(rows, advantages)  # compiles
    times = []
    for _ in range(common.REPEATS.value):
        started = time.perf_counter()
        learner.train(rows, advantages)
        times.append(time.perf_counter() - started)
    return _ROWS.value * _LENGTH.value / statistics.median(times)


def run() -> dict:
    """The figures, printed as they come."""
    dtype = common.dtype()
    speeds, of_matmul, mfu = {}, {}, {}
    peak, matmul = common.peak_flops(jax.devices()[0]), common.matmul_flops(dtype)
    for size, name in SIZES.items():
        speeds[size] = measure(name, dtype)
        flops = speeds[size] * model_config(name).train_flops_per_token(_LENGTH.value) / jax.device_count()
        of_matmul[size] = flops / matmul
        print(
            f"{size}: {speeds[size]:.0f} tokens/s, {of_matmul[size]:.2f} of a matrix product "
            f"({_ROWS.value} rows of {_LENGTH.value}, {dtype})",
            flush=True,
        )
        if peak:
            mfu[size] = flops / peak
    return {"tokens_per_s": speeds, "of_matmul": of_matmul, "mfu": mfu, "dtype": dtype, **common.describe()}


def main(argv) -> None:
    del argv
    print(json.dumps(run()))


if __name__ == "__main__":
    program.run(main)

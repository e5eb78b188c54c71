"""One short check on whatever accelerator JAX finds: numerics, then speed. At most four minutes.

    make check-gpu

Numerics: what the engine says of the tokens it generated, against what the learner computes for them, in the dtype
of the accelerator and in float32. The last line is one JSON object.
"""

import json
import sys

import flax.linen as nn
import jax
import numpy as np

from launchers import program
from launchers.bench import common
from launchers.bench import engine as engine_bench
from launchers.bench import learner as learner_bench
from venusrl.core.trajectory import Trajectory
from venusrl.models.config import model_config
from venusrl.models.decoder import init_params
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.worker import Request

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}  # largest |difference| of a logprob; accelerators multiply in tf32


def mismatch(dtype: str) -> float:
    """Largest |engine - learner| logprob over three turns of eight trajectories."""
    config = model_config("tiny", dtype=dtype)
    params = nn.meta.unbox(init_params(config, jax.random.key(0)))
    engine = Engine(config, params, 0, (0,), EngineOptions(slots=8, max_length=256, read_lengths=()))
    rng = np.random.default_rng(0)
    trajectories = {f"t{i}": Trajectory(f"t{i}", "check", i, seed=i) for i in range(8)}
    for _ in range(3):
        for name, t in trajectories.items():
            t.append_observation(rng.integers(1, config.vocab_size, size=int(rng.integers(5, 40))).tolist())
            engine.submit(Request(name, list(t.tokens), 16, 1.0, t.seed))
        while engine.busy:
            for request, chunk in engine.step():
                trajectories[request.trajectory].append_generated(chunk.tokens, chunk.logprobs, chunk.version)
    learner = common.grpo_learner(config, 256, 8 * jax.device_count())
    learner.start_from(params)
    scores = learner.score(list(trajectories.values()))
    worst = 0.0
    for t, score in zip(trajectories.values(), scores, strict=True):
        mask = np.asarray(t.loss_mask) > 0
        worst = max(worst, float(np.abs(score - np.asarray(t.logprobs))[mask].max()))
    return worst


def main(argv) -> None:
    del argv
    facts = common.describe()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if jax.default_backend() == "cpu":
        print("JAX finds no accelerator here; these are the figures of the CPU.")
    worst = {dtype: mismatch(dtype) for dtype in TOLERANCE}
    for dtype, value in worst.items():
        print(f"engine against learner, {dtype}: largest logprob difference {value:.2e} (limit {TOLERANCE[dtype]})")
    result = {
        "backend": jax.default_backend(),
        "mismatch": worst,
        "learner": learner_bench.run(),
        "engine": engine_bench.run(),
        **facts,
    }
    print(json.dumps(result))
    sys.exit(any(worst[dtype] > limit for dtype, limit in TOLERANCE.items()))


if __name__ == "__main__":
    program.run(main)

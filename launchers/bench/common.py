"""What the benchmarks share: their flags, and what they ran on."""

import platform
import statistics
import time
from typing import Any

import flax.linen as nn
import jax
import jaxlib
from absl import flags

from venusrl.learner.learner import Learner, LearnerOptions
from venusrl.learner.objectives import make_objective
from venusrl.learner.sharding import make_mesh
from venusrl.learner.state import make_optimizer
from venusrl.learner.step import StepOptions
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import init_params

REPEATS = flags.DEFINE_integer("repeats", 5, "Timed rounds; the median counts.", 1, 10_000)
_DTYPE = flags.DEFINE_enum("dtype", "", ["", "float32", "bfloat16"], "Default: float32 on CPUs, else bfloat16.")

# Dense bfloat16 peak of one chip in FLOP/s, from the makers' data sheets.
_PEAK_BF16 = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
}


def dtype() -> str:
    """The type of activations to measure with."""
    return _DTYPE.value or ("float32" if jax.default_backend() == "cpu" else "bfloat16")


def peak_flops(device: jax.Device) -> float | None:
    """Peak FLOP/s of one device in bfloat16; None where no data sheet is known (every CPU)."""
    return next((peak for name, peak in _PEAK_BF16.items() if device.device_kind.startswith(name)), None)


def matmul_flops(dtype: str, size: int = 1024) -> float:
    """FLOP/s of a plain matrix product here and now: what the figures of the same run are held against."""
    multiply = jax.jit(lambda a, b: a @ b)
    a = jax.random.normal(jax.random.key(0), (size, size), dtype)
    multiply(a, a).block_until_ready()
    times = []
    for _ in range(20):
        started = time.perf_counter()
        multiply(a, a).block_until_ready()
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times)


def grpo_learner(config: ModelConfig, row_length: int, rows: int) -> Learner:
    """A learner over all devices, without a state; a step takes `rows` at once."""
    options = LearnerOptions(row_length=row_length, rows_per_part=rows)
    return Learner(
        config, make_objective("grpo", {}), make_optimizer(1e-4), make_mesh((1, -1, 1)), StepOptions(), options
    )


def random_params(config: ModelConfig) -> dict:
    """Random weights in the model's dtype."""
    params = nn.meta.unbox(jax.jit(lambda key: init_params(config, key))(jax.random.key(0)))
    return jax.tree.map(lambda x: x.astype(config.dtype), params)


def describe() -> dict[str, Any]:
    """Device and versions, for the last line of a benchmark."""
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }

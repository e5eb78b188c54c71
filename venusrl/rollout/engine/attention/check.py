"""Whether an attention computes what the reference does, on the device at hand."""

import jax
import jax.numpy as jnp
import numpy as np

from venusrl.models.config import ModelConfig
from venusrl.rollout.engine.attention.base import RowAttention
from venusrl.rollout.engine.attention.reference import Reference
from venusrl.rollout.engine.cache import LayerCache

ROWS, LENGTH, STEPS = 4, 64, 3
STARTS = np.array([0, 1, 17, 40], np.int32)
NEW = 8  # tokens of prefill
READ = 56  # positions that the second decode looks at


def disagreement(attention: RowAttention, config: ModelConfig) -> str:
    """Why `attention` cannot be used with the model's heads; empty where it can.

    Prefill of four rows that hold 0 to 40 tokens and decode of three steps are held against the reference's; so are the
    rows after that.
    """
    try:
        ours, reference = (_outputs(kind, config) for kind in (attention, Reference()))
    except Exception as error:  # noqa: BLE001 - a kernel fails in its compiler's own ways
        return f"it failed with {type(error).__name__}: {str(error)[:200]}"
    tolerance = 1e-4 if jnp.dtype(config.dtype).itemsize > 2 else 3e-2
    worst = np.max([(np.abs(a - b) / (1 + np.abs(b))).max() for a, b in zip(ours, reference, strict=True)])  # or NaN
    return "" if worst <= tolerance else f"its numbers differ from the reference's by {worst:.1e}"


def _outputs(attention: RowAttention, config: ModelConfig) -> list[np.ndarray]:
    """Outputs of prefill and of each step, and the rows at the end."""
    rng = np.random.default_rng(0)

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), config.dtype)

    def queries(tokens: int):
        heads = (config.heads, config.kv_heads, config.kv_heads)
        return [random(ROWS, tokens, n, config.head_dim) for n in heads]

    cache = LayerCache(
        random(ROWS, config.kv_heads, config.head_dim, LENGTH), random(ROWS, config.kv_heads, LENGTH, config.head_dim)
    )
    prompt, steps = queries(NEW), [queries(1) for _ in range(STEPS)]
    count = jnp.array([NEW, 3, NEW, 5])
    stop = jnp.array([STEPS, 1, 2, STEPS])

    @jax.jit
    def run(cache, prompt, steps):
        rows, offset = jnp.arange(ROWS), jnp.arange(NEW)
        valid = offset < count[:, None]
        attend = attention.prefill(rows, STARTS[:, None] + offset, valid, LENGTH)
        out, cache = attend(*prompt, cache)
        outputs, start = [jnp.where(valid[:, :, None, None], out, 0)], STARTS + count
        for rows_R, read in ((None, LENGTH), (rows[::-1], READ)):  # all rows as they are, and some of them
            still, moving = attention.begin(cache, rows_R, read, STEPS)
            for step, new in enumerate(steps):
                out, moving = attention.decode(start, jnp.int32(step))(*new, (still, moving))
                outputs.append(out)
            cache = attention.end(cache, rows_R, start, stop, moving, STEPS)
        return outputs, cache

    outputs, cache = run(cache, prompt, steps)
    return [np.asarray(x, np.float32) for x in (*outputs, *cache)]

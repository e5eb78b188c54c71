"""Decode by JAX's ragged paged attention, a Pallas kernel for TPUs; prefill is the reference's.

The kernel reads pages in which keys and values of a head lie side by side, [pages, page, 2K, H]; a chunk begins with
rows copied so, one after the other, and ends by writing its steps back.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from venusrl.models.decoder import Attend
from venusrl.rollout.engine.attention.fused import by_token, put_steps, steps_of
from venusrl.rollout.engine.attention.reference import Reference
from venusrl.rollout.engine.cache import LayerCache, take

PAGE = 16


def _kernel(*args, **options) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return ragged_paged_attention(*args, **options)


@dataclasses.dataclass(frozen=True)
class Ragged(Reference):
    """See RowAttention. `kernel`: of the signature of `ragged_paged_attention`."""

    kernel: Callable[..., jax.Array] = _kernel
    name = "tpu"

    def begin(self, cache: LayerCache, rows_R, read: int, steps: int) -> tuple[None, jax.Array]:
        keys, values = by_token(take(cache, rows_R, read))
        both = jnp.stack([keys, values], axis=3).reshape(*keys.shape[:2], -1, keys.shape[-1])
        room = -(-(read + steps) // PAGE) * PAGE - read
        return None, jnp.pad(both, ((0, 0), (0, room), (0, 0), (0, 0)))

    def decode(self, start_R, step) -> Attend:
        def attend(q_R1NH, k_R1KH, v_R1KH, cache):
            _, both = cache
            rows, length, heads, width = both.shape
            at = start_R + step
            new = jnp.stack([k_R1KH[:, 0], v_R1KH[:, 0]], axis=2).reshape(rows, heads, width)
            both = both.at[jnp.arange(rows), at].set(new, mode="drop")
            pages = both.reshape(rows * length // PAGE, PAGE, heads, width)
            out = self.kernel(
                q_R1NH[:, 0],
                pages,
                at + 1,
                jnp.arange(len(pages), dtype=jnp.int32).reshape(rows, -1),
                jnp.arange(rows + 1, dtype=jnp.int32),
                jnp.array([rows], jnp.int32),
                sm_scale=width**-0.5,
            )
            return out[:, None], both

        return attend

    def end(self, cache: LayerCache, rows_R, start_R, count_R, written, steps: int) -> LayerCache:
        chunk = steps_of(written, start_R, steps)
        return put_steps(cache, rows_R, start_R, count_R, chunk[:, :, 0::2], chunk[:, :, 1::2])

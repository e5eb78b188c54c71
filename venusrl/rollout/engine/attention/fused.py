"""Attention by `jax.nn.dot_product_attention`: cuDNN's fused kernel on NVIDIA, in XLA for tests.

Its keys and values are [R, S, K, H], so a chunk begins with a copy of the rows and ends by writing its steps back.
"""

import dataclasses

import jax
import jax.numpy as jnp

from venusrl.models.decoder import Attend
from venusrl.rollout.engine.cache import LayerCache, put, take


@dataclasses.dataclass(frozen=True)
class Fused:
    """See RowAttention. `implementation`: "cudnn" or "xla"."""

    implementation: str
    name = "cudnn"

    def prefill(self, rows_R, positions_RT, valid_RT, read: int) -> Attend:
        def attend(q_RTNH, k_RTKH, v_RTKH, cache: LayerCache):
            cache = put(cache, rows_R, positions_RT, valid_RT, k_RTKH, v_RTKH)
            keys, values = by_token(take(cache, rows_R, read))
            mask_R1TS = (jnp.arange(read) <= positions_RT[:, :, None])[:, None]
            out = jax.nn.dot_product_attention(q_RTNH, keys, values, mask=mask_R1TS, implementation=self.implementation)
            return out, cache

        return attend

    def begin(self, cache: LayerCache, rows_R, read: int, steps: int) -> tuple[None, tuple[jax.Array, jax.Array]]:
        room = ((0, 0), (0, steps), (0, 0), (0, 0))
        keys, values = (jnp.pad(x, room) for x in by_token(take(cache, rows_R, read)))
        return None, (keys, values)

    def decode(self, start_R, step) -> Attend:
        def attend(q_R1NH, k_R1KH, v_R1KH, cache):
            _, (keys, values) = cache
            rows, at = jnp.arange(start_R.shape[0]), start_R + step
            keys = keys.at[rows, at].set(k_R1KH[:, 0], mode="drop")
            values = values.at[rows, at].set(v_R1KH[:, 0], mode="drop")
            out = jax.nn.dot_product_attention(
                q_R1NH, keys, values, key_value_seq_lengths=at + 1, implementation=self.implementation
            )
            return out, (keys, values)

        return attend

    def end(self, cache: LayerCache, rows_R, start_R, count_R, written, steps: int) -> LayerCache:
        return put_steps(cache, rows_R, start_R, count_R, *(steps_of(x, start_R, steps) for x in written))


def by_token(rows: LayerCache) -> tuple[jax.Array, jax.Array]:
    """Keys and values of rows as [R, S, K, H]."""
    return rows.keys.transpose(0, 3, 1, 2), rows.values.transpose(0, 2, 1, 3)


def steps_of(written_RSKH: jax.Array, start_R: jax.Array, steps: int) -> jax.Array:
    """The positions of a chunk, [R, steps, K, H]."""
    return written_RSKH.at[jnp.arange(len(start_R))[:, None], start_R[:, None] + jnp.arange(steps)].get(mode="clip")


def put_steps(cache: LayerCache, rows_R, start_R, count_R, k_RCKH, v_RCKH) -> LayerCache:
    """The rows with the first `count_R` steps of a chunk written from position `start_R` on."""
    offset_C = jnp.arange(k_RCKH.shape[1])
    return put(cache, rows_R, start_R[:, None] + offset_C, offset_C < count_R[:, None], k_RCKH, v_RCKH)

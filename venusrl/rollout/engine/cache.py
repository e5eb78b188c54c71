"""The KV cache of every row, and attention over it.

One [rows, K, S, H] array for keys and one for values a layer: kv-head-major and unrolled over layers, donated from
call to call. (As scan inputs the cache would be copied every step: twice the cost, measured.)
Shapes: R rows of a call, T new tokens, S cached positions, N query heads, K key/value heads, H head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from venusrl.models.attention import NEGATIVE
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import Attend


class LayerCache(NamedTuple):
    keys: jax.Array
    values: jax.Array


def new_caches(config: ModelConfig, rows: int, length: int) -> list[LayerCache]:
    """Empty caches of every layer for `rows` sequences of up to `length` tokens."""
    shape = (rows, config.kv_heads, length, config.head_dim)
    return [LayerCache(jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in range(config.layers)]


def cached_attention(rows_R: jax.Array | None, positions_RT: jax.Array, valid_RT: jax.Array, read: int) -> Attend:
    """Writes new keys and values into the cache, then attends over each row up to each query's own position.

    Args:
      rows_R: rows of the cache that the batch speaks of; None where it is all of them in order.
      positions_RT: where each new token stands in its sequence.
      valid_RT: False for padding: nothing of it is written, and its output means nothing.
      read: positions of the cache that are looked at; every valid position is below it.
    """

    def attend(q_RTNH, k_RTKH, v_RTKH, cache: LayerCache):
        total_rows, kv_heads, length, width = cache.keys.shape
        batch, time, heads, _ = q_RTNH.shape
        group = heads // kv_heads
        rows = jnp.arange(total_rows) if rows_R is None else rows_R
        # Out-of-range positions are dropped by the scatter; a clamped one would overwrite another token.
        where = jnp.where(valid_RT, positions_RT, length)
        keys = cache.keys.at[rows[:, None], :, where].set(k_RTKH, mode="drop")
        values = cache.values.at[rows[:, None], :, where].set(v_RTKH, mode="drop")
        k_RKSH = keys[:, :, :read] if rows_R is None else keys[rows, :, :read]
        v_RKSH = values[:, :, :read] if rows_R is None else values[rows, :, :read]
        q = (q_RTNH * width**-0.5).reshape(batch, time, kv_heads, group, width).transpose(0, 2, 3, 1, 4)
        q = q.reshape(batch, kv_heads, group * time, width)
        scores = jnp.einsum("bkqh,bksh->bkqs", q, k_RKSH, preferred_element_type=jnp.float32)
        seen = jnp.arange(read) <= positions_RT[:, :, None]
        bias = jnp.where(seen, 0.0, NEGATIVE)[:, None, None]
        weights = jax.nn.softmax(scores.reshape(batch, kv_heads, group, time, read) + bias, axis=-1)
        weights = weights.astype(v_RKSH.dtype).reshape(batch, kv_heads, group * time, read)
        out = jnp.einsum("bkqs,bksh->bkqh", weights, v_RKSH).reshape(batch, kv_heads, group, time, width)
        return out.transpose(0, 3, 1, 2, 4).reshape(q_RTNH.shape), LayerCache(keys, values)

    return attend

"""The KV of running rows, the two attentions over it (of prefill, and of decode), and its copies in pages.

A running sequence has a row, in which prefill and decode find its KV side by side; pages hold the KV of everything that
is shared or waits. A row is filled from pages when a sequence begins and written to pages when it ends: one copy of a
page a turn (about 20 us for 16 tokens of seven layers), where attention over pages would gather them at every step.

Keys are [rows, K, H, S] and values [rows, K, S, H], unrolled over layers and donated from call to call. (On a CPU the
attention of a decode step took 0.43 ms a layer, against 0.90 ms with keys as [rows, K, S, H].) Decode leaves the cache
alone for a chunk of steps: new keys and values go to a small cache of the chunk, and into the large one at its end.
Together that is 6.9 ms of CPU a step of 32 rows, against 14.6 ms with a write and a cut of the cache every step.
Shapes: R rows of a call, M pages of a call, T new tokens, S cached positions, C steps of a chunk, N query heads, K
key/value heads, G = N / K, H head width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from venusrl.models.attention import NEGATIVE
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import Attend


class LayerCache(NamedTuple):
    """keys [R, K, H, S], values [R, K, S, H]."""

    keys: jax.Array
    values: jax.Array


def new_caches(config: ModelConfig, rows: int, length: int) -> list[LayerCache]:
    """Empty caches of every layer for `rows` sequences of up to `length` tokens."""
    keys = (rows, config.kv_heads, config.head_dim, length)
    values = (rows, config.kv_heads, length, config.head_dim)
    return [LayerCache(jnp.zeros(keys, config.dtype), jnp.zeros(values, config.dtype)) for _ in range(config.layers)]


def new_pool(config: ModelConfig, pages: int, page: int) -> list[LayerCache]:
    """Empty pages of every layer: keys [pages, K, H, page], values [pages, K, page, H]."""
    return new_caches(config, pages, page)


def store(pool: list[LayerCache], caches: list[LayerCache], rows_M, index_M, pages_M) -> list[LayerCache]:
    """The pool with page `index` of a row copied to page `page`, M times; nothing where the page is outside."""

    def copy(pool: LayerCache, cache: LayerCache) -> LayerCache:
        keys, values = _in_pages(cache, pool.keys.shape[-1])
        keys = keys.at[rows_M, :, :, index_M].get(mode="clip")
        values = values.at[rows_M, :, index_M].get(mode="clip")
        return LayerCache(
            pool.keys.at[pages_M].set(keys, mode="drop"), pool.values.at[pages_M].set(values, mode="drop")
        )

    return [copy(*layer) for layer in zip(pool, caches, strict=True)]


def load(caches: list[LayerCache], pool: list[LayerCache], rows_M, index_M, pages_M) -> list[LayerCache]:
    """The rows with page `page` of the pool copied to page `index` of a row; nothing where the row is outside."""

    def copy(cache: LayerCache, pool: LayerCache) -> LayerCache:
        keys, values = _in_pages(cache, pool.keys.shape[-1])
        keys = keys.at[rows_M, :, :, index_M].set(pool.keys.at[pages_M].get(mode="clip"), mode="drop")
        values = values.at[rows_M, :, index_M].set(pool.values.at[pages_M].get(mode="clip"), mode="drop")
        return LayerCache(keys.reshape(cache.keys.shape), values.reshape(cache.values.shape))

    return [copy(*layer) for layer in zip(caches, pool, strict=True)]


def pick(pool: list[LayerCache], pages_M) -> list[LayerCache]:
    """Some pages, to be moved elsewhere."""
    return [LayerCache(p.keys.at[pages_M].get(mode="clip"), p.values.at[pages_M].get(mode="clip")) for p in pool]


def place(pool: list[LayerCache], pages_M, blocks: list[LayerCache]) -> list[LayerCache]:
    """The pool with pages from elsewhere; those outside are dropped."""
    return [
        LayerCache(p.keys.at[pages_M].set(b.keys, mode="drop"), p.values.at[pages_M].set(b.values, mode="drop"))
        for p, b in zip(pool, blocks, strict=True)
    ]


def _in_pages(cache: LayerCache, page: int) -> tuple[jax.Array, jax.Array]:
    """Keys [R, K, H, S / page, page] and values [R, K, S / page, page, H]."""
    rows, kv_heads, width, length = cache.keys.shape
    keys = cache.keys.reshape(rows, kv_heads, width, length // page, page)
    return keys, cache.values.reshape(rows, kv_heads, length // page, page, width)


def take(cache: LayerCache, rows_R: jax.Array | None, read: int) -> LayerCache:
    """The first `read` positions of some rows (None: of all); a row outside the cache gives any."""
    if rows_R is None:
        return LayerCache(cache.keys[..., :read], cache.values[:, :, :read])
    keys = cache.keys.at[rows_R, :, :, :read].get(mode="clip")
    return LayerCache(keys, cache.values.at[rows_R, :, :read].get(mode="clip"))


def put(cache: LayerCache, rows_R: jax.Array | None, positions_RT, valid_RT, k_RTKH, v_RTKH) -> LayerCache:
    """Writes keys and values of new tokens at their positions; nothing where not valid, or the row is outside."""
    rows = jnp.arange(cache.keys.shape[0]) if rows_R is None else rows_R
    # Out-of-range positions are dropped by the scatter; a clamped one would overwrite another token.
    where = jnp.where(valid_RT, positions_RT, cache.keys.shape[-1])
    return LayerCache(
        cache.keys.at[rows[:, None], :, :, where].set(k_RTKH, mode="drop"),
        cache.values.at[rows[:, None], :, where].set(v_RTKH, mode="drop"),
    )


def _by_kv_head(q_RTNH: jax.Array, kv_heads: int) -> jax.Array:
    """Scaled queries as [R, K, G*T, H]: the queries of one key head side by side, so one product serves them all."""
    batch, time, heads, width = q_RTNH.shape
    q = (q_RTNH * width**-0.5).reshape(batch, time, kv_heads, heads // kv_heads, width)
    return q.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, width)


def _scores(q_RKQH: jax.Array, keys_RKHS: jax.Array) -> jax.Array:
    return jnp.einsum("rkqh,rkhs->rkqs", q_RKQH, keys_RKHS, preferred_element_type=jnp.float32)


def prefill_attention(rows_R: jax.Array, positions_RT: jax.Array, valid_RT: jax.Array, read: int) -> Attend:
    """Writes new keys and values into the cache, then attends over each row up to each query's own position.

    Args:
      rows_R: rows of the cache that the batch speaks of.
      positions_RT: where each new token stands in its sequence.
      valid_RT: False for padding: nothing of it is written, and its output means nothing.
      read: positions of the cache that are looked at; every valid position is below it.
    """

    def attend(q_RTNH, k_RTKH, v_RTKH, cache: LayerCache):
        batch, time, _, width = q_RTNH.shape
        kv_heads = k_RTKH.shape[2]
        cache = put(cache, rows_R, positions_RT, valid_RT, k_RTKH, v_RTKH)
        seen = take(cache, rows_R, read)
        scores = _scores(_by_kv_head(q_RTNH, kv_heads), seen.keys).reshape(batch, kv_heads, -1, time, read)
        bias = jnp.where(jnp.arange(read) <= positions_RT[:, :, None], 0.0, NEGATIVE)[:, None, None]
        weights = jax.nn.softmax(scores + bias, axis=-1).astype(seen.values.dtype)
        out = jnp.einsum("rkqs,rksh->rkqh", weights.reshape(batch, kv_heads, -1, read), seen.values)
        out = out.reshape(batch, kv_heads, -1, time, width).transpose(0, 3, 1, 2, 4)
        return out.reshape(q_RTNH.shape), cache

    return attend


def new_chunk(cache: LayerCache, steps: int) -> LayerCache:
    """An empty cache of `steps` positions for rows taken by `take`."""
    rows, kv_heads, width, _ = cache.keys.shape
    dtype = cache.keys.dtype
    return LayerCache(
        jnp.zeros((rows, kv_heads, width, steps), dtype), jnp.zeros((rows, kv_heads, steps, width), dtype)
    )


def decode_attention(cached_R: jax.Array, step: jax.Array) -> Attend:
    """Attends over the first `cached_R` positions of each row and the steps of the chunk up to `step`.

    The cache of a layer is (what stays as it is, the chunk that is written); the new chunk comes back. Every row writes
    its chunk at every step; what a row writes after its end is never read.
    """

    def attend(q_R1NH, k_R1KH, v_R1KH, cache: tuple[LayerCache, LayerCache]):
        old, chunk = cache
        read, steps = old.keys.shape[-1], chunk.keys.shape[-1]
        keys = jax.lax.dynamic_update_index_in_dim(chunk.keys, k_R1KH[:, 0], step, axis=3)
        values = jax.lax.dynamic_update_index_in_dim(chunk.values, v_R1KH[:, 0], step, axis=2)
        q = _by_kv_head(q_R1NH, k_R1KH.shape[2])
        before = jnp.where(jnp.arange(read) < cached_R[:, None], 0.0, NEGATIVE)[:, None, None]
        within = jnp.where(jnp.arange(steps) <= step, 0.0, NEGATIVE)
        # Few queries share a key, so a product and a sum, fused into one loop, read it faster than a matrix product
        # does (a step of the 6M model on a CPU: 17.8 against 20.6 ms), and the chunk is too short for one.
        far = (q[..., None] * old.keys[:, :, None]).sum(3, dtype=jnp.float32) + before
        near = (q[..., None] * keys[:, :, None]).sum(3, dtype=jnp.float32) + within
        # One softmax over both parts, divided by its sum at the end: few passes over the long one.
        largest = jnp.maximum(far.max(-1, keepdims=True), near.max(-1, keepdims=True))
        far, near = jnp.exp(far - largest), jnp.exp(near - largest)
        total = far.sum(-1, keepdims=True) + near.sum(-1, keepdims=True)
        out = jnp.einsum("rkgs,rksh->rkgh", far.astype(values.dtype), old.values)
        out += (near[..., None] * values[:, :, None]).sum(3)
        return (out / total).astype(values.dtype).reshape(q_R1NH.shape), LayerCache(keys, values)

    return attend


def put_chunk(cache: LayerCache, rows_R: jax.Array | None, start_R, count_R, chunk: LayerCache) -> LayerCache:
    """The cache with the first `count_R` steps of each row's chunk written from position `start_R` on."""
    offset_C = jnp.arange(chunk.keys.shape[-1])
    keys, values = chunk.keys.transpose(0, 3, 1, 2), chunk.values.transpose(0, 2, 1, 3)
    return put(cache, rows_R, start_R[:, None] + offset_C, offset_C < count_R[:, None], keys, values)

"""The decoder: Qwen3 dense; Llama as the same modules without qk-norm; Qwen2.5 as those with biases.

Shapes: B batch, T time, D embed, N query heads, K key/value heads, H head width, F mlp width, V vocabulary.
Every parameter names its logical axes once; learner/sharding maps those to a mesh. Attention is passed in: training
masks by segment, an engine reads and writes its cache, and neither is known here.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from venusrl.models.config import ModelConfig
from venusrl.models.rope import rope_frequencies

Cache = Any  # what an attention function keeps for one layer
# (q_BTNH, k_BTKH, v_BTKH, cache of this layer) -> (out_BTNH, new cache of this layer)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]


def _weight(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...], fan_in: int) -> jax.Array:
    init = nn.initializers.truncated_normal(stddev=fan_in**-0.5)
    value = module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)
    return value.astype(module.config.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = self.param("scale", init, (x.shape[-1],), jnp.float32)
        x32 = x.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (y * scale).astype(x.dtype)


def _bias(module: nn.Module, name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> jax.Array:
    value = module.param(name, nn.with_logical_partitioning(nn.initializers.zeros, axes), shape, jnp.float32)
    return value.astype(module.config.dtype)


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, frequencies: np.ndarray, scale: float = 1.0) -> jax.Array:
    """Rotary embedding in the half-split layout; angles and products in float32 (bfloat16 rounds 257 to 256).

    Args:
      frequencies: radians a position, [H / 2]; see models.rope.
      scale: multiplies the result; YaRN's attention factor.
    """
    angle = positions_BT[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle) * scale, jnp.sin(angle) * scale
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, positions_BT, attend: Attend, cache: Cache):
        c = self.config
        q = _weight(self, "q", (c.embed, c.heads, c.head_dim), ("embed", "heads", "head_dim"), c.embed)
        k = _weight(self, "k", (c.embed, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), c.embed)
        v = _weight(self, "v", (c.embed, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), c.embed)
        o = _weight(self, "o", (c.heads, c.head_dim, c.embed), ("heads", "head_dim", "embed"), c.heads * c.head_dim)
        q_BTNH = jnp.einsum("btd,dnh->btnh", x_BTD, q)
        k_BTKH = jnp.einsum("btd,dkh->btkh", x_BTD, k)
        v_BTKH = jnp.einsum("btd,dkh->btkh", x_BTD, v)
        if c.attention_bias:
            q_BTNH += _bias(self, "q_bias", (c.heads, c.head_dim), ("heads", "head_dim"))
            k_BTKH += _bias(self, "k_bias", (c.kv_heads, c.head_dim), ("kv_heads", "head_dim"))
            v_BTKH += _bias(self, "v_bias", (c.kv_heads, c.head_dim), ("kv_heads", "head_dim"))
        if c.qk_norm:
            q_BTNH = RMSNorm(c.norm_eps, name="q_norm")(q_BTNH)
            k_BTKH = RMSNorm(c.norm_eps, name="k_norm")(k_BTKH)
        frequencies = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        scale = c.rope_scaling.attention_factor if c.rope_scaling else 1.0
        q_BTNH = rope(q_BTNH, positions_BT, frequencies, scale)
        k_BTKH = rope(k_BTKH, positions_BT, frequencies, scale)
        out_BTNH, cache = attend(q_BTNH, k_BTKH, v_BTKH, cache)
        y_BTD = jnp.einsum("btnh,nhd->btd", out_BTNH, o)
        if c.attention_bias == "qkvo":
            y_BTD += _bias(self, "o_bias", (c.embed,), ("embed",))
        return y_BTD, cache


class Mlp(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config
        gate = _weight(self, "gate", (c.embed, c.mlp), ("embed", "mlp"), c.embed)
        up = _weight(self, "up", (c.embed, c.mlp), ("embed", "mlp"), c.embed)
        down = _weight(self, "down", (c.mlp, c.embed), ("mlp", "embed"), c.mlp)
        return (jax.nn.silu(x_BTD @ gate) * (x_BTD @ up)) @ down


class Block(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, positions_BT, attend: Attend, cache: Cache):
        eps = self.config.norm_eps
        y_BTD = RMSNorm(eps, name="attn_norm")(x_BTD)
        y_BTD, cache = Attention(self.config, name="attn")(y_BTD, positions_BT, attend, cache)
        x_BTD = x_BTD + y_BTD
        return x_BTD + Mlp(self.config, name="mlp")(RMSNorm(eps, name="mlp_norm")(x_BTD)), cache


class Decoder(nn.Module):
    """Tokens to final hidden states; `head_matrix` turns those into logits."""

    config: ModelConfig

    @nn.compact
    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array, attend: Attend, caches: list | None = None):
        """Runs the decoder.

        Args:
          tokens_BT: token ids, int32.
          positions_BT: position of each token in its sequence, from 0.
          attend: see Attend; called once a layer.
          caches: one entry a layer, or None where `attend` keeps nothing.

        Returns:
          (hidden_BTD after the final norm, new caches).
        """
        c = self.config
        embedding = self.param(
            "embedding",
            nn.with_logical_partitioning(nn.initializers.normal(stddev=0.02), ("vocab", "embed")),
            (c.vocab_size, c.embed),
            jnp.float32,
        )
        if not c.tied:
            _weight(self, "head", (c.embed, c.vocab_size), ("embed", "vocab"), c.embed)  # read by head_matrix
        block = nn.remat(Block, static_argnums=(3,)) if c.remat and caches is None else Block
        x_BTD = embedding[tokens_BT].astype(c.dtype)
        new_caches = []
        for i in range(c.layers):
            x_BTD, cache = block(c, name=f"layer_{i}")(x_BTD, positions_BT, attend, caches[i] if caches else None)
            new_caches.append(cache)
        return RMSNorm(c.norm_eps, name="final_norm")(x_BTD), new_caches


def head_matrix(params: dict) -> jax.Array:
    """The head [D, V] in float32: its own matrix, or the transposed embedding where tied."""
    return params["head"] if "head" in params else params["embedding"].T


def init_params(config: ModelConfig, key: jax.Array) -> dict:
    """Random parameters with their logical axes (boxed: see flax.linen.meta); `nn.meta.unbox` gives plain arrays."""
    tokens = jnp.zeros((1, 1), jnp.int32)

    def no_attention(q, k, v, cache):
        return q, cache

    return Decoder(config).init(key, tokens, tokens, no_attention)["params"]

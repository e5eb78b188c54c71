"""Shapes of the decoder family: one dataclass, the published sizes and the tiny ones.

Sources: the config.json that Qwen publishes with each Qwen3 size; SmolLM2's GGUF metadata. Any other size is read from
the config.json of its folder (models.hf_config), with an empty model.name.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from venusrl.core.errors import ConfigError
from venusrl.models.rope import RopeScaling


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A dense decoder with grouped-query attention, RoPE and SwiGLU.

    Attributes:
      vocab_size: rows of the embedding.
      embed: width D of the residual stream.
      layers: number of blocks.
      heads, kv_heads: query heads N and key/value heads K; K divides N.
      head_dim: H.
      mlp: hidden width F of the SwiGLU.
      rope_theta: base of the rotary frequencies.
      rope_scaling: how they are stretched for longer contexts (Llama 3.1, YaRN); None where they are not.
      norm_eps: epsilon of RMSNorm.
      qk_norm: RMSNorm on queries and keys (Qwen3 yes, Llama and Qwen2.5 no).
      attention_bias: "" for none, "qkv" on queries, keys and values (Qwen2.5), "qkvo" on the output as well.
      tied: the head is the transposed embedding.
      max_length: longest sequence in tokens, prompt included.
      dtype: activations and matrix products, "float32" or "bfloat16"; parameters are float32.
      remat: recompute blocks in the backward pass.
    """

    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_theta: float = 1e6
    norm_eps: float = 1e-6
    qk_norm: bool = True
    attention_bias: str = ""
    rope_scaling: RopeScaling | None = None
    tied: bool = True
    max_length: int = 40960
    dtype: str = "float32"
    remat: bool = False

    def __post_init__(self):
        for name in ("vocab_size", "embed", "layers", "heads", "kv_heads", "head_dim", "mlp", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)}; it must be at least 1")
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1):
            raise ConfigError(f"model.rope_theta={self.rope_theta}; it must be a finite number above 1")
        if not (math.isfinite(self.norm_eps) and self.norm_eps >= 0):
            raise ConfigError(f"model.norm_eps={self.norm_eps}; it must be a finite number, not negative")
        if self.attention_bias not in ("", "qkv", "qkvo"):
            raise ConfigError(f"model.attention_bias={self.attention_bias!r}; use '', 'qkv' or 'qkvo'")
        if self.qk_norm and self.attention_bias == "qkv":
            raise ConfigError("model.attention_bias='qkv' with model.qk_norm: no family has both; use 'qkvo' or ''")
        if self.heads % self.kv_heads:
            raise ConfigError(f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}")
        if self.head_dim % 2:
            raise ConfigError(f"model.head_dim={self.head_dim} is odd; RoPE needs an even one")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"model.dtype={self.dtype!r}; use 'float32' (CPU) or 'bfloat16' (accelerators)")

    def beside_weights(self, stop_tokens: Sequence[int]) -> dict[str, Any]:
        """What changes the computation and no tensor's name or shape tells, in JSON's types: two models with the same
        weights are the same only where this is equal."""
        scaling = None if self.rope_scaling is None else dataclasses.asdict(self.rope_scaling)
        kind = type(self.rope_scaling).__name__
        return {
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling is None else {"kind": kind, **scaling},
            "norm_eps": self.norm_eps,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "stop_tokens": sorted(stop_tokens),
        }

    @property
    def num_params(self) -> int:
        """Number of parameters, the embedding counted once when tied."""
        attention = self.embed * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.attention_bias:
            attention += self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.attention_bias == "qkvo":
            attention += self.embed
        block = attention + 3 * self.embed * self.mlp + 2 * self.embed + 2 * self.head_dim * self.qk_norm
        return self.vocab_size * self.embed * (1 if self.tied else 2) + self.layers * block + self.embed

    def train_flops_per_token(self, length: int) -> float:
        """Floating-point operations of one forward and backward pass for each token.

        6 for each parameter of a matrix product (the embedding look-up is none, the head is one), and causal
        attention over an average of `length` / 2 keys.
        """
        matmul = self.num_params - (0 if self.tied else self.vocab_size * self.embed)
        return 6.0 * matmul + 6.0 * self.layers * self.heads * self.head_dim * length


def _qwen3(embed, layers, heads, mlp, tied):
    return ModelConfig(151936, embed, layers, heads, 8, 128, mlp, tied=tied, dtype="bfloat16", remat=True)


SIZES: dict[str, ModelConfig] = {
    "tiny": ModelConfig(768, 128, 4, 4, 2, 64, 320, rope_theta=1e4, max_length=1024),
    "6m": ModelConfig(2048, 256, 7, 8, 4, 32, 704, rope_theta=1e4, max_length=2048),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408, False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600, False),
    "smollm2-135m": ModelConfig(
        49152, 576, 30, 9, 3, 64, 1536, rope_theta=1e5, norm_eps=1e-5, qk_norm=False, max_length=8192
    ),
}


def model_config(name: str, **overrides) -> ModelConfig:
    """The published shape called `name`, with fields replaced.

    Raises:
      ConfigError: no such name.
    """
    if name not in SIZES:
        raise ConfigError(f"model.name={name!r} is unknown; one of {', '.join(SIZES)}")
    return dataclasses.replace(SIZES[name], **overrides)

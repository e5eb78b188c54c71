"""Metadata of a GGUF file: read into a ModelConfig; what is not supported is refused by its key.

Every key of the architecture and the tokenizer is used, has to have one value, or is known to change nothing that is
computed here; a key that is none of these is refused.
Sources: the GGUF specification (ggml/docs/gguf.md); llama.cpp src/llama-arch.cpp and src/llama-model.cpp.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from venusrl.core.errors import CheckpointError
from venusrl.models.config import ModelConfig

_BIAS = {"llama": "", "qwen2": "qkv", "qwen3": ""}  # architecture -> ModelConfig.attention_bias
_USED = frozenset(
    """
    context_length embedding_length block_count feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.layer_norm_rms_epsilon
    rope.freq_base rope.dimension_count
    """.split()
)
_IRRELEVANT = frozenset("tensor_data_layout rope.scaling.finetuned".split())
_FIXED: dict[str, tuple] = {  # key of the architecture -> what it has to be
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scale_linear": (1.0,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (1.0,),
    "use_parallel_residual": (False,),
}
_TOKENIZER_USED = frozenset("model pre tokens token_type merges add_bos_token".split())
_TOKENIZER_IRRELEVANT = frozenset("scores token_type_count".split())
_TOKENIZER_OFF = frozenset("add_eos_token add_space_prefix add_sep_token remove_extra_whitespaces".split())


class Metadata:
    """The key-value pairs of one file.

    Args:
      file: its name, for messages.
      fields: key -> what gives its value.
    """

    def __init__(self, file: str, fields: Mapping[str, Callable[[], Any]]):
        self._file, self._fields = file, fields

    def get(self, key: str, *default: Any) -> Any:
        """The value of `key`.

        Raises:
          CheckpointError: there is none, and no default.
        """
        field = self._fields.get(key)
        if field is None:
            if default:
                return default[0]
            raise CheckpointError(f"{self._file} lacks the metadata {key}; it is no model of a known kind")
        return field()

    def config(self, tied: bool, dtype: str, remat: bool) -> ModelConfig:
        """The shape; see GgufFile.config."""
        a = self.get("general.architecture")
        if a not in _BIAS:
            raise CheckpointError(f"{self._file} is of architecture {a!r}; {', '.join(map(repr, _BIAS))} can be read")
        problems = self._unsupported(a)

        def one(key: str, *default: Any) -> Any:
            """A value that all layers share."""
            value = self.get(f"{a}.{key}", *default)
            if isinstance(value, list):
                if len(set(value)) != 1:
                    shown = f"{value[:8]}{'...' if len(value) > 8 else ''}"
                    problems.append(f"{a}.{key}={shown}: layers that differ are not supported")
                return value[0] if value else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problems.append(f"{a}.{key}={str(value)[:60]}: a positive whole number is needed")
                return 1
            return value

        heads, embed = one("attention.head_count"), one("embedding_length")
        kv_heads, mlp = one("attention.head_count_kv", heads), one("feed_forward_length")
        layers, length = one("block_count"), one("context_length")
        width = one("attention.key_length", max(embed // heads, 1))
        theta, eps = (
            self.get(f"{a}.{key}", *default)
            for key, default in (("rope.freq_base", (10000.0,)), ("attention.layer_norm_rms_epsilon", ()))
        )
        if not isinstance(theta, float) or not isinstance(eps, float):
            problems.append(f"{a}.rope.freq_base={theta!r} and the epsilon {eps!r} must be floating-point numbers")
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.get(f"{a}.{key}", width) != width:
                problems.append(
                    f"{a}.{key}={self.get(f'{a}.{key}')}, but heads are {width} wide; only equal ones are read"
                )
        if problems:
            raise CheckpointError(f"{self._file}: {'; '.join(problems)}; use a file of a supported model")
        return ModelConfig(
            vocab_size=len(self.get("tokenizer.ggml.tokens")),
            embed=embed,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width,
            mlp=mlp,
            rope_theta=_float32(theta),
            norm_eps=_float32(eps),
            qk_norm=a == "qwen3",
            attention_bias=_BIAS[a],
            tied=tied,
            max_length=length,
            dtype=dtype,
            remat=remat,
        )

    def _unsupported(self, a: str) -> list[str]:
        """Keys with a value that is not supported."""
        problems = []
        parts = self.get("split.count", 1)
        if parts > 1:
            problems.append(
                f"split.count={parts}: this is one part of several; join them with llama-gguf-split --merge"
            )
        kind = self.get("general.type", "model")
        if kind != "model":
            problems.append(f"general.type={kind!r}: only a model can be read")
        for key in self._fields:
            if not key.startswith(f"{a}."):
                continue
            name = key.removeprefix(f"{a}.")
            if name in _FIXED:
                if self.get(key) not in _FIXED[name]:
                    problems.append(f"{key}={self.get(key)!r}: only {_FIXED[name][0]!r} is supported")
            elif name not in _USED and name not in _IRRELEVANT:
                problems.append(f"{key}={str(self.get(key))[:60]}: unknown, and may change what is computed")
        return problems

    def check_tokenizer(self) -> None:
        """Refuses settings of the tokenizer that are not supported.

        Raises:
          CheckpointError: naming the keys.
        """
        problems = []
        for key in self._fields:
            name = key.removeprefix("tokenizer.ggml.")
            if name == key or name in _TOKENIZER_USED | _TOKENIZER_IRRELEVANT or name.endswith("_token_id"):
                continue
            if name not in _TOKENIZER_OFF or self.get(key):
                problems.append(f"{key}={str(self.get(key))[:60]}")
        if problems:
            raise CheckpointError(f"{self._file}: {', '.join(problems)} would change the tokens, and is not supported")

    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end a reply.

        Raises:
          CheckpointError: one is no token.
        """
        ids = [self.get(f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot")]
        found = tuple(dict.fromkeys(i for i in ids if i is not None))
        count = len(self.get("tokenizer.ggml.tokens"))
        if any(i >= count for i in found):
            raise CheckpointError(
                f"{self._file}: tokenizer.ggml.eos_token_id or eot_token_id {found} is not below {count}"
            )
        return found

    def special_tokens(self) -> dict[str, str]:
        """Spelling of bos, eos, pad and unk; "" where there is none.

        Raises:
          CheckpointError: a sequence is to begin with a bos, and there is none.
        """
        tokens = self.get("tokenizer.ggml.tokens")
        found = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            i = self.get(f"tokenizer.ggml.{key}_token_id", None)
            found[name] = tokens[i] if i is not None and i < len(tokens) else ""
        if self.get("tokenizer.ggml.add_bos_token", False) and not found["bos"]:
            raise CheckpointError(f"{self._file}: tokenizer.ggml.add_bos_token=True, but there is no bos_token_id")
        return found


def _float32(value: float) -> float:
    """The file's numbers are float32: 1e-5 is 9.99999974e-06. Gives the shortest decimal that is the same float32."""
    return float(str(np.float32(value)))

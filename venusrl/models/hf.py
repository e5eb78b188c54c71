"""Weights under Hugging Face names, in and out: as tensors, as the bytes of a file, and as a folder.

Names and layouts are those of transformers' Qwen3, Llama and Qwen2: projections are [out, in], ours [in, heads, width].
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.flax import save as save_bytes

from venusrl.core.errors import CheckpointError
from venusrl.models import hf_config, shards
from venusrl.models.config import ModelConfig
from venusrl.models.findings import Findings
from venusrl.models.rope import rope_frequencies

# Of tensors in `from_bytes`. NumPy knows bfloat16 through ml_dtypes; safetensors.flax reads by NumPy's own types alone.
_MESSAGE_TYPES = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": jnp.dtype("bfloat16")}

_Entry = tuple[tuple[str, ...], tuple[int, ...], Callable, Callable]


def _entries(c: ModelConfig) -> dict[str, _Entry]:
    """Name in the file -> (path in params, shape in the file, to ours, to theirs)."""

    def same(x):
        return x

    def turn(x):
        return x.T

    def projection(heads):
        return (
            (heads * c.head_dim, c.embed),
            lambda w: w.T.reshape(c.embed, heads, c.head_dim),
            lambda p: p.reshape(c.embed, heads * c.head_dim).T,
        )

    def bias(heads):
        width = heads * c.head_dim
        return (width,), lambda b: b.reshape(heads, c.head_dim), lambda p: p.reshape(width)

    entries: dict[str, _Entry] = {
        "model.embed_tokens.weight": (("embedding",), (c.vocab_size, c.embed), same, same),
        "model.norm.weight": (("final_norm", "scale"), (c.embed,), same, same),
    }
    if not c.tied:
        entries["lm_head.weight"] = (("head",), (c.vocab_size, c.embed), turn, turn)
    for i in range(c.layers):
        ours, theirs = f"layer_{i}", f"model.layers.{i}"
        norms = [("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")]
        for name, hf_name in norms:
            entries[f"{theirs}.{hf_name}.weight"] = ((ours, name, "scale"), (c.embed,), same, same)
        for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            entries[f"{theirs}.self_attn.{name}_proj.weight"] = ((ours, "attn", name), *projection(heads))
            if c.attention_bias:
                entries[f"{theirs}.self_attn.{name}_proj.bias"] = ((ours, "attn", f"{name}_bias"), *bias(heads))
        if c.attention_bias == "qkvo":
            entries[f"{theirs}.self_attn.o_proj.bias"] = ((ours, "attn", "o_bias"), (c.embed,), same, same)
        entries[f"{theirs}.self_attn.o_proj.weight"] = (
            (ours, "attn", "o"),
            (c.embed, c.heads * c.head_dim),
            lambda w: w.T.reshape(c.heads, c.head_dim, c.embed),
            lambda p: p.reshape(c.heads * c.head_dim, c.embed).T,
        )
        if c.qk_norm:
            for name in ("q_norm", "k_norm"):
                path = (ours, "attn", name, "scale")
                entries[f"{theirs}.self_attn.{name}.weight"] = (path, (c.head_dim,), same, same)
        for name, shape in (
            ("gate", (c.mlp, c.embed)),
            ("up", (c.mlp, c.embed)),
            ("down", (c.embed, c.mlp)),
        ):
            entries[f"{theirs}.mlp.{name}_proj.weight"] = ((ours, "mlp", name), shape, turn, turn)
    return entries


def _insert(tree: dict, path: tuple[str, ...], value) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


HEAD = "lm_head.weight"
_BUFFER = "rotary_emb.inv_freq"  # older files of Llama hold what follows from rope_theta


def names(config: ModelConfig) -> list[str]:
    """Names of a model's tensors, in the order of its layers."""
    return list(_entries(config))


def check_tensors(tensors: Iterable[tuple[str, Sequence[int]]], config: ModelConfig) -> None:
    """Refuses tensors that are not those of the model, by name and shape alone.

    Raises:
      CheckpointError: all that is missing, too much, given twice or of another shape, and the likely cause.
    """
    entries = _entries(config)
    found = Findings(config)
    for name, shape in tensors:
        _admit(name, tuple(shape), entries, found)
    found.check(entries)


def _admit(name: str, shape: tuple[int, ...], entries: dict[str, _Entry], found: Findings) -> bool:
    """Whether a tensor is a parameter. What is wrong with it is noted."""
    if name.endswith(_BUFFER) or (name == HEAD and name not in entries):
        found.extra.add(name)  # looked at when it is read
        return False
    if name not in entries:
        found.unexpected.append(name)
        return False
    if name in found.seen:
        found.twice.append(name)
        return False
    found.seen.add(name)
    if shape != entries[name][1]:
        found.misshapen.append((name, shape, entries[name][1]))
        return False
    return True


def from_hf(tensors: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]], config: ModelConfig) -> dict:
    """Parameters from tensors under Hugging Face names.

    An lm_head of a tied model, and rotary_emb.inv_freq, are left out after a check that they say the same.

    Args:
      tensors: name -> array; an iterator of pairs is read once, so that one tensor is in memory at a time.
      config: the shape to fill.

    Returns:
      float32 parameters of models.decoder, in host memory.

    Raises:
      CheckpointError: tensors are missing, unknown, given twice, or of another shape (all in one message); one is not
        finite; or a tied model comes with a head that is not its embedding.
    """
    entries = _entries(config)
    params: dict = {}
    found = Findings(config)
    head = None
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not _admit(name, tuple(tensor.shape), entries, found):
            if name == HEAD and HEAD not in entries:
                head = tensor  # published with some tied models; must then equal the embedding
            elif name.endswith(_BUFFER):
                _check_buffer(name, tensor, config)
            continue
        path, _, ours, _ = entries[name]
        value = np.asarray(tensor).astype(np.float32)
        if not np.isfinite(value).all():
            raise CheckpointError(
                f"tensor {name} has {(~np.isfinite(value)).sum()} values that are not finite; copy it again"
            )
        _insert(params, path, ours(value))
    found.check(entries)
    if head is not None:
        _check_head(np.asarray(head, np.float32), np.asarray(params["embedding"]))
    return params


def _check_head(head: np.ndarray, embedding: np.ndarray) -> None:
    if not np.array_equal(head, embedding):
        raise CheckpointError(
            "lm_head.weight differs from the embedding, but the head of this model is tied (tie_word_embeddings of "
            "config.json, or model.name); use an untied shape"
        )


def _check_buffer(name: str, tensor, config: ModelConfig) -> None:
    ours = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    theirs = np.asarray(tensor).astype(np.float32)
    exact = np.asarray(tensor).dtype == np.float32
    if theirs.shape != ours.shape or not np.allclose(theirs, ours, rtol=1e-4 if exact else 1e-2, atol=0.0):
        raise CheckpointError(
            f"tensor {name} holds other frequencies than rope_theta={config.rope_theta} and rope_scaling="
            f"{config.rope_scaling} give for heads of {config.head_dim}; the config.json is of another model"
        )


def to_hf(params: dict, config: ModelConfig) -> dict:
    """Tensors under Hugging Face names, for `from_hf`, transformers, or a worker's weight update."""
    return {name: jnp.asarray(convert()) for name, convert in _converters(params, config)}


def _converters(params: dict, config: ModelConfig) -> list[tuple[str, Callable]]:
    """(name, what makes the tensor when it is needed)."""
    converters = []
    for name, (path, _, _, theirs) in _entries(config).items():
        value = params
        for key in path:
            value = value[key]
        converters.append((name, lambda theirs=theirs, value=value: theirs(value)))
    return converters


def load(folder: str | os.PathLike, config: ModelConfig, ignore: Sequence[str] = ()) -> dict:
    """Parameters from a checkpoint folder, tensor by tensor. Names, shapes and types are checked before any is read.

    Args:
      ignore: keys of config.json that change nothing; see models.hf_config.

    Raises:
      CheckpointError: no such folder, no safetensors in it, a config.json of another model, or a file that is damaged
        or not of this model.
    """
    files = shards.find(folder)
    theirs, _ = hf_config.read_config(Path(folder), ignore=ignore)
    hf_config.check_same(theirs, config, hf_config.FILE)
    check_tensors(((name, shape) for file in files for name, shape in shards.header(file).items()), config)
    return from_hf(shards.tensors(files), config)


def to_bytes(params: dict, config: ModelConfig, dtype: str = "float32") -> bytes:
    """A safetensors file of the weights."""
    return save_bytes({name: jnp.asarray(x, dtype) for name, x in to_hf(params, config).items()})


def from_bytes(data: bytes, config: ModelConfig) -> dict:
    """Parameters from a safetensors file.

    Raises:
      CheckpointError: it is damaged or not of this model.
    """
    try:
        found = deserialize(data)
    except SafetensorError as error:
        raise CheckpointError(f"weights of {len(data)} bytes are damaged ({error}); send them again") from error
    tensors = {}
    for name, tensor in found:
        if tensor["dtype"] not in _MESSAGE_TYPES:
            raise CheckpointError(f"tensor {name} is {tensor['dtype']}; send one of {', '.join(_MESSAGE_TYPES)}")
        tensors[name] = np.frombuffer(tensor["data"], _MESSAGE_TYPES[tensor["dtype"]]).reshape(tensor["shape"])
    return from_hf(tensors, config)


def save(
    folder: str | os.PathLike,
    params: dict,
    config: ModelConfig,
    dtype: str = "float32",
    shard_bytes: int = shards.SHARD_BYTES,
    ids: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint folder (without the tokenizer, which is the caller's); config.json last.

    Args:
      dtype: of the weights: "float32" or "bfloat16".
      shard_bytes: largest file of weights.
      ids: eos_token_id, bos_token_id, pad_token_id for config.json.

    Raises:
      CheckpointError: it cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {name: int(np.prod(shape)) for name, (_, shape, _, _) in _entries(config).items()}
        shards.write(folder, _converters(params, config), sizes, dtype, shard_bytes)
        described = hf_config.describe(config, dtype, ids)
        (folder / hf_config.FILE).write_text(json.dumps(described, indent=2) + "\n")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model cannot be written to {folder} ({error}); make room, or choose another"
        ) from error

"""Hugging Face checkpoints in and out: a folder with model*.safetensors, config.json and tokenizer.json.

Names and layouts are those of transformers' Qwen3 and Llama: projections are [out, in], ours [in, heads, width].
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.flax import save as save_bytes
from safetensors.flax import save_file

from venusrl.core.errors import CheckpointError
from venusrl.models.config import ModelConfig

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


def from_hf(tensors: Mapping[str, np.ndarray] | Iterator[tuple[str, np.ndarray]], config: ModelConfig) -> dict:
    """Parameters from tensors under Hugging Face names.

    Args:
      tensors: name -> array; an iterator of pairs is read once, so that one tensor is in memory at a time.
      config: the shape to fill.

    Returns:
      float32 parameters of models.decoder, in host memory.

    Raises:
      CheckpointError: a tensor is missing, unknown, given twice, or of another shape; or a tied model comes with
        a head that is not its embedding.
    """
    entries = _entries(config)
    params: dict = {}
    seen: set[str] = set()
    head = None
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name == "lm_head.weight" and config.tied:
            head = tensor  # published with some tied models; must then equal the embedding
            continue
        if name not in entries:
            raise CheckpointError(f"tensor {name} has no place in this model; is model.name right?")
        if name in seen:
            raise CheckpointError(f"tensor {name} is there twice; remove one of the files that hold it")
        path, shape, ours, _ = entries[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {tuple(tensor.shape)}, the model needs {shape}")
        seen.add(name)
        _insert(params, path, ours(np.asarray(tensor).astype(np.float32)))
    missing = sorted(set(entries) - seen)
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, the first is {missing[0]}; the file is incomplete")
    if head is not None and not np.array_equal(np.asarray(head, np.float32), np.asarray(params["embedding"])):
        raise CheckpointError(
            "lm_head.weight differs from the embedding, but the head of model.name is tied; use an untied shape"
        )
    return params


def to_hf(params: dict, config: ModelConfig) -> dict[str, jax.Array]:
    """Tensors under Hugging Face names; `from_hf` gives the parameters back."""
    tensors = {}
    for name, (path, _, _, theirs) in _entries(config).items():
        value = params
        for key in path:
            value = value[key]
        tensors[name] = jnp.asarray(theirs(value))
    return tensors


def load(folder: str | os.PathLike, config: ModelConfig) -> dict:
    """Parameters from a checkpoint folder, tensor by tensor.

    Raises:
      CheckpointError: no such folder, no safetensors in it, or a file that is damaged or not of this model.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no *.safetensors in {folder}; fix model.checkpoint, or make it (launchers.warmstart)")

    def tensors():
        for file in files:
            try:
                with safe_open(file, framework="flax") as handle:
                    for name in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                        yield name, handle.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} is damaged ({error}); copy or make it again") from error

    return from_hf(tensors(), config)


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


def save(folder: str | os.PathLike, params: dict, config: ModelConfig, dtype: str = "float32") -> None:
    """Writes a checkpoint folder (without the tokenizer, which is the caller's)."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: jnp.asarray(x, dtype) for name, x in to_hf(params, config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kind = "qwen3" if config.qk_norm else "llama"
    description = {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_length,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n")

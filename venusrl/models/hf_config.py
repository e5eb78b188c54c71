"""config.json of a model's folder: read into a ModelConfig, compared with one, and written.

Every key of the file is used, has to have one value, or is known to change nothing that is computed here. A key that is
none of these is refused by name, so that no part of a model is left out without a word.
Sources: transformers' configuration_{llama,mistral,qwen2,qwen3}.py and modeling_rope_utils.py, versions 4.36 to 5.24.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.models.config import ModelConfig
from venusrl.models.fields import Fields, read_json, short
from venusrl.models.hf_rope import read_rope, rope_entries

FILE = "config.json"
_ARCHITECTURES = {  # model_type -> the class whose numbers ours are
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_USED = frozenset(
    """
    model_type architectures vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    intermediate_size rms_norm_eps tie_word_embeddings max_position_embeddings attention_bias torch_dtype dtype
    sliding_window use_sliding_window max_window_layers layer_types
    rope_theta rope_scaling rope_parameters original_max_position_embeddings
    eos_token_id bos_token_id pad_token_id
    """.split()
)
# Key -> what it has to be. Another value changes the computation in a way that is not implemented.
_FIXED: dict[str, tuple] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "pruned_heads": ({},),
    "quantization_config": (),
    "quantization": (),
    "auto_map": ({},),
}
# Keys that say how a model was trained, saved or is run by other programs. The last rows are of transformers'
# generate(): how tokens are sampled is the run's.
_IRRELEVANT = frozenset(
    """
    _name_or_path name_or_path transformers_version transformers.js_config use_cache initializer_range
    attention_dropout hidden_dropout dropout gradient_checkpointing tf_legacy_loss torchscript use_bfloat16
    _attn_implementation _attn_implementation_autoset attn_implementation use_flash_attention_2
    unsloth_version unsloth_fixed unsloth_processed is_llama_config
    output_attentions output_hidden_states output_router_logits return_dict use_return_dict
    is_decoder tie_encoder_decoder decoder_start_token_id chunk_size_feed_forward
    id2label label2id num_labels finetuning_task problem_type task_specific_params
    tokenizer_class prefix sep_token_id model_max_length
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()
)
_DTYPES = ("float32", "bfloat16", "float16")


def read_config(
    folder: Path, dtype: str = "float32", remat: bool = False, ignore: Sequence[str] = ()
) -> tuple[ModelConfig, dict[str, Any]]:
    """The shape that the config.json in `folder` describes.

    Args:
      dtype, remat: of the ModelConfig; they are the run's, not the file's.
      ignore: keys of the file that its user knows to change nothing.

    Returns:
      (the shape, the file's content).

    Raises:
      CheckpointError: there is no such file; or it describes what is not supported or contradicts itself: everything
        that is wrong, in one message.
    """
    path = Path(folder) / FILE
    raw = read_json(path)
    fields = Fields({key: value for key, value in raw.items() if key not in ignore})
    config = None
    try:
        shape = _shape(fields)
        if not fields.problems:
            config = ModelConfig(**shape, dtype=dtype, remat=remat)
    except ConfigError as error:
        fields.problems.append(str(error))
    if fields.problems or config is None:
        raise CheckpointError(f"{path} describes a model that cannot be read: {'; '.join(fields.problems)}")
    return config, raw


def _shape(f: Fields) -> dict[str, Any]:
    """Fields of a ModelConfig; problems are left in `f`."""
    kind = _kind(f)
    _check_fixed(f)
    layers = f.integer("num_hidden_layers", most=1000)
    _check_windows(f, kind, layers)
    embed, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    # transformers takes 128 for a Qwen3 that does not say; null and the other families take the even share.
    default_width = 128 if kind == "qwen3" and "head_dim" not in f.raw else embed // heads
    if not f.has("head_dim") and default_width * heads != embed and kind != "qwen3":
        f.problem("head_dim", f"hidden_size={embed} is no multiple of num_attention_heads={heads}; give head_dim")
    length = f.integer("max_position_embeddings")
    theta, scaling, length = read_rope(f, length)
    if kind == "qwen2":
        bias = "qkv"
        if "attention_bias" in f.raw and not f.flag("attention_bias", True):
            f.problem("attention_bias", "Qwen2.5 has biases; say model_type 'llama' for a model without")
    else:
        bias = "qkvo" if f.flag("attention_bias") else ""
        if bias and kind == "mistral":
            f.problem("attention_bias", "Mistral has none")
    return dict(
        vocab_size=f.integer("vocab_size"),
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=f.integer("num_key_value_heads", heads),
        head_dim=f.integer("head_dim", max(default_width, 1)),
        mlp=f.integer("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=f.number("rms_norm_eps", 1e-6, most=1.0),
        qk_norm=kind == "qwen3",
        attention_bias=bias,
        tied=f.flag("tie_word_embeddings"),
        max_length=length,
    )


def _kind(f: Fields) -> str:
    """The family, from model_type; where that is missing, from the name of the class."""
    given = f.raw.get("architectures") or []
    classes = given if isinstance(given, list) else [given]
    kind = f.raw.get("model_type")
    if kind is None:
        kind = next((k for k, name in _ARCHITECTURES.items() if name in classes), None)
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        f.problem("model_type", f"of these are models read: {', '.join(_ARCHITECTURES)}")
        return "llama"
    wanted = _ARCHITECTURES[kind]
    if any(str(name).lower() != wanted.lower() for name in classes):
        f.problem("architectures", f"with model_type {kind!r} only {wanted} can be read")
    for key in ("dtype", "torch_dtype"):
        if f.has(key) and str(f.raw[key]).removeprefix("torch.") not in (*_DTYPES, "auto"):
            f.problem(key, f"weights of {', '.join(_DTYPES)} can be read; convert them")
    return kind


def _check_fixed(f: Fields) -> None:
    for key, allowed in _FIXED.items():
        if f.has(key) and not any(_same(f.raw[key], value) for value in allowed):
            wanted = " or ".join(repr(value) for value in allowed) or "null"
            f.problem(key, f"not implemented; only {wanted} is")
    known = _USED | _IRRELEVANT | set(_FIXED)
    unknown = sorted(key for key, value in f.raw.items() if key not in known and value is not None)
    if unknown:
        shown = ", ".join(f"{key}={short(f.raw[key])}" for key in unknown[:10])
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        f.problems.append(
            f"unknown keys, which may change what is computed: {shown}{more} (where one does not: "
            f"--config.model.ignore=\"('{unknown[0]}',)\")"
        )


def _check_windows(f: Fields, kind: str, layers: int) -> None:
    """Attention in a window is not implemented; a file that does not use it may mention it."""
    kinds = f.raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(k != "full_attention" for k in kinds)):
        shown = sorted({str(k) for k in kinds}) if isinstance(kinds, list) else kinds
        f.problems.append(f"layer_types={short(shown)}: only 'full_attention' is implemented")
    elif kinds is not None and len(kinds) != layers:
        f.problems.append(f"layer_types has {len(kinds)} entries, num_hidden_layers is {layers}")
    if kind in ("qwen2", "qwen3"):
        begin = f.raw.get("max_window_layers", 28)
        uses = f.flag("use_sliding_window") and kinds is None
        if uses and f.raw.get("sliding_window", 4096) is not None and not (isinstance(begin, int) and begin >= layers):
            f.problem("use_sliding_window", f"attention in a window (from layer {begin!r} on) is not implemented")
    elif f.flag("use_sliding_window") or f.has("sliding_window"):
        f.problem("sliding_window", "attention in a window is not implemented")
    elif kind == "mistral" and "sliding_window" not in f.raw:
        f.problem("sliding_window", "missing is 4096 in transformers, and not implemented; write null if there is none")


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(value, bool):
        return value is wanted
    return value == wanted


def differences(theirs: ModelConfig, ours: ModelConfig, file: str) -> list[str]:
    """What a file's shape has different from `ours`, one sentence a field; dtype and remat are the run's."""
    found = []
    for field in dataclasses.fields(ModelConfig):
        if field.name in ("dtype", "remat", "max_length"):
            continue
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if a != b and not (isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-5 * abs(b)):
            found.append(f"model.{field.name}={a!r}, but {file} has {b!r}")
    if ours.max_length > theirs.max_length:
        found.append(f"model.max_length={ours.max_length}, but {file} has only {theirs.max_length}")
    return found


def check_same(theirs: ModelConfig, ours: ModelConfig, file: str) -> None:
    """Refuses a file of another model.

    Raises:
      CheckpointError: all differences, with both values.
    """
    found = differences(theirs, ours, file)
    if found:
        raise CheckpointError(
            f"{'; '.join(found)}; fix model.name, or leave it empty (--config.model.name=) to take the file's shape"
        )


def describe(config: ModelConfig, dtype: str, ids: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of a config.json that transformers 4 and 5 load.

    Args:
      dtype: of the weights beside it.
      ids: eos_token_id, bos_token_id, pad_token_id, as far as they are known.
    """
    kind = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias == "qkv" else "llama"
    described = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "max_position_embeddings": config.max_length,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype,  # transformers 5
        "torch_dtype": dtype,  # transformers 4
    }
    described |= rope_entries(config)
    if kind == "llama":
        described["mlp_bias"] = False
    else:
        described |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.layers}
    if kind != "qwen2":
        described["attention_bias"] = bool(config.attention_bias)
    # Without them transformers takes the class's own, 1 and 2 for Llama, whatever the vocabulary.
    return described | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | dict(ids or {})

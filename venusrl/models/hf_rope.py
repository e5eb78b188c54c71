"""The rotary fields of config.json, as transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) write them."""

from typing import Any

from venusrl.core.errors import ConfigError
from venusrl.models.config import ModelConfig
from venusrl.models.fields import Fields, short
from venusrl.models.rope import LinearRope, Llama3Rope, RopeScaling, YarnRope, yarn_attention_factor

_STRETCH = 1e6  # largest factor that is believed
_LONGEST = 2**31 - 1  # tokens
_KEYS = {  # rope_type -> what may stand beside it
    "default": (),
    "linear": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"
    ).split(),
}


def read_rope(f: Fields, length: int) -> tuple[float, RopeScaling | None, int]:
    """The rotary embedding that a config.json describes.

    Args:
      f: the file; what is wrong with it is added to its problems.
      length: its max_position_embeddings.

    Returns:
      (theta, scaling, longest sequence in tokens).
    """
    old, new = (_flat(f, key) for key in ("rope_scaling", "rope_parameters"))
    if old and new and any(old[key] != new[key] for key in set(old) & set(new)):
        f.problems.append(
            f"rope_scaling={short(old)} and rope_parameters={short(new)} contradict each other; remove one"
        )
    given = old | new
    theta = f.number("rope_theta", 10000.0)
    inner = Fields(given, prefix="rope_parameters." if new else "rope_scaling.")
    if given.get("rope_theta") is not None:
        nested = inner.number("rope_theta")
        if f.has("rope_theta") and nested != theta:
            f.problems.append(
                f"rope_theta={theta} and {nested} inside rope_parameters contradict each other; remove one"
            )
        theta = nested
    kind = given.get("rope_type") or "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        inner.problem("rope_type", f"only {', '.join(_KEYS)} are implemented")
    else:
        extra = {"rope_type", "rope_theta", "partial_rotary_factor", *_KEYS[kind]}
        for key in sorted(set(given) - extra):
            if given[key] is not None:
                inner.problem(key, f"has no meaning with rope_type {kind!r}; the file is of another kind, or damaged")
    if given.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        inner.problem("partial_rotary_factor", "only 1.0 is implemented")
    scaling, reach = None, length
    # Fields beside the group come before those in it, and stand for them where they are missing (transformers 5).
    original = f.integer("original_max_position_embeddings", inner.integer("original_max_position_embeddings", length))
    try:
        if kind == "linear":
            scaling = LinearRope(inner.number("factor", most=_STRETCH))
            reach = (
                max(length, int(scaling.factor * original)) if "original_max_position_embeddings" in given else length
            )
        elif kind == "llama3":
            low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
            scaling = Llama3Rope(inner.number("factor", most=_STRETCH), low, high, original)
        elif kind == "yarn":
            scaling = _yarn(inner, length, original)
            reach = max(length, int(scaling.factor * original))
    except ConfigError as error:
        inner.problems.append(str(error))
    if reach > _LONGEST:
        inner.problem("factor", f"sequences of {reach} tokens; at most {_LONGEST} are believed")
    f.problems += inner.problems
    return theta, scaling, reach


def _flat(f: Fields, key: str) -> dict[str, Any]:
    """One group of rotary fields, with rope_type for its older name, type."""
    group = dict(f.group(key))
    if set(group) == {"full_attention"} and isinstance(group["full_attention"], dict):  # one kind of layer
        group = dict(group["full_attention"])
    old = group.pop("type", None)
    if old is not None:
        if group.get("rope_type", old) != old:
            f.problems.append(
                f"{key}: type={short(old)} and rope_type={short(group['rope_type'])} contradict each other; remove one"
            )
        group["rope_type"] = old
    return group


def _yarn(inner: Fields, length: int, original: int) -> YarnRope:
    factor = inner.number("factor", length / original, most=_STRETCH)
    mscale = [inner.number(key) if inner.raw.get(key) else None for key in ("mscale", "mscale_all_dim")]
    attention = inner.number("attention_factor", yarn_attention_factor(factor, *mscale))
    fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    return YarnRope(factor, original, attention, fast, slow, inner.flag("truncate", True))


def rope_entries(config: ModelConfig) -> dict[str, Any]:
    """The fields for config.json, as transformers 4 writes them; version 5 reads them too."""
    s = config.rope_scaling
    scaling: dict[str, Any] | None = None
    if isinstance(s, LinearRope):
        scaling = {"rope_type": "linear", "factor": s.factor}
    elif isinstance(s, Llama3Rope):
        scaling = {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_length,
        }
    elif isinstance(s, YarnRope):
        scaling = {
            "rope_type": "yarn",
            "factor": s.factor,
            "original_max_position_embeddings": s.original_length,
            "attention_factor": s.attention_factor,
            "beta_fast": s.beta_fast,
            "beta_slow": s.beta_slow,
        }
        if not s.truncate:
            scaling["truncate"] = False
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}

"""The attentions of the engine, by name. All of them read and write the same rows (engine/cache.py)."""

import jax
import jax.numpy as jnp

from venusrl.core.errors import ConfigError
from venusrl.core.names import check_name
from venusrl.models.config import ModelConfig
from venusrl.rollout.engine.attention.base import RowAttention
from venusrl.rollout.engine.attention.check import disagreement
from venusrl.rollout.engine.attention.fused import Fused
from venusrl.rollout.engine.attention.ragged import Ragged
from venusrl.rollout.engine.attention.reference import Reference

NAMES = ("auto", "xla", "cudnn", "tpu")


def choose(name: str, config: ModelConfig) -> tuple[RowAttention, str]:
    """The attention that one of NAMES asks for, after it has computed a few steps like the reference on this device.

    "auto" takes what the device has an attention of its own for, and the reference where that cannot be used here.

    Returns:
      (the attention, why it is not the device's own; empty where it is).

    Raises:
      ConfigError: one was asked for by name and cannot be used here.
    """
    check_name("rollout.attention", name, NAMES)
    own = {"gpu": "cudnn", "tpu": "tpu"}.get(jax.default_backend(), "xla")
    wanted = own if name == "auto" else name
    if wanted == "xla":
        return Reference(), ""
    attention = Fused("cudnn") if wanted == "cudnn" else Ragged()
    reason = _unfit(wanted, own, config) or disagreement(attention, config)
    if not reason:
        return attention, ""
    if name == "auto":
        return Reference(), f"{wanted} attention is not used: {reason}"
    raise ConfigError(f"rollout.attention={name!r} cannot be used: {reason}; use 'xla'")


def _unfit(wanted: str, own: str, config: ModelConfig) -> str:
    """Why a kernel cannot run with this model on this device, as far as its documentation tells; empty where it can."""
    if wanted != own:
        return f"it needs another device than {jax.devices()[0].device_kind}"
    if wanted == "cudnn":
        if jnp.dtype(config.dtype).itemsize != 2:
            return f"it computes in bfloat16 or float16, not in {config.dtype}"
        if config.head_dim % 8 or config.head_dim > 128:
            return f"head_dim={config.head_dim} is no multiple of 8 up to 128"
    if wanted == "tpu" and config.head_dim % 128:
        return f"head_dim={config.head_dim} is no multiple of 128"
    return ""

"""What the learner carries from step to step, and where each part of it lives on the mesh."""

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from venusrl.core.errors import ConfigError
from venusrl.learner import sharding
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import init_params


@flax.struct.dataclass
class TrainState:
    """Attributes:
    step: optimizer steps taken, skipped ones included; int32.
    params: float32 parameters, a dict pytree.
    opt_state: of the optax chain.
    skipped: consecutive steps skipped for a non-finite loss or gradient; int32.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState
    skipped: jax.Array


def make_optimizer(
    learning_rate: float,
    *,
    warmup_steps: int = 5,
    total_steps: int = 0,
    final_fraction: float = 0.1,
    b1: float = 0.9,
    b2: float = 0.95,
    weight_decay: float = 0.0,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip.

    Args:
      learning_rate: peak; reached after `warmup_steps`, then falling along a cosine to `final_fraction` of it at
        `total_steps` (constant where that is 0).
      b1, b2, weight_decay: of AdamW.
      clip_norm: bound on the global gradient norm.

    Raises:
      ConfigError: the cosine would end before the warm-up does.
    """
    if total_steps and total_steps <= warmup_steps:
        raise ConfigError(
            f"learner.decay_steps={total_steps} is not above learner.warmup_steps={warmup_steps}; 0 is a constant rate"
        )
    if total_steps > warmup_steps:
        fall = optax.cosine_decay_schedule(learning_rate, total_steps - warmup_steps, alpha=final_fraction)
    else:
        fall = optax.constant_schedule(learning_rate)
    schedule = fall
    if warmup_steps:
        rise = optax.linear_schedule(0.0, learning_rate, warmup_steps)
        schedule = optax.join_schedules([rise, fall], [warmup_steps])
    return optax.chain(
        optax.clip_by_global_norm(clip_norm), optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay)
    )


def new_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(jnp.int32(0), params, optimizer.init(params), jnp.int32(0))


def state_shardings(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Sharding of every leaf of a TrainState: moments like their parameter, scalars replicated.

    Raises:
      ConfigError: the mesh does not divide a parameter.
    """
    boxed = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    params = nn.meta.unbox(boxed)
    shardings = sharding.param_shardings(boxed, mesh)
    sharding.check_divisible(params, shardings)
    by_shape = jax.eval_shape(lambda p: new_state(p, optimizer), params)
    everywhere = sharding.replicated(mesh)
    # optax keeps moments in trees shaped like params; anything else in its state is a scalar.
    opt = optax.tree_map_params(
        optimizer, lambda _, s: s, by_shape.opt_state, shardings, transform_non_params=lambda _: everywhere
    )
    return TrainState(everywhere, shardings, opt, everywhere)

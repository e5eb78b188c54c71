"""Weights from the learner to an engine, as copies.

`jax.device_put` to an equal sharding returns the same buffer, and the next donated train step deletes it under the
engine. A jitted cast without donation always makes new buffers.
"""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames="dtype")
def publish(params: dict, dtype: str) -> dict:
    """A copy of `params` that the learner's donation cannot reach, sharded like them.

    Args:
      params: the learner's parameters.
      dtype: type of the copy; every leaf is rounded to it. Norms and logits are computed in float32 all the same.
    """
    return jax.tree.map(lambda x: jnp.copy(x).astype(dtype), params)

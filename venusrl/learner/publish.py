"""Weights from the learner to an engine, as copies.

`jax.device_put` to an equal sharding returns the same buffer, and the next donated train step deletes it under the
engine. A jitted cast without donation always makes new buffers.
"""

from typing import Any

import jax
import jax.numpy as jnp


def publish(params: dict, dtype: str, sharding: Any | None = None) -> dict:
    """A copy of `params` that the learner's donation cannot reach.

    Args:
      params: the learner's parameters.
      dtype: type of the copy; norms and the head stay float32 inside the model whatever it is.
      sharding: a sharding, or a tree of them, for the copy; the learner's own by default.
    """

    def copy(tree):
        return jax.tree.map(lambda x: jnp.copy(x).astype(dtype), tree)

    return jax.jit(copy, out_shardings=sharding)(params)

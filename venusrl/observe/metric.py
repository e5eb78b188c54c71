"""A number that carries its own reduction, so that accumulation and averaging cannot disagree."""

import math

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Metric:
    """A scalar on its way to a log.

    Attributes:
      value: the sum (mean, sum) or the maximum (max).
      weight: what a mean divides by.
      reduction: "mean", "sum" or "max".
    """

    value: jax.Array
    weight: jax.Array
    reduction: str = flax.struct.field(pytree_node=False)

    @classmethod
    def mean(cls, values: jax.Array, mask: jax.Array) -> "Metric":
        """Mean of `values` where `mask` is not 0."""
        return cls((values * mask).sum(), mask.sum().astype(jnp.float32), "mean")

    @classmethod
    def sum(cls, value: jax.Array) -> "Metric":
        return cls(jnp.asarray(value, jnp.float32), jnp.float32(1), "sum")

    @classmethod
    def max(cls, values: jax.Array, mask: jax.Array) -> "Metric":
        """Maximum of `values` where `mask` is not 0; -inf, for `merge`, where it is 0 everywhere."""
        return cls(jnp.where(mask > 0, values, -jnp.inf).max(), jnp.float32(1), "max")

    def merge(self, other: "Metric") -> "Metric":
        """The metric of both parts together."""
        if self.reduction != other.reduction:
            raise ValueError(f"cannot merge a {self.reduction} with a {other.reduction}")
        if self.reduction == "max":
            return Metric(jnp.maximum(self.value, other.value), self.weight, "max")
        return Metric(self.value + other.value, self.weight + other.weight, self.reduction)

    def result(self) -> float:
        """The number to log; a mean over nothing is 0, and so is a maximum."""
        if self.reduction == "mean":
            return float(self.value) / float(self.weight) if float(self.weight) else 0.0
        return 0.0 if float(self.value) == -math.inf else float(self.value)

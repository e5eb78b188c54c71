"""What an objective is given and what it returns."""

from typing import NamedTuple, Protocol

import jax

from venusrl.observe.metric import Metric


class TokenStats(NamedTuple):
    """Per-token inputs of an objective, all [B, T] float32.

    Attributes:
      current: logprobs of the policy being trained; the only one with a gradient.
      proximal: logprobs of the policy at the start of the update.
      behaviour: logprobs of the policy that generated.
      reference: logprobs of the reference policy (`current`, without its gradient, where no KL is asked for).
      entropy: of the current policy.
      advantages: of the trajectory.
      mask: 1 where the token was generated.
    """

    current: jax.Array
    proximal: jax.Array
    behaviour: jax.Array
    reference: jax.Array
    entropy: jax.Array
    advantages: jax.Array
    mask: jax.Array


class Loss(NamedTuple):
    """A loss before its division.

    Attributes:
      total: sum over tokens.
      denominator: what `total` is divided by, once all parts of the batch are added up.
      metrics: for the log.
    """

    total: jax.Array
    denominator: jax.Array
    metrics: dict[str, Metric]


class Objective(Protocol):
    """A pure function of token statistics.

    Attributes:
      needs_reference: whether `TokenStats.reference` must come from a reference policy.
      needs_advantages: whether a batch whose advantages are all 0 has nothing to learn from.
    """

    needs_reference: bool
    needs_advantages: bool

    def __call__(self, stats: TokenStats) -> Loss: ...

"""GRPO with asymmetric clipping, truncated importance sampling and an optional KL term, mean over tokens.

Sources: GRPO, arXiv 2402.03300; clip-higher and the token mean, DAPO, arXiv 2503.14476; the decoupling of behaviour
and proximal policy, arXiv 2110.00641 and AReaL, arXiv 2505.24298.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from venusrl.core.errors import ConfigError
from venusrl.learner.objectives.base import Loss, TokenStats
from venusrl.observe.metric import Metric

LOG_RATIO_BOUND = 20.0  # exp() of more overflows float32 after a few products


@dataclasses.dataclass(frozen=True)
class Grpo:
    """Per token: w * max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * kl - entropy_coef * entropy.

    r = exp(current - proximal) carries the gradient; w = min(exp(proximal - behaviour), tis_cap) does not, and
    corrects for the policy that generated being older, or computed by another engine.

    Attributes:
      clip_low, clip_high: how far below and above 1 the ratio may move.
      tis_cap: bound of the importance weight; 0 switches the correction off (w = 1).
      kl_coef: weight of the KL estimate k3 (always >= 0) to the reference policy.
      entropy_coef: weight of the entropy bonus.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float = 2.0
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self):
        for name in ("clip_low", "clip_high", "tis_cap", "kl_coef", "entropy_coef"):
            if not 0 <= getattr(self, name) < math.inf:  # false of nan, too
                raise ConfigError(f"learner.{name}={getattr(self, name)} is no number of 0 or more; pass one")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def needs_advantages(self) -> bool:
        return self.kl_coef == 0 and self.entropy_coef == 0

    def __call__(self, stats: TokenStats) -> Loss:
        mask = stats.mask
        ratio = jnp.exp(jnp.clip(stats.current - stats.proximal, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
        clipped = jnp.clip(ratio, 1 - self.clip_low, 1 + self.clip_high)
        surrogate = jnp.maximum(-ratio * stats.advantages, -clipped * stats.advantages)
        drift = jnp.clip(stats.proximal - stats.behaviour, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        importance = jax.lax.stop_gradient(jnp.exp(drift))
        weight = jnp.minimum(importance, self.tis_cap) if self.tis_cap else jnp.ones_like(importance)
        gap = jnp.clip(stats.reference - stats.current, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        kl = jnp.exp(gap) - gap - 1
        per_token = weight * surrogate + self.kl_coef * kl - self.entropy_coef * stats.entropy
        metrics = {
            "entropy": Metric.mean(stats.entropy, mask),
            "ratio_max": Metric.max(ratio, mask),
            "clip_fraction": Metric.mean((ratio != clipped).astype(jnp.float32), mask),
            "tis_weight": Metric.mean(weight, mask),
            "tis_capped_fraction": Metric.mean((importance > weight).astype(jnp.float32), mask),
            # k3 of behaviour against proximal: the engine's and the learner's disagreement plus staleness.
            "mismatch_kl": Metric.mean(importance - drift - 1, mask),
            "kl": Metric.mean(kl, mask),
        }
        return Loss((per_token * mask).sum(), mask.sum(), metrics)

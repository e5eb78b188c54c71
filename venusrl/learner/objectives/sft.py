"""Supervised: the negative logprob of the demonstrated tokens."""

import dataclasses

from venusrl.learner.objectives.base import Loss, TokenStats
from venusrl.observe.metric import Metric


@dataclasses.dataclass(frozen=True)
class Sft:
    """Mean over demonstrated tokens of -log p."""

    needs_reference: bool = dataclasses.field(default=False, init=False)
    needs_advantages: bool = dataclasses.field(default=False, init=False)

    def __call__(self, stats: TokenStats) -> Loss:
        metrics = {"entropy": Metric.mean(stats.entropy, stats.mask)}
        return Loss(-(stats.current * stats.mask).sum(), stats.mask.sum(), metrics)

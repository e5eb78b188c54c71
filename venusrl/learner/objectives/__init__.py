"""Objectives, one small file each, and the table that configuration selects from.

An objective sums over tokens; who calls it divides, once, by the denominator of the whole optimizer batch.
"""

from collections.abc import Mapping
from typing import Any

from venusrl.core.errors import ConfigError
from venusrl.core.names import check_name
from venusrl.learner.objectives import grpo, sft
from venusrl.learner.objectives.base import Loss, Objective, TokenStats

OBJECTIVES: dict[str, type[Objective]] = {"grpo": grpo.Grpo, "sft": sft.Sft}


def make_objective(name: str, options: Mapping[str, Any]) -> Objective:
    """The objective called `name` with its options.

    Raises:
      ConfigError: no such objective or option.
    """
    check_name("learner.objective", name, OBJECTIVES)
    try:
        return OBJECTIVES[name](**options)
    except TypeError as error:
        raise ConfigError(f"learner.objective: {error}; see venusrl/learner/objectives/{name}.py") from error


__all__ = ["OBJECTIVES", "Loss", "Objective", "TokenStats", "make_objective"]

"""Stand-ins for a length predictor, from the truth that only the simulator knows."""

import math
from typing import Protocol

import numpy as np
from scipy.stats import spearmanr

from venusrl.core.errors import ConfigError


class Prediction(Protocol):
    def remaining(self, trajectory: str, true: int) -> float | None:
        """Predicted remaining tokens at a turn boundary; None for no answer."""
        ...


class Oracle:
    """The truth."""

    def remaining(self, trajectory: str, true: int) -> float | None:
        del trajectory
        return float(true)


class Noisy:
    """A prediction whose rank correlation with the truth is about `spearman`; `measured` says what it was.

    Logs of remaining lengths are taken as normal. Half of the noise belongs to the trajectory and stays, half is drawn
    anew at every turn.
    """

    _MEAN, _DEVIATION = 8.6, 1.3  # of the log of remaining tokens at turn boundaries, of the generated workload

    def __init__(self, spearman: float, seed: int):
        if not 0 <= spearman <= 1:
            raise ConfigError(f"rank correlation {spearman} is not between 0 and 1")
        self._correlation = 2 * math.sin(math.pi * spearman / 6)  # of normals with that rank correlation
        self._rng = np.random.default_rng(seed)
        self._bias: dict[str, float] = {}
        self._pairs: list[tuple[float, float]] = []

    def remaining(self, trajectory: str, true: int) -> float | None:
        bias = self._bias.get(trajectory)
        if bias is None:
            bias = self._bias[trajectory] = self._rng.standard_normal()
        noise = math.sqrt(0.5) * (bias + self._rng.standard_normal())
        score = (math.log(max(1, true)) - self._MEAN) / self._DEVIATION
        score = self._correlation * score + math.sqrt(1 - self._correlation**2) * noise
        predicted = math.exp(self._MEAN + self._DEVIATION * score)
        self._pairs.append((predicted, true))
        return predicted

    @property
    def measured(self) -> float:
        """Spearman's rank correlation of what was predicted so far."""
        return float(spearmanr(*zip(*self._pairs, strict=True)).statistic)


def make_prediction(name: str, seed: int) -> Prediction | None:
    """ "" (the policy's own estimate), "oracle", or "noisy:R" with R the rank correlation.

    Raises:
      ConfigError: none of these.
    """
    if name == "":
        return None
    if name == "oracle":
        return Oracle()
    kind, _, value = name.partition(":")
    try:
        if kind == "noisy":
            return Noisy(float(value), seed)
    except ValueError:
        pass
    raise ConfigError(f"prediction={name!r} is unknown; use '', 'oracle' or 'noisy:R' with R between 0 and 1")

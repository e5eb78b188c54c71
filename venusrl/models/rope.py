"""Rotary frequencies, plain or stretched for longer contexts.

Sources: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071), sections 3.2 to 3.4; Llama 3.1's published rope scaling.
Which field means what, and each default, is as in transformers' modeling_rope_utils.py.
Shapes: H head width.
"""

import dataclasses
import math

import numpy as np

from venusrl.core.errors import ConfigError

_MOST = 1e9  # of any number that describes a scaling


def _check(scaling, at_least: dict[str, float]) -> None:
    for name, least in at_least.items():
        value = getattr(scaling, name)
        if not least <= value <= _MOST:
            raise ConfigError(f"rope scaling: {name}={value}; it must be a number from {least} to {_MOST:g}")


@dataclasses.dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float

    def __post_init__(self):
        _check(self, {"factor": 1.0})

    @property
    def attention_factor(self) -> float:
        return 1.0

    def stretch(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Long wavelengths divided by `factor`, short ones kept, those between in proportion (Llama 3.1 to 3.3).

    Attributes:
      factor: by which low frequencies are divided.
      low_freq_factor, high_freq_factor: turns within the original length below which a frequency is divided whole,
        and above which it is kept.
      original_length: tokens of the context before it was stretched.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self):
        _check(self, {"factor": 1.0, "low_freq_factor": 0.0, "high_freq_factor": 0.0, "original_length": 1})
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope scaling: high_freq_factor={self.high_freq_factor} is not above "
                f"low_freq_factor={self.low_freq_factor}"
            )

    @property
    def attention_factor(self) -> float:
        return 1.0

    def stretch(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original_length * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnRope:
    """YaRN: as `Llama3Rope` with a ramp over pairs instead of frequencies, and sharper attention.

    Attributes:
      factor: by which low frequencies are divided.
      original_length: tokens of the context before it was stretched.
      attention_factor: queries and keys are multiplied by it after rotation; see `yarn_attention_factor`.
      beta_fast, beta_slow: turns within the original length that bound the ramp.
      truncate: the ends of the ramp are whole pairs.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        _check(self, {"factor": 1.0, "original_length": 1, "attention_factor": 1e-3, "beta_slow": 1e-3})
        _check(self, {"beta_fast": self.beta_slow})

    def stretch(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        half = len(frequencies)

        def pair(turns: float) -> float:
            """The pair, counted in whole numbers, that makes so many turns within the original length."""
            return half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        if low == high:
            high += 0.001
        divided = np.clip((np.arange(half) - low) / (high - low), 0.0, 1.0)
        return frequencies * (1 - divided + divided / self.factor)


RopeScaling = LinearRope | Llama3Rope | YarnRope


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What YaRN multiplies queries and keys by where the file does not say (paper, section 3.4)."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians that each pair of a head turns from one position to the next, float32 [H / 2]."""
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return (plain if scaling is None else scaling.stretch(plain, theta)).astype(np.float32)

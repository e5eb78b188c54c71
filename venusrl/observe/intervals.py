"""Confidence intervals for reported rates."""

import math

Z95 = 1.959964


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """95% Wilson score interval of a rate (E. B. Wilson, JASA 22, 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    centre = rate + Z95**2 / (2 * trials)
    spread = Z95 * math.sqrt(rate * (1 - rate) / trials + Z95**2 / (4 * trials**2))
    scale = 1 + Z95**2 / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)

"""Group-relative advantages."""

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-6


def group_normalised(rewards: Sequence[float]) -> np.ndarray:
    """(r - mean) / (std + eps) over one group, population std (GRPO, arXiv 2402.03300, section 4.1.2).

    A group whose rewards are all equal, and a group of one, gets zeros: it says nothing about which sample was better.
    """
    r = np.asarray(rewards, np.float64)
    spread = r.std()
    if spread < EPSILON:
        return np.zeros(len(r), np.float32)
    return ((r - r.mean()) / (spread + EPSILON)).astype(np.float32)

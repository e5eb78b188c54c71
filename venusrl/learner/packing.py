"""Trajectories to rows of fixed length, several in a row, kept apart by segment ids."""

import dataclasses
from collections.abc import Sequence

import flax.struct
import numpy as np

from venusrl.core.errors import ConfigError, ContractError
from venusrl.core.trajectory import Trajectory


@flax.struct.dataclass
class Rows:
    """Packed rows; R rows of T tokens. Padding has segment 0 and loss mask 0.

    Attributes:
      tokens: int32 ids.
      segments: int32, 1, 2, ... inside a row; 0 is padding.
      positions: int32, from 0 in each segment.
      loss_mask: float32, 1 for generated tokens.
      behaviour: float32 logprobs of the policy that generated.
      proximal: float32 logprobs of the policy at the start of the update; unused where it is the current one.
      advantages: float32, of the trajectory that the token belongs to.
    """

    tokens: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray
    behaviour: np.ndarray
    proximal: np.ndarray
    advantages: np.ndarray

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def take(self, begin: int, end: int) -> "Rows":
        """Rows begin to end; where there are fewer, empty rows fill up."""
        parts = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)[begin:end]
            missing = end - begin - len(value)
            parts[field.name] = np.pad(value, ((0, missing), (0, 0))) if missing else value
        return Rows(**parts)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Where each trajectory went: row and first column, in the order they were given."""

    rows: Rows
    places: tuple[tuple[int, int], ...]


def pack(trajectories: Sequence[Trajectory], advantages: Sequence[float], row_length: int) -> Packing:
    """First-fit-decreasing into as few rows as that gives.

    Args:
      trajectories: each of 1 to `row_length` tokens.
      advantages: one a trajectory.
      row_length: T.

    Raises:
      ConfigError: a trajectory is longer than a row.
      ContractError: one starts with a generated token, which nothing in its segment predicts.
    """
    longest = max((len(t) for t in trajectories), default=0)
    if longest > row_length:
        raise ConfigError(f"learner.row_length={row_length} is shorter than a trajectory of {longest}; raise it")
    for trajectory in trajectories:
        if trajectory.loss_mask[:1] == [1]:
            raise ContractError(f"trajectory {trajectory.id} starts with a generated token; give it a prompt first")
    free: list[int] = []
    places: list[tuple[int, int]] = [(0, 0)] * len(trajectories)
    for i in sorted(range(len(trajectories)), key=lambda i: -len(trajectories[i])):
        size = len(trajectories[i])
        row = next((r for r, space in enumerate(free) if space >= size), len(free))
        if row == len(free):
            free.append(row_length)
        places[i] = (row, row_length - free[row])
        free[row] -= size
    shape = (max(1, len(free)), row_length)
    ints = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
    floats = {name: np.zeros(shape, np.float32) for name in ("loss_mask", "behaviour", "proximal", "advantages")}
    rows = Rows(**ints, **floats)
    counts = [0] * shape[0]
    for (row, begin), trajectory, advantage in zip(places, trajectories, advantages, strict=True):
        span = slice(begin, begin + len(trajectory))
        counts[row] += 1
        rows.tokens[row, span] = trajectory.tokens
        rows.segments[row, span] = counts[row]
        rows.positions[row, span] = np.arange(len(trajectory))
        rows.loss_mask[row, span] = trajectory.loss_mask
        rows.behaviour[row, span] = trajectory.logprobs
        rows.advantages[row, span] = advantage
    return Packing(rows, tuple(places))

"""Which trajectory's KV is in which row. Pure: no arrays, no clock."""

import dataclasses


@dataclasses.dataclass
class Row:
    """Attributes:
    trajectory: whose KV it holds; None where it is free.
    tokens: the sequence; KV of the first `cached` of them is in the cache.
    cached: see above.
    busy: a request is running on it; it must not be taken away.
    """

    trajectory: str | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    busy: bool = False


class RowTable:
    """Rows by trajectory. When none is free an idle one is taken (its trajectory is in a tool): those that are not to
    be kept first, then in order of last use.

    Attributes:
      kept: trajectories whose KV is to be kept before others.
    """

    def __init__(self, rows: int):
        self.rows = [Row() for _ in range(rows)]
        self._by_trajectory: dict[str, int] = {}
        self._idle: dict[int, None] = {}  # in order of last use, oldest first
        self._free = list(range(rows - 1, -1, -1))
        self.kept: set[str] = set()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Rows that a new request could get."""
        return len(self._free) + len(self._idle)

    def acquire(self, trajectory: str, tokens: list[int]) -> int | None:
        """A row for a request; None where all are busy. KV that it has stays where `tokens` goes on from it."""
        index = self._by_trajectory.get(trajectory)
        if index is None:
            if self._free:
                index = self._free.pop()
            elif self._idle:
                index = next((i for i in self._idle if self.rows[i].trajectory not in self.kept), None)
                index = next(iter(self._idle)) if index is None else index
                del self._idle[index]
                del self._by_trajectory[self.rows[index].trajectory]
                self.evictions += 1
            else:
                return None
            self.rows[index] = Row(trajectory)
            self._by_trajectory[trajectory] = index
        row = self.rows[index]
        self._idle.pop(index, None)
        if row.tokens[: row.cached] != tokens[: row.cached]:
            row.cached = 0  # another history than the one generated here
        row.tokens = list(tokens)
        # The last token is fed to decode, which writes its KV; so it never counts as cached.
        row.cached = min(row.cached, len(tokens) - 1)
        row.busy = True
        return index

    def idle(self, index: int) -> None:
        """The request ended; the KV stays for the next turn while the row is not needed."""
        self.rows[index].busy = False
        self._idle[index] = None

    def release(self, trajectory: str) -> None:
        """Frees the row of a trajectory that ended; a busy one is left alone."""
        self.kept.discard(trajectory)
        index = self._by_trajectory.get(trajectory)
        if index is None or self.rows[index].busy:
            return
        del self._by_trajectory[trajectory]
        del self._idle[index]
        self.rows[index] = Row()
        self._free.append(index)

    def invalidate(self) -> None:
        """All KV is of old weights."""
        for row in self.rows:
            row.cached = 0

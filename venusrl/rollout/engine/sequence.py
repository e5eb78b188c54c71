"""A request on its way through the engine, and the queue of those that wait."""

import dataclasses

from venusrl.rollout.engine.radix import Node
from venusrl.rollout.worker import Request


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request and what has become of it.

    Attributes:
      tokens: its context and what it has generated.
      left: tokens that it may still generate.
      order: of arrival; it keeps its place when it has to wait again.
      row: of the working cache; None while it waits.
      cached: leading tokens whose KV is in its row. All but the last one, once it decodes.
      stored: leading tokens whose KV is in its pages, too.
      spoilt: its logits were no numbers once.
      pages: that hold its KV, in order; the first `shared` belong to the tree, which `node` locks.
    """

    request: Request
    tokens: list[int]
    left: int
    order: int
    row: int | None = None
    cached: int = 0
    stored: int = 0
    spoilt: bool = False
    pages: list[int] = dataclasses.field(default_factory=list)
    shared: int = 0
    node: Node | None = None

    @property
    def trajectory(self) -> str:
        return self.request.trajectory

    @property
    def missing(self) -> int:
        """Tokens to prefill before it decodes."""
        return len(self.tokens) - 1 - self.cached


class Queue:
    """Waiting sequences: higher priority first, then in order of arrival."""

    def __init__(self):
        self._waiting: dict[str, Sequence] = {}
        self.priority: dict[str, int] = {}  # by trajectory, waiting or not

    def __len__(self) -> int:
        return len(self._waiting)

    def key(self, sequence: Sequence) -> tuple[int, int]:
        """The least goes first."""
        return (-self.priority.get(sequence.trajectory, 0), sequence.order)

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.trajectory] = sequence

    def remove(self, trajectory: str) -> Sequence | None:
        return self._waiting.pop(trajectory, None)

    def in_order(self) -> list[Sequence]:
        return sorted(self._waiting.values(), key=self.key)

    def by_class(self) -> dict[int, int]:
        """Number of waiting sequences by priority."""
        counts: dict[int, int] = {}
        for trajectory in self._waiting:
            priority = self.priority.get(trajectory, 0)
            counts[priority] = counts.get(priority, 0) + 1
        return counts

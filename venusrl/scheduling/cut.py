"""A cut through items in order of priority: those in front whose weights fit a capacity are inside."""

from collections.abc import Hashable
from typing import Any

from venusrl.scheduling.ordered import Ordered


class PriorityCut:
    """Keeps the cut up to date as items come, change and go; O(log n) a change and a crossing.

    The items inside are the longest front part of the order whose weights add up to at most `capacity`, and at least
    one where there is any. Used for the groups of the next batch (weight 1 each, as many as the batch wants) and for
    the trajectories whose KV stays on a worker (weight in tokens).
    """

    def __init__(self, capacity: float):
        self._capacity = capacity
        self._items: dict[Hashable, tuple[Any, float]] = {}
        self._inside = Ordered()  # of (key, item)
        self._outside = Ordered()
        self._weight = 0.0
        self._crossed: dict[Hashable, bool] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Hashable) -> bool:
        return item in self._items

    def __iter__(self):
        return iter(self._items)

    @property
    def weight(self) -> float:
        """Sum of the weights inside."""
        return self._weight

    def inside(self, item: Hashable) -> bool:
        """Whether `item`, which must be there, is inside."""
        entry = (self._items[item][0], item)
        return bool(self._inside) and entry <= self._inside[-1]

    def put(self, item: Hashable, key: Any, weight: float) -> None:
        """Adds `item`, or changes its key (ascending: the least is in front) and weight (positive)."""
        old = self._items.get(item)
        if old is not None and old[0] == key:
            if old[1] == weight:
                return
            self._items[item] = (key, weight)
            if self._inside and (key, item) <= self._inside[-1]:
                self._weight += weight - old[1]
                self._balance()
            elif self._outside[0][1] == item:
                self._balance()
            return
        before = old is not None and self.inside(item)
        if old is not None:
            self._take_out(item, old, before)
        self._items[item] = (key, weight)
        entry = (key, item)
        after = bool(self._inside) and entry < self._inside[-1]
        if after:
            self._inside.add(entry)
            self._weight += weight
        else:
            self._outside.add(entry)
        if after != before:
            self._crossed[item] = after
        self._balance()

    def remove(self, item: Hashable) -> None:
        """Takes `item` out; one that is not there is ignored."""
        old = self._items.get(item)
        if old is None:
            return
        self._take_out(item, old, self.inside(item))
        del self._items[item]
        self._crossed.pop(item, None)
        self._balance()

    def resize(self, capacity: float) -> None:
        """Changes the capacity."""
        self._capacity = capacity
        self._balance()

    def crossed(self) -> dict[Hashable, bool]:
        """Items that were moved in (True) or out (False) since the last call; some may be back where they were."""
        crossed, self._crossed = self._crossed, {}
        return crossed

    def _take_out(self, item: Hashable, old: tuple[Any, float], inside: bool) -> None:
        if inside:
            self._inside.remove((old[0], item))
            self._weight -= old[1]
        else:
            self._outside.remove((old[0], item))

    def _balance(self) -> None:
        while self._weight > self._capacity and len(self._inside) > 1:
            self._move(self._inside.pop(), self._outside, False)
        while self._outside:
            weight = self._items[self._outside[0][1]][1]
            if self._inside and self._weight + weight > self._capacity:
                return
            self._move(self._outside.pop(0), self._inside, True)

    def _move(self, entry: tuple[Any, Hashable], to: Ordered, inside: bool) -> None:
        to.add(entry)
        weight = self._items[entry[1]][1]
        self._weight += weight if inside else -weight
        self._crossed[entry[1]] = inside

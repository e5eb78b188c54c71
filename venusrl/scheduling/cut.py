"""A cut through items in order of priority: those in front whose weights fit a capacity are inside."""

from collections.abc import Hashable

from venusrl.scheduling.ordered import OrderedKeys


class PriorityCut:
    """Keeps the cut up to date as items come, change and go; O(log n) a change and a crossing.

    The items inside are the longest front part of the order whose weights add up to at most `capacity`, and at least
    one where there is any. Used for the groups of the next batch (weight 1 each, as many as the batch wants) and for
    the trajectories whose KV stays on a worker (weight in tokens).
    """

    def __init__(self, capacity: float):
        self._capacity = capacity
        self._keys: dict[Hashable, int] = {}
        self._items: dict[int, Hashable] = {}  # by key
        self._weights: dict[int, float] = {}  # by key
        self._inside = OrderedKeys()  # of keys
        self._outside = OrderedKeys()
        self._weight = 0.0
        self._crossed: dict[Hashable, bool] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: Hashable) -> bool:
        return item in self._keys

    def __iter__(self):
        return iter(self._keys)

    @property
    def weight(self) -> float:
        """Sum of the weights inside."""
        return self._weight

    def inside(self, item: Hashable) -> bool:
        """Whether `item`, which must be there, is inside."""
        inside = self._inside
        return bool(inside) and self._keys[item] <= inside[-1]

    def put(self, item: Hashable, key: int, weight: float) -> None:
        """Adds `item`, or changes its key (no two alike; the least is in front) and weight (not negative)."""
        old, inside = self._keys.get(item), self._inside
        if old == key:
            was = self._weights[key]
            if was == weight:
                return
            self._weights[key] = weight
            if inside and key <= inside[-1]:
                self._weight += weight - was
                self._balance()
            elif self._outside[0] == key:
                self._balance()
            return
        before = old is not None and bool(inside) and old <= inside[-1]
        if old is not None:
            self._take_out(old, before)
        self._keys[item], self._items[key], self._weights[key] = key, item, weight
        after = bool(inside) and key < inside[-1]
        if after:
            inside.add(key)
            self._weight += weight
        else:
            self._outside.add(key)
        if after != before:
            self._crossed[item] = after
        self._balance()

    def remove(self, item: Hashable) -> None:
        """Takes `item` out; one that is not there is ignored."""
        key = self._keys.pop(item, None)
        if key is None:
            return
        self._take_out(key, bool(self._inside) and key <= self._inside[-1])
        self._crossed.pop(item, None)
        self._balance()

    def resize(self, capacity: float) -> None:
        """Changes the capacity."""
        self._capacity = capacity
        self._balance()

    def crossed(self) -> dict[Hashable, bool]:
        """Items that were moved in (True) or out (False) since the last call; some may be back where they were."""
        crossed = self._crossed
        if crossed:
            self._crossed = {}
        return crossed

    def _take_out(self, key: int, inside: bool) -> None:
        del self._items[key]
        weight = self._weights.pop(key)
        if inside:
            self._inside.remove(key)
            self._weight -= weight
        else:
            self._outside.remove(key)

    def _balance(self) -> None:
        inside, outside, weights = self._inside, self._outside, self._weights
        while self._weight > self._capacity and len(inside) > 1:
            key = inside.pop()
            outside.add(key)
            self._weight -= weights[key]
            self._crossed[self._items[key]] = False
        while outside:
            key = outside[0]
            if inside and self._weight + weights[key] > self._capacity:
                return
            del outside[0]
            inside.append(key)  # it comes after all of them
            self._weight += weights[key]
            self._crossed[self._items[key]] = True

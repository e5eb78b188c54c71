"""The second tier of a simulated worker's KV: host memory, the least recently used out first, its end first."""

from collections import OrderedDict


class HostTier:
    """For each name (of a trajectory's tail, or a group's prompt) one run of tokens, from `low` to `high`.

    Attributes:
      used: tokens of all of them, never above `capacity`.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.used = 0
        self._runs: OrderedDict[str, tuple[int, int]] = OrderedDict()  # the least recently used first

    def keep(self, name: str, low: int, high: int) -> None:
        """The device gave these up. They join the run that is here where they touch it, else they take its place."""
        old_low, old_high = self._runs.pop(name, (low, low))
        self.used -= old_high - old_low
        if old_low <= high and low <= old_high:
            low, high = min(low, old_low), max(high, old_high)
        self._runs[name] = (low, high)
        self.used += high - low
        while self.used > self.capacity:
            name, (low, high) = self._runs.popitem(last=False)
            cut = min(high - low, self.used - self.capacity)
            self.used -= cut
            if low < high - cut:
                self._runs[name] = (low, high - cut)
                self._runs.move_to_end(name, last=False)

    def reach(self, name: str, start: int) -> int:
        """How far tokens that are here go on from `start`; `start` where none do."""
        low, high = self._runs.get(name, (0, 0))
        if not low <= start < high:
            return start
        self._runs.move_to_end(name)
        return high

    def clear(self) -> None:
        self._runs.clear()
        self.used = 0

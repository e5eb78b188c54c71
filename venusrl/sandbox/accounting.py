"""What a sandbox's memory is, and how it grows. Pure: numbers and times are passed in. All in bytes and seconds."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Memory of one sandbox.

    Attributes:
      private: charged to it: its processes' own pages, its files, what the kernel keeps for it.
      kernel: of that, what the kernel keeps for it (page tables, sockets, processes).
      shared: files of its template that are in memory once for all its sandboxes, charged to none of them.
    """

    private: int
    kernel: int
    shared: int

    @property
    def total(self) -> int:
        """What it would take alone."""
        return self.private + self.shared


class History:
    """Samples of one sandbox's private memory, as far back as its longest window.

    Args:
      longest_s: seconds.
    """

    def __init__(self, longest_s: float):
        self.longest_s = longest_s
        self._times: list[float] = []
        self._sizes: list[int] = []

    def add(self, now: float, size: int) -> None:
        """A sample, no earlier than the last. Old ones are forgotten, but for the one that begins the window."""
        self._times.append(now)
        self._sizes.append(size)
        old = bisect_right(self._times, now - self.longest_s) - 1
        if old > 64:
            del self._times[:old], self._sizes[:old]

    def growth(self, window_s: float) -> int:
        """The last sample minus the one of `window_s` seconds before it, or the first; negative where it shrank."""
        if not self._times:
            return 0
        at = bisect_right(self._times, self._times[-1] - window_s) - 1
        return self._sizes[-1] - self._sizes[max(at, 0)]

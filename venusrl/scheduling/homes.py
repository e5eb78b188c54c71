"""What a priority policy knows of the workers: who lives where, who waits and runs there, and how much room is left."""

import math
from collections.abc import Iterator

from sortedcontainers import SortedList

from venusrl.scheduling.cut import PriorityCut

KV_SHARE = 0.95  # of a worker's KV that its resident set may fill; the rest is for turns under way
ROOM_STEPS = 64  # room is compared in this many steps of a worker's KV


class Home:
    """A worker.

    Attributes:
      cut: the trajectories that live here, by key; inside is the resident set. Weights are contexts in tokens.
      waiting: (key, trajectory) of ready actions.
      running: (key, trajectory) of admitted ones, those that are being preempted included.
      preempting: running ones whose slot was asked back.
      high: tokens of context of those of high priority.
      all: tokens of context of everybody.
    """

    def __init__(self, slots: int, kv_tokens: int):
        self.slots = slots
        self.kv_tokens = kv_tokens * KV_SHARE if kv_tokens else math.inf
        self.cut = PriorityCut(self.kv_tokens)
        self.waiting: SortedList = SortedList()
        self.running: SortedList = SortedList()
        self.preempting: set[str] = set()
        self.high = 0
        self.all = 0

    @property
    def free(self) -> int:
        return self.slots - len(self.running)

    def fits(self, context: int, high: bool) -> bool:
        """Whether a trajectory of `context` tokens would be in the resident set beside what counts against it."""
        return (self.high if high else self.all) + context <= self.kv_tokens


class Homes:
    """The workers, and which of them has most room."""

    def __init__(self):
        self._homes: dict[str, Home] = {}
        self._order = {True: SortedList(), False: SortedList()}  # (load, worker), by "counts high priority alone"
        self._load: dict[tuple[str, bool], tuple[float, int]] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def __getitem__(self, worker: str) -> Home:
        return self._homes[worker]

    def __contains__(self, worker: str) -> bool:
        return worker in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    @property
    def slots(self) -> int:
        return sum(home.slots for home in self._homes.values())

    def add(self, worker: str, home: Home) -> None:
        self._homes[worker] = home
        self.loaded(worker)

    def remove(self, worker: str) -> Home:
        home = self._homes.pop(worker)
        for high in (True, False):
            self._order[high].remove((self._load.pop((worker, high)), worker))
        return home

    def loaded(self, worker: str) -> None:
        """To be called when `high`, `all` or the number of trajectories of a worker has changed."""
        home = self._homes[worker]
        for high in (True, False):
            tokens = home.high if high else home.all
            if home.kv_tokens == math.inf:
                load = (0.0, len(home.cut))
            else:
                load = (float(int(tokens / home.kv_tokens * ROOM_STEPS)), len(home.cut) * 8 // max(1, home.slots))
            old = self._load.get((worker, high))
            if old != load:
                if old is not None:
                    self._order[high].remove((old, worker))
                self._order[high].add((load, worker))
                self._load[worker, high] = load

    def least_loaded(self, high: bool) -> str:
        """The worker with most room for a trajectory of high priority, or of any."""
        return self._order[high][0][1]

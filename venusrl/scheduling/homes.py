"""What a priority policy knows of the workers: who lives where, who waits and runs there, and how much room is left."""

import math

from venusrl.scheduling.cut import PriorityCut
from venusrl.scheduling.ordered import Ordered, OrderedKeys

KV_SHARE = 0.95  # of a worker's KV that its resident set may fill; the rest is for turns under way
ROOM_STEPS = 64  # load is compared in so many steps of a worker's KV


class Home:
    """A worker.

    Attributes:
      cut: the trajectories that live here, by key; inside is the resident set. Weights are contexts in tokens.
      waiting: keys of ready actions.
      running: keys of admitted ones, those that are being preempted included.
      preempting: running ones whose slot was asked back.
      high: tokens of context of those of high priority.
      all: tokens of context of everybody.
      high_load, all_load: what `Homes` has it ordered by.
    """

    def __init__(self, slots: int, kv_tokens: int):
        self.slots = slots
        self.kv_tokens = kv_tokens * KV_SHARE if kv_tokens else math.inf
        self.cut = PriorityCut(self.kv_tokens)
        self.waiting = OrderedKeys()
        self.running = OrderedKeys()
        self.preempting: set[str] = set()
        self.high = 0
        self.all = 0
        # Load is told apart in steps; where KV bounds nothing, by the number of trajectories alone.
        self.steps = ROOM_STEPS / self.kv_tokens
        self.coarse = 1 if math.isinf(self.kv_tokens) else max(1, slots // 8)
        self.high_load = self.all_load = (0, 0)

    @property
    def free(self) -> int:
        return self.slots - len(self.running)

    def fits(self, context: int, high: bool) -> bool:
        """Whether a trajectory of `context` tokens would be in the resident set beside what counts against it."""
        return (self.high if high else self.all) + context <= self.kv_tokens


class Homes(dict[str, Home]):
    """The workers by name, and which of them has most room. Changed with `join` and `part`."""

    def __init__(self):
        super().__init__()
        self._by_high = Ordered()  # of (load of high priority, worker)
        self._by_all = Ordered()  # of (load, worker)
        self._loaded: dict[str, None] = {}  # workers whose place in these two may be another

    @property
    def slots(self) -> int:
        return sum(home.slots for home in self.values())

    def join(self, worker: str, home: Home) -> None:
        self[worker] = home
        self._by_high.add((home.high_load, worker))
        self._by_all.add((home.all_load, worker))

    def part(self, worker: str) -> Home:
        home = self.pop(worker)
        self._loaded.pop(worker, None)
        self._by_high.remove((home.high_load, worker))
        self._by_all.remove((home.all_load, worker))
        return home

    def loaded(self, worker: str) -> None:
        """To be called when `high`, `all` or the number of trajectories of a worker has changed."""
        self._loaded[worker] = None

    def least_loaded(self, high: bool) -> str:
        """The worker with most room for a trajectory of high priority, or of any."""
        if self._loaded:
            for worker in self._loaded:
                self._place(worker)
            self._loaded.clear()
        return (self._by_high if high else self._by_all)[0][1]

    def _place(self, worker: str) -> None:
        home = self[worker]
        count = len(home.cut) // home.coarse
        high, everybody = (int(home.high * home.steps), count), (int(home.all * home.steps), count)
        if high != home.high_load:
            self._by_high.remove((home.high_load, worker))
            self._by_high.add((high, worker))
            home.high_load = high
        if everybody != home.all_load:
            self._by_all.remove((home.all_load, worker))
            self._by_all.add((everybody, worker))
            home.all_load = everybody

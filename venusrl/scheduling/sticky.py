"""First come, first served on each worker; a trajectory stays with the worker it was given at first.

The routing of the published systems: by fewest trajectories (ROLL's EnvAffinityRouter, AReaL's sticky request ids), or
by a hash of the trajectory's name (slime's consistent_hashing router). With `hold`, a trajectory also keeps one of the
permits, as many as there are slots, from its first action to its end, tools included (slime's semaphore).
"""

import zlib
from collections import deque

from venusrl.core.names import check_name
from venusrl.scheduling.protocol import (
    ActionDone,
    ActionReady,
    Admit,
    Decision,
    Event,
    TrajectoryDone,
    WorkerDown,
    WorkerUp,
)


class Sticky:
    """See the module and SchedulerPolicy.

    Args:
      route: "fewest" or "hash".
      hold: whether a trajectory holds a permit through its tools.
    """

    def __init__(self, route: str, hold: bool):
        self.length_sources: dict[str, int] = {}
        check_name("route", route, ("fewest", "hash"))
        self._route = route
        self._hold = hold
        self._slots: dict[str, int] = {}
        self._free: dict[str, int] = {}
        self._homes: dict[str, str] = {}
        self._residents: dict[str, int] = {}
        self._waiting: dict[str, dict[str, None]] = {}  # by worker; insertion order is arrival order
        self._running: dict[str, str] = {}
        self._permits: set[str] = set()
        self._queue: deque[str] = deque()  # ready, without a permit or a worker
        self._queued: set[str] = set()
        self._touched: dict[str, None] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, ActionReady):
            self._ready(event.trajectory)
        elif isinstance(event, ActionDone):
            self._done(event.trajectory)
        elif isinstance(event, TrajectoryDone):
            self._done(event.trajectory)
            self._permits.discard(event.trajectory)
            self._leave(event.trajectory)
            self._let_in()
        elif isinstance(event, WorkerUp):
            self._up(event.worker, event.slots)
        elif isinstance(event, WorkerDown) and event.worker in self._slots:
            self._down(event.worker)

    def decide(self, now: float) -> list[Decision]:
        del now
        decisions: list[Decision] = []
        for worker in self._touched:
            waiting = self._waiting[worker]
            while waiting and self._free[worker] > 0:
                trajectory = next(iter(waiting))
                del waiting[trajectory]
                self._free[worker] -= 1
                self._running[trajectory] = worker
                decisions.append(Admit(trajectory, worker))
        self._touched.clear()
        return decisions

    def _ready(self, trajectory: str) -> None:
        if trajectory in self._homes and (not self._hold or trajectory in self._permits):
            worker = self._homes[trajectory]
            self._waiting[worker][trajectory] = None
            self._touched[worker] = None
            return
        self._enqueue(trajectory)
        self._let_in()

    def _enqueue(self, trajectory: str) -> None:
        """Those that hold a permit, and lost their worker, go before those that wait for one."""
        (self._queue.appendleft if trajectory in self._permits else self._queue.append)(trajectory)
        self._queued.add(trajectory)

    def _let_in(self) -> None:
        """Those at the head of the queue, so long as there are permits and a worker."""
        while self._queue and self._slots:
            trajectory = self._queue[0]
            if trajectory not in self._queued:
                self._queue.popleft()
                continue
            if self._hold and trajectory not in self._permits:
                if len(self._permits) >= sum(self._slots.values()):
                    return
                self._permits.add(trajectory)
            self._queue.popleft()
            self._queued.discard(trajectory)
            worker = self._homes.get(trajectory)
            if worker is None:
                worker = self._homes[trajectory] = self._pick(trajectory)
                self._residents[worker] += 1
            self._waiting[worker][trajectory] = None
            self._touched[worker] = None

    def _pick(self, trajectory: str) -> str:
        names = sorted(self._slots)
        if self._route == "hash":
            return names[zlib.crc32(trajectory.encode()) % len(names)]
        return min(names, key=lambda worker: (self._residents[worker], worker))

    def _done(self, trajectory: str) -> None:
        self._queued.discard(trajectory)
        worker = self._running.pop(trajectory, None)
        if worker in self._free:
            self._free[worker] += 1
            self._touched[worker] = None
        home = self._homes.get(trajectory)
        if home is not None:
            self._waiting[home].pop(trajectory, None)

    def _leave(self, trajectory: str) -> None:
        home = self._homes.pop(trajectory, None)
        if home is not None:
            self._residents[home] -= 1

    def _up(self, worker: str, slots: int) -> None:
        if worker in self._slots:
            self._down(worker)
        self._slots[worker] = self._free[worker] = slots
        self._residents[worker] = 0
        self._waiting[worker] = {}
        self._touched[worker] = None
        self._let_in()

    def _down(self, worker: str) -> None:
        del self._slots[worker], self._free[worker], self._residents[worker]
        self._touched.pop(worker, None)
        for trajectory in [t for t, w in self._homes.items() if w == worker]:
            del self._homes[trajectory]
            self._running.pop(trajectory, None)
        for trajectory in self._waiting.pop(worker):
            self._enqueue(trajectory)
        self._let_in()

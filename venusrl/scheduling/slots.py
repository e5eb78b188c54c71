"""Book-keeping that every policy needs: which worker has room, and who runs where."""

from venusrl.scheduling.protocol import ActionDone, Event, TrajectoryDone, WorkerDown, WorkerUp


class Slots:
    """Slots of each worker, running actions, and the worker that last ran each trajectory (it may hold its KV)."""

    def __init__(self):
        self._free: dict[str, int] = {}
        self._running: dict[str, str] = {}
        self._last: dict[str, str] = {}

    @property
    def free(self) -> int:
        """Free slots over all workers."""
        return sum(max(0, n) for n in self._free.values())

    def observe(self, event: Event) -> None:
        if isinstance(event, WorkerUp):
            self._free[event.worker] = event.slots
        elif isinstance(event, WorkerDown):
            del self._free[event.worker]
        elif isinstance(event, ActionDone):
            worker = self._running.pop(event.trajectory, None)
            if worker in self._free:
                self._free[worker] += 1
        elif isinstance(event, TrajectoryDone):
            self._last.pop(event.trajectory, None)

    def best_worker(self, trajectory: str) -> str | None:
        """The worker that last ran it where that has room, else the one with most room; None where none has."""
        last = self._last.get(trajectory)
        if self._free.get(last, 0) > 0:
            return last
        name = max(self._free, key=lambda w: (self._free[w], w), default=None)
        return name if name is not None and self._free[name] > 0 else None

    def take(self, trajectory: str, worker: str) -> None:
        """Gives a slot of `worker` to `trajectory`."""
        self._free[worker] -= 1
        self._running[trajectory] = worker
        self._last[trajectory] = worker

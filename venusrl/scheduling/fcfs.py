"""First come, first served, over actions: a slot is held while a turn is generated, never while a tool runs."""

from venusrl.scheduling.protocol import ActionDone, ActionReady, Admit, Decision, Event
from venusrl.scheduling.slots import Slots


class FcfsAction:
    """Ready actions in order of arrival; a preempted one comes again at the end. See SchedulerPolicy."""

    def __init__(self):
        self.length_sources: dict[str, int] = {}
        self._slots = Slots()
        self._waiting: dict[str, None] = {}  # insertion order is arrival order

    def observe(self, event: Event) -> None:
        self._slots.observe(event)
        if isinstance(event, ActionReady):
            self._waiting[event.trajectory] = None
        elif isinstance(event, ActionDone):
            self._waiting.pop(event.trajectory, None)

    def decide(self, now: float) -> list[Decision]:
        del now
        decisions: list[Decision] = []
        while self._waiting:
            trajectory = next(iter(self._waiting))
            worker = self._slots.best_worker(trajectory)
            if worker is None:
                break
            del self._waiting[trajectory]
            self._slots.take(trajectory, worker)
            decisions.append(Admit(trajectory, worker))
        return decisions

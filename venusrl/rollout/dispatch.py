"""Carries out a scheduling policy live: actions wait here until the policy admits them."""

import asyncio
from collections.abc import Mapping

from venusrl.core.clock import Clock
from venusrl.rollout.worker import Worker
from venusrl.scheduling.protocol import ActionDone, ActionReady, Admit, Event, SchedulerPolicy, WorkerUp


class Dispatcher:
    """Feeds events to the policy and turns its decisions into slots. Single event loop; no locks needed."""

    def __init__(self, policy: SchedulerPolicy, workers: Mapping[str, Worker], clock: Clock):
        self._policy = policy
        self._workers = workers
        self._clock = clock
        self._waiting: dict[str, asyncio.Future] = {}
        self._preempting: set[asyncio.Task] = set()
        for name, worker in workers.items():
            policy.observe(WorkerUp(clock.now(), name, worker.slots))

    @property
    def waiting(self) -> int:
        """Actions that are ready and not admitted."""
        return len(self._waiting)

    def observe(self, event: Event) -> None:
        """Tells the policy, and carries out what it decides."""
        self._policy.observe(event)
        for decision in self._policy.decide(self._clock.now()):
            if isinstance(decision, Admit):
                future = self._waiting.pop(decision.trajectory)
                if not future.done():  # a cancelled waiter hands its slot back itself
                    future.set_result(self._workers[decision.worker])
            else:
                preempt = [worker.preempt(decision.trajectory) for worker in self._workers.values()]
                task = asyncio.ensure_future(asyncio.gather(*preempt))
                self._preempting.add(task)
                task.add_done_callback(self._preempting.discard)

    async def slot(self, ready: ActionReady) -> Worker:
        """Waits for a slot; the caller gives it back with an ActionDone."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[ready.trajectory] = future
        self.observe(ready)
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(ready.trajectory, None)
            self.observe(ActionDone(self._clock.now(), ready.trajectory, tokens=0, preempted=True))
            raise

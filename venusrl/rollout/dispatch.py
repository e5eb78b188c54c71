"""Carries out a scheduling policy live: actions wait here until the policy admits them."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping

from venusrl.core.clock import Clock
from venusrl.core.errors import VenusError, WorkerError
from venusrl.rollout.worker import Worker
from venusrl.scheduling.protocol import (
    ActionDone,
    ActionReady,
    Admit,
    Event,
    Preempt,
    Prioritise,
    SchedulerPolicy,
    TrajectoryDone,
    WorkerDown,
    WorkerUp,
)

CARRY_S = 5.0  # seconds that KV may take from worker to worker


class Dispatcher:
    """Feeds events to the policy and turns its decisions into slots. Single event loop; no locks needed.

    An action that is admitted away from its KV takes it along: it begins when the KV has come, or after `CARRY_S`
    without it.

    Attributes:
      moved: actions that took KV along.
    """

    def __init__(self, policy: SchedulerPolicy, workers: Mapping[str, Worker], clock: Clock):
        self._policy = policy
        self._workers = dict(workers)
        self._clock = clock
        self._waiting: dict[str, asyncio.Future] = {}
        self._running: dict[str, str] = {}  # worker by trajectory
        self._homes: dict[str, str] = {}  # the worker that ran it last
        self._standing: dict[str, tuple[int, bool]] = {}
        self._reported: set[str] = set()  # their end was reported with their worker's
        self._tasks: set[asyncio.Task] = set()
        self._alarms: set[asyncio.TimerHandle] = set()
        self.moved = 0
        for worker in workers.values():
            policy.observe(WorkerUp(clock.now(), worker.name, worker.slots, worker.kv_tokens))

    @property
    def waiting(self) -> int:
        """Actions that are ready and not admitted."""
        return len(self._waiting)

    @property
    def length_sources(self) -> Mapping[str, int]:
        """Of the policy; see SchedulerPolicy."""
        return self._policy.length_sources

    def observe(self, event: Event) -> None:
        """Tells the policy, and carries out what it decides."""
        if isinstance(event, ActionDone):
            self._running.pop(event.trajectory, None)
            if event.trajectory in self._reported:
                self._reported.discard(event.trajectory)
                return
        elif isinstance(event, TrajectoryDone):
            self._homes.pop(event.trajectory, None)
            self._standing.pop(event.trajectory, None)
        self._policy.observe(event)
        self._decide()

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

    def worker_joined(self, worker: Worker) -> None:
        """Another worker takes requests from now on."""
        self._workers[worker.name] = worker
        self.observe(WorkerUp(self._clock.now(), worker.name, worker.slots, worker.kv_tokens))

    def worker_lost(self, name: str) -> bool:
        """A worker has failed; what ran on it is reported as preempted. A second time is no different.

        Returns:
          whether there is another one.
        """
        if self._workers.pop(name, None) is None:
            return bool(self._workers)
        for trajectory in [t for t, worker in self._running.items() if worker == name]:
            del self._running[trajectory]
            self._reported.add(trajectory)
            self._policy.observe(ActionDone(self._clock.now(), trajectory, tokens=0, preempted=True))
        self._homes = {t: worker for t, worker in self._homes.items() if worker != name}
        self.observe(WorkerDown(self._clock.now(), name))
        return bool(self._workers)

    def close(self) -> None:
        """Nothing is decided any more unless there is an event."""
        for alarm in self._alarms:
            alarm.cancel()

    def _decide(self) -> None:
        now = self._clock.now()
        for decision in self._policy.decide(now):
            if isinstance(decision, Admit):
                self._admit(decision)
            elif isinstance(decision, Prioritise):
                self._standing[decision.trajectory] = (decision.priority, decision.resident)
                self._prioritise(decision.trajectory)
            elif isinstance(decision, Preempt):
                worker = self._workers[self._running[decision.trajectory]]
                self._spawn(self._preempt(worker, decision.trajectory))
            else:
                self._set_alarm(decision.time - now)

    async def _preempt(self, worker: Worker, trajectory: str) -> None:
        with contextlib.suppress(WorkerError):  # it is lost, and the action's own stream says so
            await worker.preempt(trajectory)

    def _spawn(self, work: Coroutine) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _set_alarm(self, seconds: float) -> None:
        alarm = asyncio.get_running_loop().call_later(max(0.0, seconds), lambda: self._wake(alarm))
        self._alarms.add(alarm)

    def _wake(self, alarm: asyncio.TimerHandle) -> None:
        self._alarms.discard(alarm)
        self._decide()

    def _admit(self, decision: Admit) -> None:
        future = self._waiting.pop(decision.trajectory)
        self._running[decision.trajectory] = self._homes[decision.trajectory] = decision.worker
        self._prioritise(decision.trajectory)
        worker, source = self._workers[decision.worker], self._workers.get(decision.kv_from)
        if source is not None and source is not worker:
            self._spawn(self._carry(decision.trajectory, source, worker, future))
        elif not future.done():  # a cancelled waiter hands its slot back itself
            future.set_result(worker)

    async def _carry(self, trajectory: str, source: Worker, worker: Worker, future: asyncio.Future) -> None:
        """Moves KV, then lets the action begin; whatever fails on the way costs a prefill and no more."""
        try:
            async with asyncio.timeout(CARRY_S):
                prefix = await source.export_kv(trajectory)
                if prefix is not None and await worker.import_kv(prefix):
                    self.moved += 1
                    await source.release(trajectory)
        except (TimeoutError, VenusError) as error:
            logging.warning("KV of %s did not get from %s to %s: %s", trajectory, source.name, worker.name, error)
        if not future.done():
            future.set_result(worker)

    def _prioritise(self, trajectory: str) -> None:
        worker = self._workers.get(self._homes.get(trajectory))
        if worker is not None and trajectory in self._standing:
            worker.prioritise(trajectory, *self._standing[trajectory])

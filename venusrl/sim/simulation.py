"""The event loop: coordinator, policy and workers on a virtual clock. A seed fixes the order of everything."""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from venusrl.coordinator.coordinator import Coordinator, CoordinatorOptions
from venusrl.coordinator.prompts import PromptStream
from venusrl.coordinator.rules import check_dataset, make_rule
from venusrl.core.errors import ConfigError, VenusError
from venusrl.core.group import Batch, Group
from venusrl.core.trajectory import Trajectory
from venusrl.scheduling import SchedulerOptions, make_policy
from venusrl.scheduling.protocol import (
    ActionDone,
    ActionReady,
    Admit,
    BatchTaken,
    Event,
    GroupClosed,
    GroupOpened,
    LengthPredicted,
    Preempt,
    Prioritise,
    SchedulerPolicy,
    TrajectoryDone,
    VersionPublished,
    Wake,
    WorkerDown,
    WorkerUp,
)
from venusrl.sim.cluster import Cluster
from venusrl.sim.prediction import Prediction
from venusrl.sim.report import Report
from venusrl.sim.systems import Interrupt, System
from venusrl.sim.worker import Request, SimWorker
from venusrl.sim.workload import TrajectorySpec, Workload

MAX_REFILLS = 10**9  # a restart is no failure


class _Live:
    """A trajectory under way.

    Attributes:
      begun: version of its first token.
      made: tokens of its present turn so far.
      known: tokens of its context whose KV some worker has had, under the present weights.
      kept: it has been resident since its last turn, so its KV should still be there.
      worker: where it runs or was last.
      coming: the worker that its KV is on the way to.
    """

    __slots__ = (
        "begun",
        "coming",
        "context",
        "generated",
        "kept",
        "known",
        "made",
        "name",
        "priority",
        "resident",
        "spec",
        "trajectory",
        "turn",
        "worker",
    )

    def __init__(self, trajectory: Trajectory, spec: TrajectorySpec):
        self.trajectory, self.spec = trajectory, spec
        self.name = trajectory.id
        self.context = spec.prompt
        self.known = 0
        self.begun: int | None = None
        self.turn = self.made = self.generated = 0
        self.priority, self.resident, self.kept = 0, False, False
        self.worker: SimWorker | None = None
        self.coming: SimWorker | None = None


class Simulation:
    """One run. `run` returns its report.

    Raises:
      ConfigError: settings that cannot work together.
    """

    def __init__(
        self,
        system: System,
        cluster: Cluster,
        workload: Workload,
        options: CoordinatorOptions,
        prediction: Prediction | None = None,
        policy: SchedulerPolicy | None = None,
    ):
        check_dataset(options.batch_groups, workload.num_tasks)
        if workload.max_tokens + 1024 > cluster.engine.kv_tokens:
            raise ConfigError(
                f"a trajectory may have {workload.max_tokens} tokens, but a worker holds {cluster.engine.kv_tokens} of "
                "KV; take more devices a worker or shorten max_tokens"
            )
        self.coordinator = Coordinator(
            PromptStream(workload.num_tasks, options.seed), options, make_rule(system.rule or system.scheduler)
        )
        switches = SchedulerOptions(options.batch_groups, options.eta, **dict(system.switches))
        self.policy = policy or make_policy(system.scheduler, switches)
        self.report = Report()
        self.now = 0.0
        self.live: dict[str, _Live] = {}
        self.workers: dict[str, SimWorker] = {}
        self._system, self._cluster, self._workload, self._prediction = system, cluster, workload, prediction
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = itertools.count()
        self._timers: dict[str, tuple[float, int]] = {}
        self._unstarted: deque[Trajectory] = deque()
        self._doomed: set[str] = set()  # discarded trajectories that run to their end
        self._trained: Batch | None = None  # waits to be published
        self._max_live = cluster.sandboxes or 10**9
        if system.environments:
            bound = system.environments * options.async_factor * options.batch_groups * options.group_size
            self._max_live = min(self._max_live, int(bound))
        for number in range(cluster.workers):
            self.worker_up(f"w{number:04d}")

    def run(self, max_events: int = 10**9) -> Report:
        """To the last batch.

        Raises:
          VenusError: nothing can happen any more, or more than `max_events` have.
        """
        began = time.perf_counter()
        self._open_groups()
        updates, step, report = self.coordinator.options.updates, self.step, self.report
        while self.coordinator.version < updates:
            if report.events > max_events:
                where = f"{self.now:.1f} s, version {self.coordinator.version}"
                raise VenusError(f"more than {max_events} events by {where}; does a trajectory never end?")
            step()
        self._summarise(time.perf_counter() - began)
        return self.report

    def step(self) -> None:
        """One event."""
        if not self._heap:
            raise VenusError(f"at {self.now:.1f} s nothing is under way; {len(self.live)} trajectories are open")
        self.now, _, call, argument = heapq.heappop(self._heap)
        self.report.events += 1
        call(argument)

    def worker_up(self, name: str) -> None:
        """A worker joins."""
        c = self._cluster
        host_tokens = int(self._system.host * c.engine.kv_tokens)
        self.workers[name] = SimWorker(name, c.slots, c.engine, host_tokens=host_tokens)
        self._tell(WorkerUp(self.now, name, c.slots, c.engine.kv_tokens))

    def worker_down(self, name: str) -> None:
        """A worker is lost, with its KV; its requests go on elsewhere from the tokens they have."""
        worker = self.workers.pop(name)
        self._timers.pop(name, None)
        stopped = {request.name: request.made for request in worker.interrupt(self.now, 0.0)}
        stopped |= {live.name: 0 for live in self.live.values() if live.coming is worker}
        for gone, made in stopped.items():
            self.live[gone].coming = None
            self._keep(self.live[gone], made)
            self.policy.observe(ActionDone(self.now, gone, made, True))
        self.report.count(worker)
        self._tell(WorkerDown(self.now, name))
        for gone in stopped:
            self._ready(self.live[gone])

    # Time

    def _at(self, time: float, call: Callable[[Any], None], argument: Any) -> None:
        heapq.heappush(self._heap, (time, next(self._count), call, argument))

    def _watch(self, worker: SimWorker) -> None:
        """Sets the worker's timer."""
        due, name = worker.next_time(), worker.name
        if due is None:
            self._timers.pop(name, None)
            return
        old = self._timers.get(name)
        if old is None or old[0] != due:
            stamp = next(self._count)
            self._timers[name] = (due, stamp)
            heapq.heappush(self._heap, (due, stamp, self._worker_due, (worker, stamp)))

    def _worker_due(self, argument: tuple[SimWorker, int]) -> None:
        worker, stamp = argument
        timer = self._timers.get(worker.name)
        if timer is None or timer[1] != stamp:
            self.report.events -= 1  # it was set anew meanwhile
            return
        del self._timers[worker.name]
        joined, finished = worker.handle(self.now)
        version = self.coordinator.version
        for request in joined:
            live = self.live[request.name]
            if live.begun is None:
                live.begun = version
                live.trajectory.append_generated([0], [0.0], version)
        for request in finished:
            self._finished(request)
        self._watch(worker)

    def _tell(self, event: Event) -> None:
        self.report.events += 1
        self.policy.observe(event)
        self._decide()

    def _decide(self) -> None:
        for decision in self.policy.decide(self.now):
            kind = type(decision)
            if kind is Admit:
                self._admit(decision)
            elif kind is Prioritise:
                self._prioritise(decision)
            elif kind is Preempt:
                self._at(self.now + self._cluster.admit_s, self._preempt, decision.trajectory)
            elif kind is Wake:
                self._at(decision.time, self._wake, None)

    def _wake(self, _: None) -> None:
        self._decide()

    # Trajectories

    def _open_groups(self) -> None:
        for group in self.coordinator.admit():
            self._tell(GroupOpened(self.now, group.id, len(group.trajectories), group.opened_version))
            self._unstarted.extend(group.trajectories)
        self._start()

    def _start(self) -> None:
        while self._unstarted and len(self.live) < self._max_live:
            trajectory = self._unstarted.popleft()
            group = self.coordinator.group(trajectory.group_id)
            if group is None or group.trajectories[trajectory.index] is not trajectory:
                continue
            refill = group.refills if trajectory.id.partition("r")[2] else 0
            spec = self._workload.trajectory(group.prompt_id, group.epoch, trajectory.index, refill)
            live = self.live[trajectory.id] = _Live(trajectory, spec)
            trajectory.append_observation([0])
            self._ready(live)

    def _ready(self, live: _Live) -> None:
        """Wants a slot for its turn, or for the rest of it."""
        t = live.trajectory
        self.report.events += 1
        self.policy.observe(
            ActionReady(self.now, live.name, t.group_id, live.context, live.generated, live.turn, live.begun)
        )
        if self._prediction is not None:
            remaining = self._prediction.remaining(live.name, live.spec.generated - live.generated)
            if remaining is not None:
                self.policy.observe(LengthPredicted(self.now, live.name, remaining))
        self._decide()

    def _admit(self, decision: Admit) -> None:
        live, worker = self.live[decision.trajectory], self.workers[decision.worker]
        live.worker = worker
        source = self.workers.get(decision.kv_from) if decision.kv_from else None
        delay, held = self._cluster.admit_s, 0
        if source is not None and source is not worker:
            held = source.cache.held(live.name, live.trajectory.group_id, live.spec.prompt, live.context)
            source.cache.release(live.name)
            self.report.migrated += 1
            delay += self._cluster.engine.transfer_s(held)
        if not delay:
            self._submit(live)
            return
        live.coming = worker
        self._at(self.now + delay, self._arrive, (live, worker, held))

    def _arrive(self, argument: tuple[_Live, SimWorker, int]) -> None:
        """The action, and KV that moves with it, has come; it may have been taken back meanwhile."""
        live, worker, held = argument
        if self.live.get(live.name) is not live or live.coming is not worker:
            return
        live.coming = None
        if held and worker.cache.make_room(held):
            worker.cache.insert(live.name, live.trajectory.group_id, live.spec.prompt, held, self.now)
        self._submit(live)

    def _submit(self, live: _Live) -> None:
        worker, spec = live.worker, live.spec
        tokens = spec.outputs[live.turn] - live.made
        request = Request(live.name, live.trajectory.group_id, spec.prompt, live.context, tokens, live.priority)
        if live.resident:
            worker.cache.refer(live.name, live.trajectory.group_id, True)
        worker.submit(self.now, request, live.known, live.kept)
        self._watch(worker)

    def _prioritise(self, decision: Prioritise) -> None:
        live = self.live.get(decision.trajectory)
        if live is None:
            return
        live.priority, live.resident = decision.priority, decision.resident
        live.kept = live.kept and decision.resident
        if live.worker is not None:
            live.worker.cache.refer(live.name, live.trajectory.group_id, decision.resident)
            live.worker.set_priority(live.name, decision.priority)

    def _preempt(self, name: str) -> None:
        live = self.live.get(name)
        if live is None or live.worker is None or name not in live.worker.requests:
            return  # it came to its end at this very moment
        worker = live.worker
        made = worker.preempt(self.now, name)
        self._watch(worker)
        self.report.preempted += 1
        self._keep(live, made)
        self._tell(ActionDone(self.now, name, made, True))
        self._ready(live)

    def _keep(self, live: _Live, made: int) -> None:
        """Some tokens of its turn are made."""
        live.made += made
        live.context += made
        live.generated += made
        live.known, live.kept = live.context, live.resident
        self.report.generated += made

    def _finished(self, request: Request) -> None:
        live = self.live[request.name]
        self._keep(live, request.tokens)
        turn, spec = live.turn, live.spec
        live.turn, live.made = turn + 1, 0
        self._tell(ActionDone(self.now, live.name, request.tokens))
        self._at(self.now + spec.tools[turn], self._tool_done, live)

    def _tool_done(self, live: _Live) -> None:
        if self.live.get(live.name) is not live:
            return  # it was discarded or restarted
        if live.turn == len(live.spec.outputs):
            self._done(live)
        else:
            live.context += live.spec.observations[live.turn - 1]
            self._ready(live)

    def _done(self, live: _Live) -> None:
        trajectory = live.trajectory
        self._leave(live, lost=False)
        if live.name in self._doomed:
            self._doomed.discard(live.name)
            self._throw_away(live.generated, live.generated)
        else:
            trajectory.complete(0.0, tokens=live.generated, length=live.context)
            if self.coordinator.trajectory_done(trajectory) is not None:
                self._tell(GroupClosed(self.now, trajectory.group_id))
                self._train()
                self._publish()
        self._start()

    def _leave(self, live: _Live, lost: bool) -> None:
        del self.live[live.name]
        if live.worker is not None:
            if lost or self._system.releases:
                live.worker.cache.release(live.name)
            else:
                live.worker.cache.refer(live.name, live.trajectory.group_id, False)
        self._tell(TrajectoryDone(self.now, live.name, live.trajectory.group_id, lost))

    # Training

    def _train(self) -> None:
        if self._trained is not None or self.coordinator.version >= self.coordinator.options.updates:
            return
        batch = self.coordinator.take_batch()
        if batch is None:
            return
        self._tell(BatchTaken(self.now, len(batch.groups)))
        self.report.taken_s.append(self.now)
        for staleness in batch.staleness():
            self.report.stale[staleness] = self.report.stale.get(staleness, 0) + 1
        self.report.trained += sum(t.info["tokens"] for t in batch.trajectories)
        self.report.discards.extend((t.info["tokens"], False) for t in batch.trajectories)
        took = self._cluster.train_step_s([t.info["length"] for t in batch.trajectories])
        self._at(self.now + took, self._train_done, batch)
        self._open_groups()

    def _train_done(self, batch: Batch) -> None:
        self._trained = batch
        self._publish()

    def _publish(self) -> None:
        if self._trained is None or not self.coordinator.may_publish:
            return
        version, self._trained = self._trained.version + 1, None
        restarted: list[_Live] = []
        for live in self.live.values():
            live.known = 0
        for worker in self.workers.values():
            for request in worker.interrupt(self.now, self._cluster.publish_s):
                self._interrupted(self.live[request.name], request, restarted)
            self._watch(worker)
        self.report.batches_s.append(self.now + self._cluster.publish_s)
        discarded = self.coordinator.published(version)
        self._tell(VersionPublished(self.now, version))
        for live in restarted:
            if self.live.get(live.name) is live:  # not ended with its group, which failed meanwhile
                self._restart(live)
        for group in discarded:
            self._discard(group)
        self._open_groups()
        self._train()

    def _interrupted(self, live: _Live, request: Request, restarted: list[_Live]) -> None:
        if self._system.interrupt is Interrupt.CONTINUE:
            self._keep(live, request.made)
            self._submit(live)
        elif self._system.interrupt is Interrupt.RETRY_TURN:
            self.report.generated += request.made
            self.report.wasted += request.made
            self._submit(live)
        else:
            self._keep(live, request.made)
            restarted.append(live)

    def _restart(self, live: _Live) -> None:
        self._throw_away(live.generated, live.spec.generated)
        self.policy.observe(ActionDone(self.now, live.name, 0, True))
        self._leave(live, lost=True)
        if live.name in self._doomed:
            self._doomed.discard(live.name)
            return
        self._refill(live.trajectory, "its request was aborted by a weight update")

    def _refill(self, trajectory: Trajectory, reason: str) -> None:
        """Another one in the place of one that was lost; where its group has had all its refills, it fails."""
        group = self.coordinator.group(trajectory.group_id)
        fresh = self.coordinator.trajectory_lost(trajectory, reason)
        if fresh is None:
            self._discard(group)
        else:
            self._unstarted.appendleft(fresh)
        self._start()

    def lose(self, name: str, reason: str = "lost") -> None:
        """A trajectory is lost where it stands: its slot is free, its tokens are wasted, and it is refilled."""
        live = self.live[name]
        self._cancel(live)
        if name in self._doomed:
            self._doomed.discard(name)
            self._start()
            return
        self._refill(live.trajectory, reason)
        self._open_groups()  # a group that failed is made up for, and may have been what others waited for
        self._train()
        self._publish()

    def _discard(self, group: Group) -> None:
        self._tell(GroupClosed(self.now, group.id, ready=False))
        for trajectory in group.trajectories:
            live = self.live.get(trajectory.id)
            if live is None:
                if trajectory.reward is not None:
                    self._throw_away(trajectory.info["tokens"], trajectory.info["tokens"])
            elif self._system.cancels:
                self._cancel(live)
            else:
                self._doomed.add(live.name)

    def _cancel(self, live: _Live) -> None:
        """Ends a trajectory wherever it is; what it generated is wasted."""
        if live.worker is not None and live.name in live.worker.requests:
            self._keep(live, live.worker.preempt(self.now, live.name))
            self._watch(live.worker)
        self._throw_away(live.generated, live.spec.generated)
        self.policy.observe(ActionDone(self.now, live.name, 0, True))
        self._leave(live, lost=True)

    def _throw_away(self, generated: int, length: int) -> None:
        """`generated` tokens of a trajectory that has, or would have had, `length` of them."""
        self.report.wasted += generated
        self.report.discards.append((length, True))

    def _summarise(self, wall_s: float) -> None:
        r = self.report
        asked, kept = (sum(getattr(w, n) for w in self.workers.values()) for n in ("asked", "kept_asked"))
        for worker in self.workers.values():
            self.report.count(worker)
        r.hit = r.hit / asked if asked else 1.0
        r.kept = r.kept / kept if kept else 1.0
        for name in ("active", "decoding", "prefilling"):
            setattr(r, name, getattr(r, name) / (max(self.now, 1e-9) * max(1, len(self.workers))))
        r.wall_s = wall_s

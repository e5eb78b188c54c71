"""Actions by priority: the groups that unblock the next batch get the slots, keep their KV, and move to where room is.

Every trajectory has a home, the worker with its KV, and a key: those of due groups first, then of critical ones, then
the others, evaluations among them; in each class the longest remaining first, for the batch waits for its slowest. On
each worker the trajectories in front whose KV fits are its resident set; with `demotion`, the others wait until there
is room.
"""

import dataclasses
from collections.abc import Mapping

from venusrl.scheduling.groups import CRITICAL, REST, CriticalGroups
from venusrl.scheduling.homes import Home, Homes
from venusrl.scheduling.lengths import Lengths
from venusrl.scheduling.options import SchedulerOptions
from venusrl.scheduling.ordered import OrderedKeys
from venusrl.scheduling.protocol import (
    ActionDone,
    ActionReady,
    Admit,
    BatchTaken,
    Decision,
    Event,
    GroupClosed,
    GroupOpened,
    LengthPredicted,
    Preempt,
    Prioritise,
    TrajectoryDone,
    VersionPublished,
    WorkerDown,
    WorkerUp,
)

GROWTH_SHARE = 0.25  # of a trajectory's expected growth that its place in KV allows for: others end meanwhile
TOOL_SHARE = 0.5  # of its place that a trajectory of low priority claims while it is in a tool
MOVES = 2  # waiting actions that one call of `decide` tries to move

# A key is one number, so that it is quick to compare. From its high end: class (2 bits), whether it has not begun (1),
# how short it was expected to be (6), order of arrival.
SEQ_BITS = 48
SEQ_MASK = (1 << SEQ_BITS) - 1
LONGEST = 63

IN_TOOL, READY, RUNNING = "in tool", "ready", "running"


@dataclasses.dataclass(slots=True)
class _Trajectory:
    """Attributes:
    seq: order of arrival.
    key: its place in every order (`Venus._rekey`).
    klass: its class as in `key`.
    shortness: LONGEST less the binary logarithm of the length it was expected to have, as in `key`.
    remaining: predicted tokens to come.
    home: the worker on which it waits, runs or was last; None without a worker.
    counted: tokens of context that its home counts.
    kv: the worker that has its KV; None before it ran.
    sent: the priority and residency that were last decided.
    """

    group: str
    seq: int
    key: int = 0
    klass: int = REST
    shortness: int = LONGEST
    remaining: float = 1.0
    context: int = 0
    generated: int = 0
    state: str = IN_TOOL
    home: str | None = None
    counted: int = 0
    kv: str | None = None
    sent: tuple[int, bool] = (0, False)


class Venus:
    """See the module and SchedulerPolicy. O(log n) an event, times the size of a group where its class changes."""

    def __init__(self, options: SchedulerOptions):
        self._o = options
        self._predict = options.prediction != "none"
        self._lengths = Lengths(use_predictions=self._predict)
        self._groups = CriticalGroups(options.batch_groups, options.eta, ranked=self._predict)
        self._trajectories: dict[str, _Trajectory] = {}
        self._names: dict[int, str] = {}  # by order of arrival
        self._homes = Homes()
        self._homeless: dict[str, None] = {}  # ready, while there is no worker
        self._stuck = OrderedKeys()  # keys of those that are ready and not admitted at home
        self._arrived: dict[str, None] = {}  # ready since the last decision
        self._touched: dict[str, None] = {}  # workers at which something changed
        self._restate: dict[str, None] = {}  # trajectories whose priority or residency may have changed
        self._seq = 0

    def observe(self, event: Event) -> None:
        kind = type(event)
        if kind is ActionReady:
            self._ready(event)
        elif kind is ActionDone:
            self._done(event)
        elif kind is TrajectoryDone:
            self._ended(event)
        elif kind is LengthPredicted:
            self._predicted(event)
        elif kind is GroupOpened:
            if event.training:
                self._groups.open(event.group, event.size, event.version)
            else:
                self._groups.evaluate(event.group)
        elif kind is GroupClosed:
            self._groups.close(event.group, event.ready)
            self._lengths.close(event.group)
        elif kind is BatchTaken:
            self._groups.taken(event.groups)
        elif kind is VersionPublished:
            self._groups.published(event.version)
        elif kind is WorkerUp:
            self._worker_up(event)
        elif kind is WorkerDown and event.worker in self._homes:
            self._worker_down(event.worker)

    @property
    def length_sources(self) -> Mapping[str, int]:
        """See SchedulerPolicy."""
        return self._lengths.asked

    def decide(self, now: float) -> list[Decision]:
        del now
        for group in self._groups.changed():
            for name in self._groups.trajectories(group):
                self._rekey(name, self._trajectories[name])
        decisions: list[Decision] = []
        touched, self._touched = self._touched, {}
        for worker in touched:
            self._serve(worker, decisions)
        if self._o.migration:
            if self._arrived:
                self._note_stuck()
            if self._stuck:
                self._move(decisions, touched)
        for worker in touched:
            if worker in self._homes and (crossed := self._homes[worker].cut.crossed()):
                self._restate.update(crossed)
        return self._statements() + decisions if self._restate else decisions

    # Events

    def _ready(self, e: ActionReady) -> None:
        t = self._trajectories.get(e.trajectory)
        if t is None:
            t = self._trajectories[e.trajectory] = _Trajectory(e.group, self._seq)
            self._names[t.seq] = e.trajectory
            self._seq += 1
        t.context, t.generated, t.state = e.context, e.generated, READY
        if e.start_version is not None:
            self._groups.started(e.group, e.start_version)
        self._lengths.count(e.trajectory, e.group)
        self._expect(e.trajectory, t)
        self._rekey(e.trajectory, t)
        self._arrived[e.trajectory] = None
        if t.home is None:
            self._settle(e.trajectory, t)
            return
        self._homes[t.home].waiting.add(t.key)
        self._weigh(e.trajectory, t)
        self._touched[t.home] = None

    def _done(self, e: ActionDone) -> None:
        t = self._trajectories.get(e.trajectory)
        if t is None:
            return
        self._leave_queue(e.trajectory, t)
        t.state = IN_TOOL
        t.context += e.tokens
        t.generated += e.tokens
        if t.home is not None:
            self._weigh(e.trajectory, t)

    def _ended(self, e: TrajectoryDone) -> None:
        self._groups.ended(e.group, e.trajectory)
        t = self._trajectories.pop(e.trajectory, None)
        if t is None:
            return
        self._leave_queue(e.trajectory, t)
        self._leave_home(e.trajectory, t)
        del self._names[t.seq]
        self._restate.pop(e.trajectory, None)
        if e.lost or self._groups.evaluates(e.group):  # the lengths of held-out tasks are not those of training's
            self._lengths.forget(e.trajectory)
            return
        self._lengths.finished(e.trajectory, e.group, t.generated, t.context)
        self._groups.typical = self._lengths.typical
        mates = [(mate, self._trajectories[mate]) for mate in self._groups.trajectories(e.group)]
        for mate, t in mates:
            t.remaining = self._lengths.remaining(mate, e.group, t.generated)
        self._groups.expect(e.group, {mate: t.remaining for mate, t in mates})
        for mate, t in mates:
            self._rekey(mate, t)

    def _predicted(self, e: LengthPredicted) -> None:
        t = self._trajectories.get(e.trajectory)
        if t is not None and self._lengths.observe(e, t.generated):
            self._expect(e.trajectory, t)
            self._rekey(e.trajectory, t)

    def _worker_up(self, e: WorkerUp) -> None:
        if e.worker in self._homes:  # it came back before anybody missed it
            self._worker_down(e.worker)
        self._homes.join(e.worker, Home(e.slots, e.kv_tokens))
        self._groups.slots = max(1, self._homes.slots)
        self._touched[e.worker] = None
        homeless, self._homeless = self._homeless, {}
        for name in homeless:
            self._settle(name, self._trajectories[name])

    def _worker_down(self, worker: str) -> None:
        home = self._homes.part(worker)
        self._groups.slots = max(1, self._homes.slots)
        self._touched.pop(worker, None)
        for t in self._trajectories.values():
            if t.kv == worker:
                t.kv = None
        for name in list(home.cut):
            t = self._trajectories[name]
            t.home, t.counted, t.sent = None, 0, (0, False)
            self._unstick(t)
            if t.state == RUNNING:  # its end was not reported; it comes again as ready
                t.state = IN_TOOL
            elif t.state == READY:
                self._arrived[name] = None
                self._settle(name, t)

    # Order

    def _expect(self, name: str, t: _Trajectory) -> None:
        """Asks anew how long a trajectory will be."""
        t.remaining = self._lengths.remaining(name, t.group, t.generated)
        self._groups.expect(t.group, {name: t.remaining})

    def _rekey(self, name: str, t: _Trajectory) -> None:
        """Its key, ascending: class, those that have begun before new ones, the longest first, order of arrival.

        Length enters by powers of two, and stays as it was when the trajectory began or came into its class: to trade
        places with an equal costs the KV of one of them.
        """
        klass = self._groups.klass(t.group)
        if self._predict and (t.kv is None or klass != t.klass):
            t.shortness = LONGEST - min(LONGEST, int(t.remaining).bit_length())
        key = ((klass << 1 | (t.kv is None)) << 6 | t.shortness) << SEQ_BITS | t.seq
        if key != t.key:
            self._change_key(name, t, key, klass)

    def _change_key(self, name: str, t: _Trajectory, key: int, klass: int) -> None:
        old, t.key = t.key, key
        was, t.klass = t.klass, klass
        if t.home is None:
            return
        home = self._homes[t.home]
        queue = home.running if t.state == RUNNING else home.waiting if t.state == READY else None
        if queue is not None and old in queue:
            queue.remove(old)
            queue.add(key)
        if old in self._stuck:
            self._stuck.remove(old)
            self._arrived[name] = None
        home.cut.put(name, key, self._weight(t))
        if was != klass:
            if (was <= CRITICAL) != (klass <= CRITICAL):
                home.high += t.counted if klass <= CRITICAL else -t.counted
                self._homes.loaded(t.home)
            self._restate[name] = None
        self._touched[t.home] = None

    # Homes

    def _settle(self, name: str, t: _Trajectory) -> None:
        """Gives a ready trajectory a home: where most room is."""
        if not self._homes:
            self._homeless[name] = None
            return
        self._move_in(name, t, self._homes.least_loaded(high=False))

    def _move_in(self, name: str, t: _Trajectory, worker: str) -> None:
        home = self._homes[worker]
        t.home = worker
        home.waiting.add(t.key)
        self._weigh(name, t)
        self._restate[name] = None
        self._touched[worker] = None

    def _leave_home(self, name: str, t: _Trajectory) -> None:
        self._homeless.pop(name, None)
        self._arrived.pop(name, None)
        if t.home is None:
            return
        home = self._homes[t.home]
        home.cut.remove(name)
        home.all -= t.counted
        if t.klass <= CRITICAL:
            home.high -= t.counted
        self._homes.loaded(t.home)
        self._touched[t.home] = None
        t.home, t.counted = None, 0

    def _leave_queue(self, name: str, t: _Trajectory) -> None:
        self._unstick(t)
        self._arrived.pop(name, None)
        self._homeless.pop(name, None)
        if t.home is None:
            return
        home = self._homes[t.home]
        if t.state == READY:
            home.waiting.remove(t.key)
        elif t.state == RUNNING:
            home.running.remove(t.key)
            home.preempting.discard(name)
        self._touched[t.home] = None

    def _weigh(self, name: str, t: _Trajectory) -> None:
        """Its home counts its present context."""
        home = self._homes[t.home]
        grown = t.context - t.counted
        t.counted = t.context
        home.all += grown
        if t.klass <= CRITICAL:
            home.high += grown
        home.cut.put(name, t.key, self._weight(t))
        self._homes.loaded(t.home)

    def _weight(self, t: _Trajectory) -> float:
        """Tokens of KV to count on: its context, and a share of what it is expected to grow by; less in a tool, where
        what is not kept for the next batch may be evicted.
        """
        weight = t.context + GROWTH_SHARE * t.remaining * self._lengths.growth
        return TOOL_SHARE * weight if t.state == IN_TOOL and t.klass == REST else weight

    # Decisions

    def _serve(self, worker: str, decisions: list[Decision]) -> None:
        """Slots of a worker to the first of those that wait there."""
        home = self._homes[worker]
        while home.waiting:
            name = self._names[home.waiting[0] & SEQ_MASK]
            if self._o.demotion and not home.cut.inside(name):
                return
            if home.free <= 0:
                if self._o.preemption:
                    self._preempt(home, decisions)
                return
            self._admit(name, worker, decisions)

    def _admit(self, name: str, worker: str, decisions: list[Decision]) -> None:
        t = self._trajectories[name]
        home = self._homes[worker]
        home.waiting.remove(t.key)
        home.running.add(t.key)
        self._unstick(t)
        self._arrived.pop(name, None)
        t.state = RUNNING
        decisions.append(Admit(name, worker, t.kv if t.kv != worker and self._o.migration else None))
        t.kv = worker

    def _preempt(self, home: Home, decisions: list[Decision]) -> None:
        """Asks back one slot for each waiting action that is of a higher class than the last running one."""
        for key in home.waiting[len(home.preempting) : len(home.running)]:
            claimant = self._names[key & SEQ_MASK]
            if self._o.demotion and not home.cut.inside(claimant):
                return
            running = (self._names[other & SEQ_MASK] for other in reversed(home.running))
            victim = next((name for name in running if name not in home.preempting), None)
            if victim is None or self._trajectories[victim].klass <= self._trajectories[claimant].klass:
                return
            home.preempting.add(victim)
            decisions.append(Preempt(victim))

    def _note_stuck(self) -> None:
        for name in self._arrived:
            t = self._trajectories[name]
            if t.home is not None and t.state == READY and t.key not in self._stuck:
                self._stuck.add(t.key)
        self._arrived.clear()

    def _unstick(self, t: _Trajectory) -> None:
        if self._stuck and t.key in self._stuck:
            self._stuck.remove(t.key)

    def _move(self, decisions: list[Decision], touched: dict[str, None]) -> None:
        """Actions that wait at a worker without a place for them go to the one with most room, if it has one."""
        for key in self._stuck[:MOVES]:
            name = self._names[key & SEQ_MASK]
            t = self._trajectories[name]
            high = t.klass <= CRITICAL
            worker = self._homes.least_loaded(high)
            home = self._homes[worker]
            if worker == t.home or not home.fits(t.context, high) or home.free <= len(home.waiting):
                continue
            self._homes[t.home].waiting.remove(key)
            touched[t.home] = None
            self._leave_home(name, t)
            self._move_in(name, t, worker)
            self._admit(name, worker, decisions)
            touched[worker] = None

    def _statements(self) -> list[Decision]:
        said: list[Decision] = []
        for name in self._restate:
            t = self._trajectories.get(name)
            if t is None or t.home is None:
                continue
            resident = self._o.residency and t.klass <= CRITICAL
            if resident and self._o.demotion:
                resident = self._homes[t.home].cut.inside(name)
            state = (REST - t.klass, resident)
            if state != t.sent:
                t.sent = state
                said.append(Prioritise(name, *state))
        self._restate.clear()
        return said

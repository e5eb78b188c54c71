"""A driver without an engine: random lives of groups, trajectories and workers around a policy; rules are checked.

Groups end, fail and are discarded, trajectories are lost and refilled, evaluations run beside, workers come and go.
"""

import math
import random

from venusrl.scheduling.protocol import (
    ActionDone,
    ActionReady,
    Admit,
    BatchTaken,
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

GROUP = 3
KV = 600


class Lives:
    """Feeds random events; `check` holds after each. `run` ends with every trajectory done."""

    def __init__(self, policy: SchedulerPolicy, seed: int, batch: int = 2, rude: bool = True):
        self.policy = policy
        self.rng = random.Random(seed)
        self.batch = batch
        self.rude = rude  # lose workers, cancel, predict nonsense
        self.now = 0.0
        self.version = self.ready_groups = self.serial = 0
        self.slots: dict[str, int] = {}
        self.waiting: dict[str, None] = {}
        self.running: dict[str, str] = {}
        self.preempting: set[str] = set()
        self.in_tool: dict[str, None] = {}
        self.context: dict[str, int] = {}
        self.generated: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.start: dict[str, int] = {}
        self.unfinished: dict[str, set[str]] = {}
        self.evaluations: set[str] = set()
        self.priority: dict[str, tuple[int, bool]] = {}
        self.wakes: list[float] = []
        self.log: list[tuple] = []

    # Rules

    def tell(self, event) -> None:
        self.policy.observe(event)
        self.decide()
        groups = getattr(self.policy, "_groups", None)
        if groups is not None:  # those of evaluations count for none
            assert groups._cut._capacity == self.batch - self.ready_groups % self.batch

    def decide(self) -> None:
        for d in self.policy.decide(self.now):
            self.log.append((type(d).__name__, *(getattr(d, f) for f in d.__dataclass_fields__)))
            if isinstance(d, Admit):
                assert d.trajectory in self.waiting, f"{d.trajectory} is not ready"
                del self.waiting[d.trajectory]
                assert d.worker in self.slots, f"{d.worker} is no worker"
                used = sum(w == d.worker for w in self.running.values())
                assert used < self.slots[d.worker], f"more than the slots of {d.worker}"
                assert d.kv_from is None or (d.kv_from in self.slots and d.kv_from != d.worker)
                self.running[d.trajectory] = d.worker
                self.start.setdefault(d.trajectory, self.version)
            elif isinstance(d, Preempt):
                assert d.trajectory in self.running and d.trajectory not in self.preempting
                self.preempting.add(d.trajectory)
            elif isinstance(d, Prioritise):
                assert d.trajectory in self.context and d.priority in (0, 1, 2)
                self.priority[d.trajectory] = (d.priority, d.resident)
            else:
                assert isinstance(d, Wake) and d.time > self.now
                self.wakes.append(d.time)

    # Events

    def up(self) -> None:
        self.serial += 1
        name = f"w{self.serial}"
        self.slots[name] = self.rng.randint(1, 3)
        self.tell(WorkerUp(self.now, name, self.slots[name], self.rng.choice([0, KV, 2 * KV])))

    def down(self) -> None:
        name = self.rng.choice(sorted(self.slots))
        gone = [t for t, w in self.running.items() if w == name]
        for t in gone:
            del self.running[t]
            self.preempting.discard(t)
            self.policy.observe(ActionDone(self.now, t, 0, True))
        del self.slots[name]
        self.tell(WorkerDown(self.now, name))
        for t in gone:
            self.ready(t)

    def open(self) -> None:
        self.serial += 1
        group = f"g{self.serial}"
        self.unfinished[group] = set()
        self.tell(GroupOpened(self.now, group, GROUP, self.version))
        for i in range(GROUP):
            self.start_one(f"{group}/{i}")

    def evaluate(self) -> str:
        self.serial += 1
        group = f"e{self.serial}"
        self.evaluations.add(group)
        self.unfinished[group] = set()
        self.tell(GroupOpened(self.now, group, 1, 0, training=False))
        self.start_one(f"{group}/0")
        return group

    def start_one(self, name: str) -> None:
        self.unfinished[name.partition("/")[0]].add(name)
        self.context[name], self.generated[name] = self.rng.randint(1, 40), 0
        self.turns[name] = self.rng.randint(1, 4)
        self.in_tool[name] = None

    def ready(self, name: str) -> None:
        self.in_tool.pop(name, None)
        self.waiting[name] = None
        group = name.partition("/")[0]
        self.tell(ActionReady(self.now, name, group, self.context[name], self.generated[name], 0, self.start.get(name)))

    def done(self, name: str, preempted: bool) -> None:
        del self.running[name]
        self.preempting.discard(name)
        tokens = self.rng.randint(0, 30)
        self.context[name] += tokens
        self.generated[name] += tokens
        self.tell(ActionDone(self.now, name, tokens, preempted))
        if preempted:
            self.ready(name)
            return
        self.turns[name] -= 1
        if self.turns[name] > 0:
            self.in_tool[name] = None
            self.context[name] += self.rng.randint(0, 30)
        else:
            self.end(name, lost=False)

    def end(self, name: str, lost: bool) -> None:
        group = name.partition("/")[0]
        self.tell(TrajectoryDone(self.now, name, group, lost))
        self.unfinished[group].discard(name)
        del self.context[name]
        self.ended(name, group, lost)

    def ended(self, name: str, group: str, lost: bool) -> None:
        """What follows for its group and the batch."""
        if not self.unfinished[group]:
            del self.unfinished[group]
            self.close(group, not lost)
        if self.ready_groups >= self.batch:
            self.ready_groups -= self.batch
            self.version += 1
            self.tell(BatchTaken(self.now, self.batch))
            self.tell(VersionPublished(self.now, self.version))

    def close(self, group: str, ready: bool) -> None:
        if group in self.evaluations:
            self.evaluations.discard(group)
            ready = self.rng.random() < 0.5  # whatever a driver says of it
        else:
            self.ready_groups += ready
        self.tell(GroupClosed(self.now, group, ready))

    def withdraw(self) -> None:
        self.cancel(self.rng.choice(sorted(self.waiting)))

    def cancel(self, name: str) -> None:
        """A trajectory is lost, wherever it is."""
        self.drop_action(name)
        self.end(name, lost=True)

    def drop_action(self, name: str) -> None:
        if name in self.waiting or name in self.running:
            self.waiting.pop(name, None)
            self.running.pop(name, None)
            self.preempting.discard(name)
            self.tell(ActionDone(self.now, name, 0, True))
        self.in_tool.pop(name, None)

    def refill(self) -> None:
        """A trajectory is lost, and another one comes in its place."""
        name = self.rng.choice(sorted(self.context))
        self.serial += 1
        self.start_one(f"{name.partition('r')[0]}r{self.serial}")
        self.cancel(name)

    def fail(self) -> None:
        """A group fails, or is discarded: it closes first, then what still lives of it ends."""
        group = self.rng.choice(sorted(self.unfinished))
        names = sorted(self.unfinished.pop(group))
        self.evaluations.discard(group)
        self.tell(GroupClosed(self.now, group, False))
        for name in names:
            self.drop_action(name)
            del self.context[name]
            self.tell(TrajectoryDone(self.now, name, group, True))

    def predict(self) -> None:
        name = self.rng.choice([*sorted(self.context), "nobody"])
        value = self.rng.choice([math.nan, -1.0, math.inf, 0.0, self.rng.random() * 1000])
        self.tell(LengthPredicted(self.now, name, value))

    def step(self) -> None:
        self.now += self.rng.random() * 2
        kind = self.rng.random()
        if self.preempting and kind < 0.3:
            self.done(self.rng.choice(sorted(self.preempting)), True)
        elif kind < 0.05 and len(self.slots) < 3:
            self.up()
        elif kind < 0.07 and self.rude and self.slots:
            self.down()
        elif kind < 0.12 and self.rude and self.context:
            self.predict()
        elif kind < 0.14 and self.rude and self.waiting:
            self.withdraw()
        elif kind < 0.16 and self.rude and self.context:
            self.refill()
        elif kind < 0.17 and self.rude and self.unfinished:
            self.fail()
        elif kind < 0.2 and len(self.evaluations) < 3:
            self.evaluate()
        elif kind < 0.27 and len(self.unfinished) - len(self.evaluations) < 2 * self.batch:
            self.open()
        elif kind < 0.6 and self.in_tool:
            self.ready(self.rng.choice(sorted(self.in_tool)))
        elif self.running:
            self.done(self.rng.choice(sorted(self.running)), False)

    def run(self, events: int) -> list[tuple]:
        for _ in range(events):
            self.step()
        if not self.slots:
            self.up()
        for _ in range(100_000):
            if not self.context:
                return self.log
            self.now += 1.0
            if self.preempting:
                self.done(min(self.preempting), True)
            elif self.in_tool:
                self.ready(next(iter(self.in_tool)))
            elif self.running:
                self.done(min(self.running), False)
            else:
                assert self.wakes, f"{len(self.waiting)} wait, nothing runs, and nothing is to come"
                self.now = max(self.now, self.wakes.pop())
                self.decide()
        raise AssertionError(f"{len(self.context)} trajectories never end")

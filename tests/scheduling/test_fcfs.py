"""FcfsAction under random event orders: slots are never exceeded, arrival order is kept, nothing is lost."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling import make_policy
from venusrl.scheduling.protocol import (
    ActionDone,
    ActionReady,
    Admit,
    GroupClosed,
    GroupOpened,
    TrajectoryDone,
    VersionPublished,
    WorkerDown,
    WorkerUp,
)


def ready(name: str, time: float = 0.0) -> ActionReady:
    return ActionReady(time, name, "g0", context=8, generated=0, turn=0, start_version=None)


def policy(**slots: int):
    made = make_policy("fcfs_action")
    for worker, count in slots.items():
        made.observe(WorkerUp(0.0, worker, count))
    return made


class Driver:
    """Carries out decisions as a driver would, and checks each against a plain model of the rules."""

    def __init__(self, fcfs):
        self.policy = fcfs
        self.slots: dict[str, int] = {}
        self.waiting: list[str] = []
        self.running: dict[str, str] = {}
        self.last: dict[str, str] = {}
        self.log: list[tuple[str, str]] = []
        self.time = 0.0

    def tell(self, kind, *args) -> None:
        self.time += 1.0
        self.policy.observe(kind(self.time, *args))
        self.decide()

    def up(self, worker: str, slots: int) -> None:
        self.slots[worker] = slots
        self.tell(WorkerUp, worker, slots)

    def down(self, worker: str) -> None:
        gone = [t for t, w in self.running.items() if w == worker]
        for name in gone:
            del self.running[name]
            self.policy.observe(ActionDone(self.time, name, 0, True))
        del self.slots[worker]
        self.tell(WorkerDown, worker)
        for name in gone:
            self.ready(name)

    def ready(self, name: str) -> None:
        self.waiting.append(name)
        self.tell(ActionReady, name, "g0", 8, 0, 0, None)

    def done(self, name: str, preempted: bool) -> None:
        del self.running[name]
        self.tell(ActionDone, name, 3, preempted)

    def withdraw(self, name: str) -> None:
        self.waiting.remove(name)
        self.tell(ActionDone, name, 0, True)

    def finish(self, name: str) -> None:
        self.last.pop(name, None)
        self.tell(TrajectoryDone, name, "g0", False)

    def decide(self) -> None:
        for decision in self.policy.decide(self.time):
            assert isinstance(decision, Admit)
            name, worker = decision.trajectory, decision.worker
            assert self.waiting and self.waiting[0] == name, "not the first that came"
            self.waiting.pop(0)
            load = list(self.running.values())
            room = {w: n - load.count(w) for w, n in self.slots.items()}
            assert room.get(worker, 0) > 0, "more than the worker's slots"
            sticky = self.last.get(name)
            if room.get(sticky, 0) > 0:
                assert worker == sticky
            else:
                assert room[worker] == max(room.values())
            self.running[name] = worker
            self.last[name] = worker
            self.log.append((name, worker))

    def check(self) -> None:
        free = sum(self.slots.values()) - len(self.running)
        assert free >= 0
        assert not (self.waiting and free), "an action waits while a slot is free"


def live_randomly(seed: int, events: int = 150) -> list[tuple[str, str]]:
    """A random life: workers come and go, actions arrive, end, are preempted and withdrawn. The admissions."""
    rng = random.Random(seed)
    driver, serial = Driver(make_policy("fcfs_action")), 0
    idle: list[str] = []
    for _ in range(events):
        kind = rng.random()
        if kind < 0.06 and len(driver.slots) < 3:
            serial += 1
            driver.up(f"w{serial}", rng.randint(1, 3))
        elif kind < 0.09 and driver.slots:
            driver.down(rng.choice(sorted(driver.slots)))
        elif kind < 0.5:
            name = idle.pop(rng.randrange(len(idle))) if idle and rng.random() < 0.7 else f"t{(serial := serial + 1)}"
            driver.ready(name)
        elif kind < 0.8 and driver.running:
            name = rng.choice(sorted(driver.running))
            preempted = rng.random() < 0.3
            driver.done(name, preempted)
            if preempted:
                driver.ready(name)
            elif rng.random() < 0.7:
                idle.append(name)
            else:
                driver.finish(name)
        elif kind < 0.85 and driver.waiting:
            driver.withdraw(rng.choice(driver.waiting))
        elif kind < 0.9:
            driver.tell(rng.choice([GroupClosed, VersionPublished]), 1)
        driver.check()
    # No trajectory is lost: with a worker there, everything that waits gets its turn.
    driver.up("last", 1)
    for _ in range(len(driver.waiting) + len(driver.running)):
        assert driver.running
        driver.done(sorted(driver.running)[0], False)
        driver.check()
    assert not driver.waiting
    return driver.log


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_random_lives(seed):
    assert live_randomly(seed) == live_randomly(seed)  # the rules hold inside; and it is deterministic


def placed(fcfs, *events) -> dict[str, str]:
    """Worker by trajectory, of what is admitted after each event."""
    found = {}
    for event in events:
        fcfs.observe(event)
        found |= {d.trajectory: d.worker for d in fcfs.decide(event.time)}
    return found


def admitted(fcfs, *events) -> list[str]:
    return list(placed(fcfs, *events))


def test_first_come_first_served():
    fcfs = policy(w=1)
    assert admitted(fcfs, ready("b"), ready("a"), ready("c")) == ["b"]
    assert admitted(fcfs, ActionDone(1.0, "b", 5)) == ["a"]
    assert admitted(fcfs, ActionDone(2.0, "a", 5)) == ["c"]


def test_the_rest_of_a_preempted_action_goes_to_the_end():
    fcfs = policy(w=1)
    admitted(fcfs, ready("a"), ready("b"))
    assert admitted(fcfs, ActionDone(1.0, "a", 2, preempted=True), ready("a"), ready("c")) == ["b"]
    assert admitted(fcfs, ActionDone(2.0, "b", 2)) == ["a"]
    assert admitted(fcfs, ActionDone(3.0, "a", 2)) == ["c"]


def test_a_withdrawn_action_is_not_admitted_and_frees_no_slot():
    fcfs = policy(w=1)
    admitted(fcfs, ready("a"), ready("b"), ready("c"))
    assert admitted(fcfs, ActionDone(1.0, "b", 0, preempted=True)) == []
    assert admitted(fcfs, ActionDone(2.0, "a", 5)) == ["c"]
    assert admitted(fcfs, ready("d")) == []


def test_a_trajectory_returns_to_its_worker():
    """slime#1469: routing request by request broke the prefix cache of multi-turn trajectories."""
    fcfs = policy(v=2, w=2)
    homes: dict[str, set[str]] = {name: set() for name in "abcd"}
    for turn in range(3):
        for name in "abcd":
            fcfs.observe(ready(name))
        for decision in fcfs.decide(float(turn)):
            homes[decision.trajectory].add(decision.worker)
        for name in "dcba":
            fcfs.observe(ActionDone(float(turn), name, 1))
    assert all(len(workers) == 1 for workers in homes.values())


def test_stickiness_never_makes_an_action_wait():
    """torchtitan#3755, prime-rl PR#3255: sticky routing overloaded one worker while others idled."""
    fcfs = policy(v=1, w=1)
    home = placed(fcfs, ready("a"))["a"]
    on = placed(fcfs, ActionDone(1.0, "a", 1), ready("b"), ready("c"))
    assert set(on.values()) == {"v", "w"}
    at_home = next(name for name, worker in on.items() if worker == home)
    elsewhere = next(name for name in on if name != at_home)
    again = placed(fcfs, ready("a"), ActionDone(2.0, elsewhere, 1))
    assert again == {"a": on[elsewhere]}  # home is still busy


def test_new_trajectories_go_where_most_room_is():
    fcfs = policy(v=1, w=3)
    fcfs.observe(ready("a"))
    assert fcfs.decide(0.0) == [Admit("a", "w")]


def test_a_worker_that_is_down_gets_nothing():
    fcfs = policy(v=1, w=1)
    fcfs.observe(WorkerDown(1.0, "v"))
    assert placed(fcfs, ready("a"), ready("b")) == {"a": "w"}
    fcfs.observe(WorkerUp(2.0, "x", 1))
    assert fcfs.decide(2.0) == [Admit("b", "x")]


def test_nothing_is_admitted_without_workers():
    assert admitted(policy(), ready("a")) == []


def test_events_it_does_not_need_are_ignored():
    fcfs = policy(w=1)
    quiet = [GroupOpened(0.0, "g0", 8, 0), GroupClosed(0.0, "g0"), VersionPublished(0.0, 3)]
    assert admitted(fcfs, *quiet) == []
    assert admitted(fcfs, TrajectoryDone(0.0, "unknown", "g0", lost=True), ready("a")) == ["a"]

"""What VenusRL's policy does, case by case; tests/scheduling/test_policies.py lets it live at random."""

import pytest

from venusrl.scheduling import SchedulerOptions, make_policy
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
    TrajectoryDone,
    VersionPublished,
    WorkerDown,
    WorkerUp,
)


class Table:
    """A policy and what it said, by kind."""

    def __init__(self, workers: dict[str, tuple[int, int]], batch: int = 1, eta: int = 1, **switches):
        self.policy = make_policy("venus", SchedulerOptions(batch, eta, **switches))
        self.now = 0.0
        for name, (slots, kv) in workers.items():
            self.tell(WorkerUp(0.0, name, slots, kv))

    def tell(self, *events) -> list:
        said = []
        for event in events:
            self.now += 1.0
            event.time = self.now
            self.policy.observe(event)
            said += self.policy.decide(self.now)
        return said

    def open(self, *groups: str, version: int = 0) -> None:
        self.tell(*(GroupOpened(0.0, g, 2, version) for g in groups))

    def ready(self, name: str, context: int = 10, generated: int = 0, start: int | None = None) -> list:
        return self.tell(ActionReady(0.0, name, name.partition("/")[0], context, generated, 0, start))


def admitted(said: list) -> list[str]:
    return [d.trajectory for d in said if isinstance(d, Admit)]


def preempted(said: list) -> list[str]:
    return [d.trajectory for d in said if isinstance(d, Preempt)]


def test_the_group_with_least_to_do_is_critical_and_gets_the_slot():
    table = Table({"w": (1, 0)})
    table.open("long", "short", "other")
    assert admitted(table.ready("other/0")) == ["other/0"]
    table.ready("long/0")
    table.ready("short/0")
    table.tell(LengthPredicted(0.0, "other/0", 9e4), LengthPredicted(0.0, "long/0", 5e4))
    table.tell(LengthPredicted(0.0, "short/0", 50.0))
    assert admitted(table.tell(ActionDone(0.0, "other/0", 5, True))) == ["short/0"]


def test_the_longest_of_the_critical_ones_goes_first():
    table = Table({"w": (1, 0)}, batch=2, preemption=False)
    table.open("a", "b")
    table.ready("x/0")
    table.ready("a/0")
    table.ready("b/0")
    table.tell(LengthPredicted(0.0, "a/0", 100.0), LengthPredicted(0.0, "b/0", 5000.0))
    assert admitted(table.tell(ActionDone(0.0, "x/0", 5), TrajectoryDone(0.0, "x/0", "x", False))) == ["b/0"]


def test_a_low_action_gives_its_slot_to_a_critical_one_and_only_then():
    table = Table({"w": (1, 0)})
    table.open("first", "second")
    assert admitted(table.ready("second/0")) == ["second/0"]  # the only one there is: opportunistic
    assert preempted(table.ready("second/1")) == []
    assert preempted(table.ready("first/0")) == ["second/0"]
    assert preempted(table.ready("first/1")) == []  # one slot, one request to give it back
    said = table.tell(ActionDone(0.0, "second/0", 3, True))
    assert admitted(said) == ["first/0"]


def test_without_preemption_it_waits():
    table = Table({"w": (1, 0)}, preemption=False)
    table.open("first", "second")
    table.ready("second/0")
    assert preempted(table.ready("first/0")) == []


@pytest.mark.parametrize(("published", "first"), [(False, "new/0"), (True, "old/0")])
def test_a_group_at_its_last_admissible_version_comes_before_a_critical_one(published, first):
    table = Table({"w": (1, 0)}, batch=1, eta=1, preemption=False)
    table.open("old")
    if published:
        table.tell(BatchTaken(0.0, 1), VersionPublished(0.0, 1))
    table.open("new", version=int(published))
    table.ready("x/0")
    table.ready("old/0")
    table.ready("new/0")
    table.ready("new/1")
    table.tell(LengthPredicted(0.0, "old/0", 1e6), LengthPredicted(0.0, "new/0", 10.0))
    said = table.tell(ActionDone(0.0, "x/0", 5))
    assert admitted(said) == [first]


def test_a_worker_keeps_what_its_kv_holds_and_the_others_wait():
    table = Table({"w": (8, 100)}, batch=8)
    table.open("a", "b", "c")
    said = table.ready("a/0", 40) + table.ready("b/0", 40) + table.ready("c/0", 40)
    assert admitted(said) == ["a/0", "b/0"]
    kept = {d.trajectory: d.resident for d in said if isinstance(d, Prioritise)}
    assert kept == {"a/0": True, "b/0": True, "c/0": False}
    said = table.tell(ActionDone(0.0, "a/0", 5), TrajectoryDone(0.0, "a/0", "a", False))
    assert admitted(said) == ["c/0"] and Prioritise("c/0", 1, True) in said


def test_without_demotion_all_run_and_all_are_kept():
    table = Table({"w": (8, 100)}, batch=8, demotion=False)
    table.open("a", "b", "c")
    said = table.ready("a/0", 40) + table.ready("b/0", 40) + table.ready("c/0", 40)
    assert admitted(said) == ["a/0", "b/0", "c/0"]
    assert all(d.resident for d in said if isinstance(d, Prioritise))


def test_without_residency_nothing_is_kept():
    table = Table({"w": (8, 100)}, batch=8, residency=False)
    table.open("a")
    said = table.ready("a/0", 40)
    assert all(not d.resident for d in said if isinstance(d, Prioritise))


def test_a_trajectory_in_its_tool_keeps_its_place():
    table = Table({"w": (8, 100)}, batch=8)
    table.open("a", "b", "c")
    table.ready("a/0", 40)
    table.ready("b/0", 40)
    table.tell(ActionDone(0.0, "a/0", 5))
    assert admitted(table.ready("c/0", 40)) == []
    assert admitted(table.ready("a/0", 50, 5, start=0)) == ["a/0"]


def crowded(**switches) -> list:
    """What is said when b/0 comes back to a worker that a/0 fills by now, with an empty one beside it."""
    table = Table({"v": (8, 100)}, batch=8, **switches)
    table.open("a", "b")
    table.ready("a/0", 40)
    table.ready("b/0", 30)
    table.tell(ActionDone(0.0, "b/0", 5))
    table.tell(WorkerUp(0.0, "w", 8, 100))
    table.tell(ActionDone(0.0, "a/0", 40), LengthPredicted(0.0, "a/0", 9e5))
    return table.ready("b/0", 60, 5, start=0)


def test_what_has_no_place_moves_to_where_one_is_with_its_kv():
    assert [d for d in crowded() if isinstance(d, Admit)] == [Admit("b/0", "w", "v")]


def test_without_migration_it_waits_at_home():
    assert admitted(crowded(migration=False)) == []


def test_when_a_worker_is_lost_its_trajectories_go_on_elsewhere_without_kv():
    table = Table({"v": (1, 0)})
    table.open("a")
    table.ready("a/0")
    table.tell(ActionDone(0.0, "a/0", 0, True))
    said = table.tell(WorkerDown(0.0, "v"))
    assert admitted(said) == []
    assert admitted(table.ready("a/0")) == []  # nobody to run it
    said = table.tell(WorkerUp(0.0, "w", 1, 0))
    assert [d for d in said if isinstance(d, Admit)] == [Admit("a/0", "w", None)]


def test_a_closed_group_makes_room_for_the_next_in_the_batch():
    table = Table({"w": (1, 0)}, batch=2)
    table.open("a", "b", "c")
    table.ready("x/0")
    for name in ("a/0", "b/0", "c/0"):
        table.ready(name)
    groups = table.policy._groups
    assert [groups.klass(g) for g in "abc"] == [1, 1, 2]
    table.tell(GroupClosed(0.0, "a", False))  # it failed: the batch still wants two
    assert [groups.klass(g) for g in "bc"] == [1, 1]
    table.tell(GroupClosed(0.0, "b", True))
    table.open("d")
    assert [groups.klass(g) for g in "cd"] == [1, 2]


def test_critical_groups_go_before_an_evaluation_and_take_its_slots():
    table = Table({"w": (1, 0)}, batch=2)
    table.tell(GroupOpened(0.0, "e", 1, 0, training=False), VersionPublished(0.0, 1))
    assert admitted(table.ready("e/0")) == ["e/0"]  # while nothing else wants it
    table.open("a", version=1)
    assert preempted(table.ready("a/0")) == ["e/0"]
    said = table.tell(ActionDone(0.0, "e/0", 3, preempted=True))
    assert admitted(said) == ["a/0"]
    assert table.ready("e/0", generated=3) == []
    table.ready("a/1")
    assert admitted(table.tell(ActionDone(0.0, "a/0", 5))) == ["a/1"]
    assert admitted(table.tell(ActionDone(0.0, "a/1", 5))) == ["e/0"]


@pytest.mark.parametrize("ready", [True, False])
def test_an_evaluation_is_never_due_and_counts_for_no_batch_however_it_closes(ready):
    table = Table({"w": (9, 0)}, batch=8, eta=0)
    table.tell(VersionPublished(0.0, 7))
    for i in range(100):
        table.tell(GroupOpened(0.0, f"eval/{i}", 1, 0, training=False))
        said = table.tell(ActionReady(0.0, f"eval/{i}/0", f"eval/{i}", 10, 0, 0, 0))
        assert all(d.priority == 0 and not d.resident for d in said if isinstance(d, Prioritise))
        table.tell(ActionDone(0.0, f"eval/{i}/0", 5), TrajectoryDone(0.0, f"eval/{i}/0", f"eval/{i}", False))
        table.tell(GroupClosed(0.0, f"eval/{i}", ready))
    assert table.policy._groups._cut._capacity == 8


def test_an_evaluation_does_not_starve_behind_training_that_never_ends():
    table = Table({"w": (1, 0)}, batch=1, eta=0)
    table.tell(GroupOpened(0.0, "e", 1, 0, training=False))
    seen: list[str] = []
    for version in range(4):
        group = f"g{version}"
        table.open(group, version=version)
        said = table.ready(f"{group}/0") + (table.ready("e/0") if version == 0 else [])
        said += table.tell(ActionDone(0.0, f"{group}/0", 5)) if f"{group}/0" in admitted(said) else []
        seen += admitted(said)
        table.tell(BatchTaken(0.0, 1), VersionPublished(0.0, version + 1))
    assert "e/0" in seen


def test_the_policy_says_where_its_lengths_come_from():
    table = Table({"w": (9, 0)})
    table.open("a", "b")
    table.ready("a/0")
    assert table.policy.length_sources == {"predictor": 0, "group_mean": 0, "run_mean": 0, "none": 1}
    table.tell(ActionDone(0.0, "a/0", 40), TrajectoryDone(0.0, "a/0", "a", False))
    table.ready("a/1")
    table.ready("b/0")
    assert table.policy.length_sources == {"predictor": 0, "group_mean": 1, "run_mean": 1, "none": 1}
    table.tell(ActionDone(0.0, "b/0", 4), LengthPredicted(0.0, "b/0", 30.0))
    table.ready("b/0")
    assert table.policy.length_sources == {"predictor": 1, "group_mean": 1, "run_mean": 1, "none": 1}

"""The coordinator: admission, staleness, refills, and what survives a kill."""

import json
import random
from collections import Counter

import pytest

from venusrl.coordinator.coordinator import Coordinator, CoordinatorOptions
from venusrl.coordinator.prompts import PromptStream
from venusrl.core.errors import ConfigError, ContractError
from venusrl.core.group import Batch
from venusrl.core.trajectory import Status, Trajectory


def make(tasks: int = 10, seed: int = 0, **options) -> Coordinator:
    defaults = {"group_size": 2, "batch_groups": 2, "seed": seed}
    return Coordinator(PromptStream(tasks, seed), CoordinatorOptions(**{**defaults, **options}))


def start(trajectory: Trajectory, version: int) -> None:
    trajectory.append_generated([1], [-1.0], version)


def finish(coordinator: Coordinator, trajectory: Trajectory, reward: float = 0.0):
    if not trajectory.turns:
        start(trajectory, coordinator.version)
    trajectory.complete(reward)
    return coordinator.trajectory_done(trajectory)


def finish_group(coordinator: Coordinator, group) -> None:
    for trajectory in list(group.trajectories):
        finish(coordinator, trajectory)


def unfinished(coordinator: Coordinator) -> list[Trajectory]:
    return [t for g in coordinator.open_groups for t in g.trajectories if not t.finished]


def run(coordinator: Coordinator, rng: random.Random, steps: int, lose: float = 0.0, trained=None) -> list[Batch]:
    """A driver without engine or sandboxes: random trajectories start and end until `steps` batches are trained."""
    trained = [] if trained is None else trained
    while len(trained) < steps:
        coordinator.admit()
        batch = coordinator.take_batch()
        if batch is not None:
            for trajectory in unfinished(coordinator):
                if rng.random() < 0.3 and not trajectory.turns:
                    start(trajectory, coordinator.version)  # generation goes on while the learner works
            trained.append(batch)
            coordinator.published(batch.version + 1)
            continue
        live = unfinished(coordinator)
        assert live, "nothing runs and no batch may be taken: the run hangs"
        trajectory = rng.choice(live)
        if not trajectory.turns:
            start(trajectory, coordinator.version)
        elif rng.random() < lose:
            coordinator.trajectory_lost(trajectory, "node lost")
        else:
            finish(coordinator, trajectory)
    return trained


# Admission


@pytest.mark.parametrize(("factor", "groups"), [(1.0, 2), (1.4, 2), (1.5, 3), (2.0, 4), (3.0, 6)])
def test_admission_stops_at_the_bound(factor, groups):
    coordinator = make(async_factor=factor)
    assert len(coordinator.admit()) == groups
    assert coordinator.admit() == []


def test_a_batch_in_training_counts():
    coordinator = make(async_factor=1.5)
    for group in coordinator.admit()[:2]:
        finish_group(coordinator, group)
    batch = coordinator.take_batch()
    assert len(batch.groups) == 2
    assert coordinator.admit() == []  # 1 open + 2 in training
    coordinator.published(1)
    assert len(coordinator.admit()) == 2


def test_groups_are_numbered_once_and_hold_seeded_trajectories():
    groups = make(async_factor=2.0).admit()
    trajectories = [t for g in groups for t in g.trajectories]
    assert [g.id for g in groups] == ["g0", "g1", "g2", "g3"]
    assert [t.id for t in groups[1].trajectories] == ["g1/0", "g1/1"]
    assert len({t.seed for t in trajectories}) == len(trajectories)
    assert all(0 <= t.seed < 2**31 for t in trajectories)
    assert [t.seed for t in trajectories] == [t.seed for g in make(async_factor=2.0).admit() for t in g.trajectories]
    other = [t.seed for g in make(seed=1, async_factor=2.0).admit() for t in g.trajectories]
    assert not set(other) & {t.seed for t in trajectories}


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 3.0])
def test_no_burst_after_a_resume(factor):
    """AReaL#1388: the counters began at 0 at version N, and everything the budget ever allowed was admitted at once."""
    coordinator = make(async_factor=factor)
    run(coordinator, random.Random(0), 50)
    state = json.loads(json.dumps(coordinator.state_dict()))
    again = make(async_factor=factor)
    again.load_state_dict(state)
    assert again.version == 50
    again.admit()
    assert len(again.open_groups) + len(again.ready_groups) == int(factor * 2)
    batches = run(again, random.Random(1), 10)
    assert max(max(b.staleness()) for b in batches) <= again.options.eta


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"group_size": 0}, "group_size=0"),
        ({"batch_groups": 0}, "batch_groups=0"),
        ({"async_factor": 0.9}, "async_factor=0.9"),
        ({"max_refills": -1}, "max_refills=-1"),
    ],
)
def test_bad_options_are_named(options, field):
    with pytest.raises(ConfigError, match=field):
        CoordinatorOptions(**options)


# Staleness


@pytest.mark.parametrize(("factor", "eta"), [(1.0, 0), (1.5, 1), (2.0, 1), (2.5, 2), (3.0, 2)])
def test_eta(factor, eta):
    assert CoordinatorOptions(async_factor=factor).eta == eta


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 2.5, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_staleness_never_exceeds_eta(factor, seed):
    coordinator = make(async_factor=factor, group_size=1 + seed % 2, batch_groups=1 + seed // 2)
    batches = run(coordinator, random.Random(seed), 60, lose=0.02)
    staleness = [s for batch in batches for s in batch.staleness()]
    assert min(staleness) >= 0
    assert max(staleness) <= coordinator.options.eta
    if factor >= 1.5 and coordinator.options.batch_groups > 1:
        assert max(staleness) > 0  # the bound is used, not avoided


def test_a_long_task_is_waited_for_and_trained():
    """slime#1800, tinker-cookbook#822: discarding by age means that tasks longer than eta steps are never trained."""
    coordinator = make(async_factor=2.0)
    slow = coordinator.admit()[0]
    for trajectory in slow.trajectories:
        start(trajectory, 0)
    for group in coordinator.open_groups[1:3]:
        finish_group(coordinator, group)
    assert slow not in coordinator.take_batch().groups
    coordinator.published(1)
    coordinator.admit()
    for group in coordinator.open_groups:
        if group is not slow:
            finish_group(coordinator, group)
    assert len(coordinator.ready_groups) == 3
    assert coordinator.take_batch() is None  # a batch now would make it too old
    finish_group(coordinator, slow)
    batch = coordinator.take_batch()
    assert slow in batch.groups
    assert max(batch.staleness()) == 1


def test_groups_that_come_due_together_are_spread_over_batches():
    """With eta = 2, two groups of one version would both be due at the same, single-group batch."""
    coordinator = make(group_size=1, batch_groups=1, async_factor=3.0)
    first, second, third = coordinator.admit()
    for group in (first, second, third):
        start(group.trajectories[0], 0)
    finish_group(coordinator, first)
    assert coordinator.take_batch().groups == (first,)
    coordinator.published(1)
    (young,) = coordinator.admit()
    finish_group(coordinator, young)
    assert coordinator.take_batch() is None  # then second and third would be left for version 2
    finish_group(coordinator, third)
    assert coordinator.take_batch().groups == (third,)
    coordinator.published(2)
    finish_group(coordinator, second)
    batch = coordinator.take_batch()
    assert batch.groups == (second,) and batch.staleness() == [2]


def test_a_smaller_async_factor_after_a_resume_does_not_hang():
    coordinator = make(async_factor=3.0)
    for group in coordinator.admit():
        finish_group(coordinator, group)
    again = make(async_factor=1.0)
    again.load_state_dict(coordinator.state_dict())
    assert len(run(again, random.Random(0), 6)) == 6


def test_oldest_start_goes_first():
    coordinator = make(group_size=1, async_factor=2.0, batch_groups=1)
    old, new = coordinator.admit()
    start(old.trajectories[0], 0)
    start(new.trajectories[0], 1)
    finish_group(coordinator, new)
    finish_group(coordinator, old)
    assert coordinator.take_batch().groups == (old,)


def test_one_batch_at_a_time():
    coordinator = make(async_factor=2.0)
    for group in coordinator.admit():
        finish_group(coordinator, group)
    assert coordinator.take_batch() is not None
    assert coordinator.take_batch() is None
    coordinator.published(1)
    assert coordinator.take_batch() is not None


def test_give_back_undoes_take_batch():
    coordinator = make(async_factor=1.0)
    for group in coordinator.admit():
        finish_group(coordinator, group)
    before = coordinator.state_dict()
    batch = coordinator.take_batch()
    coordinator.give_back(batch)
    assert coordinator.state_dict() == before
    assert coordinator.take_batch() == batch


def test_versions_only_grow():
    coordinator = make()
    coordinator.published(3)
    for version in (3, 2):
        with pytest.raises(ContractError, match=f"version {version} is not newer than 3"):
            coordinator.published(version)


# Losses


def test_a_loss_refills_only_itself():
    """miles#2800: one infra abort dropped the group, which is 1 - (1-p)^n of them; here only its trajectory goes."""
    coordinator = make(group_size=8)
    group = coordinator.admit()[0]
    for trajectory in group.trajectories[1:]:
        finish(coordinator, trajectory, reward=1.0)
    kept, gone = list(group.trajectories[1:]), group.trajectories[0]
    start(gone, 0)
    fresh = coordinator.trajectory_lost(gone, "SandboxLost: oom")
    assert group.trajectories[0] is fresh and group.trajectories[1:] == kept
    assert (fresh.id, fresh.index, fresh.status, fresh.tokens) == ("g0/0r1", 0, Status.PENDING, [])
    assert fresh.seed != gone.seed
    assert (gone.status, gone.reward) == (Status.LOST, None)
    assert group.reasons == ["g0/0: SandboxLost: oom"]
    assert coordinator.counters.refilled_trajectories == 1
    assert not group.ready and group.rewards == [1.0] * 7  # no reward of 0 in its place
    finish(coordinator, fresh, reward=1.0)
    assert group.rewards == [1.0] * 8
    assert coordinator.ready_groups == [group]


def test_refills_are_bounded_and_the_failure_is_reported():
    """miles PR#1012: a group with a sample that always raises vanished, and its slot was stuck for hours."""
    coordinator = make(max_refills=2)
    group = coordinator.admit()[0]
    lost = group.trajectories[1]
    for attempt in range(2):
        lost = coordinator.trajectory_lost(lost, f"reason {attempt}")
        assert lost.id == f"g0/1r{attempt + 1}"
    assert coordinator.trajectory_lost(lost, "reason 2") is None
    assert coordinator.counters.failed == 1
    assert coordinator.failures == [
        {
            "group": "g0",
            "prompt_id": group.prompt_id,
            "reasons": ["g0/1: reason 0", "g0/1r1: reason 1", "g0/1r2: reason 2"],
        }
    ]
    assert coordinator.group("g0") is None
    assert [g.id for g in coordinator.admit()] == ["g2"]  # its place is free again


def test_late_reports_are_refused():
    coordinator = make(max_refills=1)
    group = coordinator.admit()[0]
    first = group.trajectories[0]
    coordinator.trajectory_lost(first, "x")
    for report in (lambda: finish(coordinator, first), lambda: coordinator.trajectory_lost(first, "again")):
        with pytest.raises(ContractError):
            report()
    coordinator.trajectory_lost(group.trajectories[0], "x")  # the group has failed
    with pytest.raises(ContractError, match="g0/1 is not in an open group"):
        finish(coordinator, group.trajectories[1])
    coordinator.check()


def test_only_done_trajectories_are_reported_as_done():
    coordinator = make()
    trajectory = coordinator.admit()[0].trajectories[0]
    with pytest.raises(ContractError, match="g0/0 is pending, not done"):
        coordinator.trajectory_done(trajectory)


def test_failed_groups_are_made_up_for():
    coordinator = make(updates=3, max_refills=0)
    failed = coordinator.admit()[0]
    coordinator.trajectory_lost(failed.trajectories[0], "x")
    batches = run(coordinator, random.Random(0), 3)
    assert coordinator.admit() == []
    c = coordinator.counters
    assert (c.submitted, c.consumed, c.failed) == (7, 6, 1)
    assert failed not in [g for b in batches for g in b.groups]


def test_updates_are_the_end():
    coordinator = make(updates=1, async_factor=2.0)
    assert len(coordinator.admit()) == 2
    for group in coordinator.open_groups:
        finish_group(coordinator, group)
    coordinator.take_batch()
    assert coordinator.admit() == []
    coordinator.published(1)
    assert coordinator.admit() == []


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_going_on_with_another_batch_size_reaches_the_end(groups):
    """A bound on groups in all would be used up early by smaller batches, and the run would wait for ever."""
    before = make(updates=6)
    run(before, random.Random(0), 3)
    after = make(updates=6, batch_groups=groups)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    after.restart_unfinished()
    run(after, random.Random(1), 3)
    assert after.version == 6 and after.admit() == []


def test_groups_of_one_reward_are_taken():
    """prime-rl PR#2277: when every group has one reward only, batches go on and nothing waits for better ones."""
    batches = run(make(), random.Random(0), 5)
    assert all(set(g.rewards) == {0.0} for b in batches for g in b.groups)


# Prompts


def test_every_task_once_an_epoch():
    stream = PromptStream(7, seed=3)
    drawn = [stream.next() for _ in range(21)]
    assert [epoch for epoch, _ in drawn] == [0] * 7 + [1] * 7 + [2] * 7
    orders = [tuple(task for _, task in drawn[i : i + 7]) for i in (0, 7, 14)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len(set(orders)) == 3


def test_the_cursor_is_the_whole_state():
    stream = PromptStream(5, seed=3)
    drawn = [stream.next() for _ in range(17)]
    for k in range(17):
        again = PromptStream(5, seed=3, cursor=k)
        assert [again.next() for _ in range(17 - k)] == drawn[k:]


def test_seeds_give_other_orders():
    orders = {tuple(s.next() for _ in range(20)) for s in (PromptStream(20, seed) for seed in range(5))}
    assert len(orders) == 5


def test_no_tasks_is_an_error():
    with pytest.raises(ConfigError, match="train_tasks=0"):
        PromptStream(0, seed=0)


# What survives a kill


def prompts(batches) -> Counter:
    return Counter((g.epoch, g.prompt_id) for b in batches for g in b.groups)


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_kill_and_resume_trains_the_same_prompts(factor, seed):
    """OpenRLHF#1322, vime#324, NeMo-RL PR#3599: the saved cursor was ahead of the buffer; open prompts were skipped."""
    steps, rng = 12, random.Random(seed)
    whole = make(async_factor=factor, updates=steps)
    expected = prompts(run(whole, random.Random(99), steps))

    coordinator = make(async_factor=factor, updates=steps)
    trained = run(coordinator, rng, rng.randrange(1, steps - 1))
    saved, kept = json.loads(json.dumps(coordinator.state_dict())), list(trained)
    run(coordinator, rng, len(kept) + 1, trained=trained)  # progress after the save, which the kill takes back

    coordinator = make(async_factor=factor, updates=steps)
    coordinator.load_state_dict(saved)
    coordinator.restart_unfinished()
    assert prompts(run(coordinator, rng, steps, trained=kept)) == expected
    assert coordinator.counters.submitted == whole.counters.submitted == 2 * steps


def test_restart_keeps_what_is_done():
    coordinator = make(group_size=3)
    group = coordinator.admit()[0]
    finish(coordinator, group.trajectories[0], reward=0.5)
    start(group.trajectories[1], 0)
    again = make(group_size=3)
    again.load_state_dict(json.loads(json.dumps(coordinator.state_dict())))
    fresh = again.restart_unfinished()
    restored = again.group("g0")
    assert restored.trajectories[0].reward == 0.5
    assert [t.id for t in fresh] == ["g0/1", "g0/2", "g1/0", "g1/1", "g1/2"]
    assert all(t.status == Status.PENDING and not t.tokens for t in fresh)
    assert fresh[0] is restored.trajectories[1]
    assert fresh[0].seed == group.trajectories[1].seed  # the same sample again
    assert restored.refills == 0 and again.counters.refilled_trajectories == 0


def test_ends_that_were_not_reported_before_the_kill_do_not_hang_the_run():
    """The last trajectory of a group was done, its outcome still in the queue, when the state was saved."""
    coordinator = make(group_size=1)
    for group in coordinator.admit():
        start(group.trajectories[0], 0)
        group.trajectories[0].complete(1.0)
    again = make(group_size=1)
    again.load_state_dict(json.loads(json.dumps(coordinator.state_dict())))
    assert again.restart_unfinished() == []
    assert len(again.take_batch().groups) == 2


def test_state_during_training_is_refused():
    coordinator = make()
    for group in coordinator.admit():
        finish_group(coordinator, group)
    coordinator.take_batch()
    with pytest.raises(ContractError, match="in training would lose it"):
        coordinator.state_dict()


def test_the_same_seed_and_events_give_the_same_run():
    states = []
    for _ in range(2):
        coordinator = make(async_factor=1.5)
        run(coordinator, random.Random(5), 8, lose=0.1)
        states.append(coordinator.state_dict())
    assert states[0] == states[1]

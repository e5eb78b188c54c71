"""The rules of other systems, each against what its published code does; all against the coordinator's invariant."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.coordinator.coordinator import Coordinator, CoordinatorOptions
from venusrl.coordinator.prompts import PromptStream
from venusrl.coordinator.rules import check_dataset, make_rule
from venusrl.core.errors import ConfigError
from venusrl.core.group import Group

SCHEDULERS = ["venus", "slime", "slime_step", "rollflash", "thunderagent", "areal"]


def coordinator(scheduler: str, batch: int = 2, async_factor: float = 2.0, updates: int | None = 20) -> Coordinator:
    options = CoordinatorOptions(2, batch, async_factor, updates=updates)
    return Coordinator(PromptStream(100, 0), options, make_rule(scheduler))


def finish(c: Coordinator, group: Group) -> None:
    for t in group.trajectories:
        if not t.finished:
            t.append_observation([1])
            t.append_generated([2], [-0.1], c.version)
            t.complete(1.0)
            c.trajectory_done(t)


def begin(c: Coordinator, group: Group) -> None:
    for t in group.trajectories:
        if t.start_version is None:
            t.append_observation([1])
            t.append_generated([2], [-0.1], c.version)


def names(groups: list[Group] | tuple[Group, ...]) -> list[str]:
    return [g.id for g in groups]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), async_factor=st.sampled_from([1.0, 1.5, 2.0, 3.0]))
def test_a_run_always_comes_to_its_end(scheduler, seed, async_factor):
    """Groups end in any order; batches are taken and published as the rule allows. `check` holds inside."""
    rng = random.Random(seed)
    c = coordinator(scheduler, async_factor=async_factor, updates=6)
    training = None
    for _ in range(2000):
        if c.version == 6:
            break
        for group in c.admit():
            begin(c, group)
        training = training or c.take_batch()
        if training and c.may_publish and rng.random() < 0.5:
            assert len(training.groups) == 2
            version, training = training.version + 1, None
            discarded = c.published(version)
            assert not discarded or scheduler == "rollflash"
        elif c.open_groups:
            finish(c, rng.choice(c.open_groups))
    assert c.version == 6 and c.counters.consumed == 12


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), async_factor=st.sampled_from([1.0, 1.5, 2.0, 3.0]))
def test_venus_trains_nothing_that_is_too_old_and_discards_nothing(seed, async_factor):
    rng = random.Random(seed)
    c = coordinator("venus", async_factor=async_factor, updates=8)
    while c.version < 8:
        for group in c.admit():
            begin(c, group)
        batch = c.take_batch()
        if batch is None:
            finish(c, rng.choice(c.open_groups))
            continue
        assert max(batch.staleness()) <= c.options.eta
        assert c.published(c.version + 1) == []


def test_slime_takes_groups_in_the_order_of_their_completion_whatever_their_age():
    c = coordinator("slime")
    groups = c.admit()
    assert len(groups) == 4
    for _ in range(3):
        fresh = [g for g in c.open_groups if g is not groups[0]][-2:]
        for group in reversed(fresh):
            finish(c, group)
        batch = c.take_batch()
        assert names(batch.groups) == names(reversed(fresh))
        c.published(c.version + 1)
        for group in c.admit():
            begin(c, group)
    begin(c, groups[0])
    assert groups[0] in c.open_groups  # three versions behind, and nothing waits for it


def test_slime_step_collects_one_batch_while_it_trains_on_the_other_and_publishes_when_both_are_done():
    c = coordinator("slime_step")
    first = c.admit()
    assert len(first) == 2 and c.admit() == []
    for group in first:
        finish(c, group)
    c.take_batch()
    second = c.admit()
    assert len(second) == 2 and not c.may_publish
    for group in second:
        finish(c, group)
    assert c.may_publish and c.admit() == []
    c.published(1)
    assert c.take_batch() is not None


def test_slime_step_on_policy_generates_nothing_while_it_trains():
    c = coordinator("slime_step", async_factor=1.0)
    for group in c.admit():
        finish(c, group)
    c.take_batch()
    assert c.admit() == [] and c.may_publish
    c.published(1)
    assert len(c.admit()) == 2


def test_rollflash_deletes_by_the_age_of_the_episode_finished_or_not():
    c = coordinator("rollflash", async_factor=2.0)
    opened = c.admit()
    assert len(opened) == 8  # 4 environment groups, ratio + 1 episodes each
    for round_ in (0, 1):
        for group in opened[2 * round_ : 2 * round_ + 2]:
            finish(c, group)
        assert names(c.take_batch().groups) == names(opened[2 * round_ : 2 * round_ + 2])
        discarded = c.published(round_ + 1)
        if round_ == 0:
            assert discarded == [] and len(c.admit()) == 4
            finish(c, opened[5])
    assert names(discarded) == ["g4", "g6", "g7", "g5"]  # open ones, then a ready one


def test_rollflash_waits_for_the_oldest_episode_of_an_environment_and_for_the_wave():
    c = coordinator("rollflash", async_factor=1.0)
    opened = c.admit()
    assert len(opened) == 2
    finish(c, opened[1])
    assert c.take_batch() is None
    finish(c, opened[0])
    assert names(c.take_batch().groups) == ["g1", "g0"]
    c = coordinator("rollflash", async_factor=2.0)
    opened = c.admit()
    finish(c, opened[4])  # the second episode of the first environment
    finish(c, opened[1])
    assert c.take_batch() is None
    finish(c, opened[0])
    assert names(c.take_batch().groups) == ["g1", "g0"]
    c.published(1)
    finish(c, opened[5])
    assert c.take_batch() is None  # the wave still owes g2 and g3
    finish(c, opened[2])
    finish(c, opened[3])
    assert names(c.take_batch().groups) == ["g2", "g3"]


def test_areal_admits_by_what_was_ever_accepted_and_trains_in_order_of_opening():
    c = coordinator("areal", async_factor=1.5)
    opened = c.admit()
    assert len(opened) == 3
    for group in reversed(opened):
        finish(c, group)
    assert names(c.take_batch().groups) == ["g0", "g1"]
    assert c.admit() == []  # taking a batch frees nothing; a new version does
    c.published(1)
    assert len(c.admit()) == 2


def test_a_batch_larger_than_the_tasks_is_refused():
    with pytest.raises(ConfigError, match=r"batch_groups=9 is larger than env.train_tasks=8"):
        check_dataset(9, 8)
    check_dataset(8, 8)

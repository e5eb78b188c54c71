"""Whole runs without an engine: every policy with its rule, random events, and the run reaches its steps.

Trajectories are lost and refilled, groups fail and are discarded, workers come and go, evaluations run beside training.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling.lives import Lives
from venusrl.coordinator.coordinator import Coordinator, CoordinatorOptions
from venusrl.coordinator.prompts import PromptStream
from venusrl.coordinator.rules import RULES, make_rule
from venusrl.core.errors import ConfigError
from venusrl.core.group import Group
from venusrl.core.trajectory import Trajectory
from venusrl.scheduling import POLICIES, SchedulerOptions, make_policy
from venusrl.scheduling.protocol import BatchTaken, GroupClosed, GroupOpened, TrajectoryDone, VersionPublished

STEPS = 4
PAIRS = [(name, name) for name in POLICIES] + [("slime", "discarding"), ("venus", "discarding"), ("venus", "rollflash")]


class Run(Lives):
    """Lives whose groups are a coordinator's; what ends is reported to it, and its batches are trained on."""

    def __init__(self, policy: str, rule: str, seed: int, factor: float, batch: int, refills: int, size: int):
        options = CoordinatorOptions(size, batch, factor, refills, STEPS, seed)
        super().__init__(make_policy(policy, SchedulerOptions(batch, options.eta)), seed, batch)
        self.rule = rule
        self.coordinator = self.make(options)
        self.live: dict[str, Trajectory] = {}
        self.training = None
        self.losses = 0

    def make(self, options: CoordinatorOptions) -> Coordinator:
        return Coordinator(PromptStream(64, 0), options, make_rule(self.rule))

    def open(self) -> None:
        """Whatever may be opened now, and the batch where there is one."""
        c = self.coordinator
        if c.version >= STEPS:
            return
        for group in c.admit():
            self.unfinished[group.id] = set()
            self.tell(GroupOpened(self.now, group.id, len(group.trajectories), group.opened_version))
            for trajectory in group.trajectories:
                self.begin(trajectory)
        if self.training is None:
            self.training = c.take_batch()
            if self.training is not None:
                self.ready_groups -= len(self.training.groups)
                self.tell(BatchTaken(self.now, len(self.training.groups)))
        elif c.may_publish and self.rng.random() < 0.5:
            self.version = self.training.version + 1
            self.training = None
            discarded = c.published(self.version)
            for group in discarded:
                self.discard(group)
            self.tell(VersionPublished(self.now, self.version))

    def begin(self, trajectory: Trajectory) -> None:
        trajectory.append_observation([1])
        self.live[trajectory.id] = trajectory
        self.start_one(trajectory.id)

    def discard(self, group: Group) -> None:
        if group.ready:
            self.ready_groups -= 1
        self.tell(GroupClosed(self.now, group.id, False))
        for name in sorted(self.unfinished.pop(group.id, ())):
            self.drop_action(name)
            del self.context[name], self.live[name]
            self.tell(TrajectoryDone(self.now, name, group.id, True))

    def ended(self, name: str, group: str, lost: bool) -> None:
        if group in self.evaluations:
            del self.unfinished[group]
            self.close(group, not lost)
            return
        trajectory = self.live.pop(name)
        found = self.coordinator.group(group)
        if not lost:
            if trajectory.start_version is None:
                trajectory.append_generated([1], [-1.0], self.start.get(name, self.version))
            trajectory.complete(1.0)
            if self.coordinator.trajectory_done(trajectory) is not None:
                del self.unfinished[group]
                self.close(group, True)
            return
        self.losses += 1
        fresh = self.coordinator.trajectory_lost(trajectory, "lost")
        if fresh is not None:
            self.begin(fresh)
        else:
            self.discard(found)

    def refill(self) -> None:
        self.cancel(self.rng.choice(sorted(self.context)))

    def fail(self) -> None:
        """All that is left of a group's refills at once."""
        groups = sorted(set(self.unfinished) - self.evaluations)
        if not groups:
            return
        group = self.rng.choice(groups)
        while self.unfinished.get(group):
            self.cancel(min(self.unfinished[group]))

    def step(self) -> None:
        if self.rng.random() < 0.2:
            self.open()
        super().step()


def finish(run: Run) -> None:
    """Nothing more is lost from here; the run reaches its end, or it hangs."""
    run.rude = False
    for _ in range(20_000):
        if run.coordinator.version >= STEPS:
            return
        if not run.slots:
            run.up()
        run.open()
        run.step()
        run.now += 10.0
        while run.wakes and min(run.wakes) <= run.now:
            run.wakes.remove(min(run.wakes))
            run.decide()
    c = run.coordinator
    raise AssertionError(
        f"version {c.version}: {len(c.open_groups)} open, {len(c.ready_groups)} ready, {c.counters}, "
        f"{len(run.waiting)} wait, {len(run.running)} run, {len(run.in_tool)} in tools"
    )


@pytest.mark.parametrize("policy, rule", PAIRS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    factor=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    batch=st.integers(1, 3),
    refills=st.integers(0, 1),
    size=st.integers(1, 2),
)
def test_a_run_reaches_its_steps_whatever_is_lost_on_the_way(policy, rule, seed, factor, batch, refills, size):
    run = Run(policy, rule, seed, factor, batch, refills, size)
    for _ in range(150):
        run.step()
    finish(run)
    c = run.coordinator
    assert c.counters.consumed == STEPS * batch
    run.coordinator.check()


@pytest.mark.parametrize("rule", sorted(RULES))
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    factor=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    batch=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_failed_groups_and_restarts_stop_no_rule(rule, seed, factor, batch, share):
    """A share of the groups fails; a batch is given back now and then; the state is saved and loaded now and then."""
    rng = random.Random(seed)
    options = CoordinatorOptions(1, batch, factor, 0, 6, 0)

    def make() -> Coordinator:
        return Coordinator(PromptStream(64, 0), options, make_rule(rule))

    c, training, failed = make(), None, 0
    for _ in range(3000):
        if c.version == 6:
            break
        c.admit()
        if training is None and rng.random() < 0.1:
            state = c.state_dict()
            c = make()
            c.load_state_dict(state)
            c.restart_unfinished()
        training = training or c.take_batch()
        if training and rng.random() < 0.1:
            c.give_back(training)
            training = None
        elif training and c.may_publish and rng.random() < 0.5:
            version, training = training.version + 1, None
            c.published(version)
        elif c.open_groups:
            trajectory = rng.choice(c.open_groups).trajectories[0]
            if rng.random() < share and failed < 30:
                failed += 1
                assert c.trajectory_lost(trajectory, "sandbox") is None
            else:
                trajectory.append_observation([1])
                trajectory.append_generated([1], [-1.0], c.version)
                trajectory.complete(1.0)
                c.trajectory_done(trajectory)
    assert c.version == 6, f"{c.counters}: open {len(c.open_groups)}, ready {len(c.ready_groups)}"
    assert c.counters.consumed == 6 * batch and c.counters.failed == failed


def test_rollflash_makes_up_for_a_failed_episode_in_its_own_environment():
    c = Coordinator(PromptStream(64, 0), CoordinatorOptions(1, 2, 1.0, 0, 10), make_rule("rollflash"))
    first, second = c.admit()
    assert c.trajectory_lost(second.trajectories[0], "sandbox") is None
    (instead,) = c.admit()
    for group in (first, instead):
        t = group.trajectories[0]
        t.append_observation([1])
        t.append_generated([1], [-1.0], 0)
        t.complete(1.0)
        c.trajectory_done(t)
    assert {g.id for g in c.take_batch().groups} == {first.id, instead.id}


def test_every_policy_has_a_rule_and_a_name_that_is_none_is_refused_with_the_nearest():
    assert set(POLICIES) <= set(RULES)
    with pytest.raises(ConfigError, match=r"scheduler.name='slyme' is unknown; one of venus, .*did you mean 'slime'\?"):
        make_rule("slyme")

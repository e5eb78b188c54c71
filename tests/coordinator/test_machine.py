"""Random lives of a coordinator: any order of events keeps the counts, the bound and the staleness."""

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from venusrl.coordinator.coordinator import Coordinator, CoordinatorOptions
from venusrl.coordinator.prompts import PromptStream
from venusrl.core.trajectory import Status


class Life(RuleBasedStateMachine):
    TASKS = 5

    @initialize(
        factor=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
        size=st.integers(1, 3),
        groups=st.integers(1, 3),
        refills=st.integers(0, 2),
        batches=st.one_of(st.none(), st.integers(1, 4)),
        seed=st.integers(0, 3),
    )
    def begin(self, factor, size, groups, refills, batches, seed):
        self.options = CoordinatorOptions(size, groups, factor, refills, batches, seed)
        self.coordinator = self.make()
        self.batch = None
        self.ended: dict[str, str] = {}  # group -> "trained" or "failed"
        self.prompts: dict[str, tuple[int, int]] = {}

    def make(self) -> Coordinator:
        return Coordinator(PromptStream(self.TASKS, self.options.seed), self.options)

    def live(self):
        return [t for g in self.coordinator.open_groups for t in g.trajectories if not t.finished]

    def pick(self, data):
        return data.draw(st.sampled_from(self.live()))

    @rule()
    def admit(self):
        for group in self.coordinator.admit():
            assert group.id not in self.prompts
            self.prompts[group.id] = (group.epoch, group.prompt_id)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def generate(self, data):
        self.pick(data).append_generated([1], [-1.0], self.coordinator.version)

    @precondition(lambda self: self.live())
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def done(self, data, reward):
        trajectory = self.pick(data)
        if not trajectory.turns:
            trajectory.append_generated([1], [-1.0], self.coordinator.version)
        trajectory.complete(reward)
        group = self.coordinator.trajectory_done(trajectory)
        if group is not None:
            assert all(t.status == Status.DONE for t in group.trajectories)
            assert len(group.trajectories) == self.options.group_size
            assert self.coordinator.ready_groups[-1] is group

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def lost(self, data):
        trajectory = self.pick(data)
        group = self.coordinator.group(trajectory.group_id)
        others = [t for t in group.trajectories if t is not trajectory]
        fresh = self.coordinator.trajectory_lost(trajectory, "node lost")
        assert trajectory.reward is None
        if fresh is None:
            assert group.refills == self.options.max_refills
            self.ended[group.id] = "failed"
            failure = self.coordinator.failures[-1]
            assert (failure["group"], len(failure["reasons"])) == (group.id, self.options.max_refills + 1)
        else:
            assert [t for t in group.trajectories if t is not fresh] == others

    @precondition(lambda self: self.batch is None)
    @rule()
    def take(self):
        self.batch = self.coordinator.take_batch()
        if self.batch is not None:
            assert len(self.batch.groups) == self.options.batch_groups
            staleness = self.batch.staleness()
            assert min(staleness) >= 0 and max(staleness) <= self.options.eta
            if self.options.async_factor == 1.0:
                assert set(staleness) == {0}

    @precondition(lambda self: self.batch is not None)
    @rule()
    def published(self):
        for group in self.batch.groups:
            assert group.id not in self.ended
            self.ended[group.id] = "trained"
        self.coordinator.published(self.batch.version + 1)
        self.batch = None

    @precondition(lambda self: self.batch is not None)
    @rule()
    def give_back(self):
        self.coordinator.give_back(self.batch)
        self.batch = None

    @precondition(lambda self: self.batch is None)
    @rule(killed=st.booleans())
    def save_and_load(self, killed):
        state = json.loads(json.dumps(self.coordinator.state_dict()))
        self.coordinator = self.make()
        self.coordinator.load_state_dict(state)
        assert self.coordinator.state_dict() == state
        if killed:
            kept = [t.id for g in self.coordinator.open_groups for t in g.trajectories if t.status == Status.DONE]
            fresh = self.coordinator.restart_unfinished()
            assert {id(t) for t in fresh} == {id(t) for t in self.live()}
            assert all(not t.tokens for t in fresh)
            now = [t.id for g in self.coordinator.open_groups for t in g.trajectories if t.status == Status.DONE]
            assert now == kept

    @invariant()
    def counts_add_up(self):
        if not hasattr(self, "coordinator"):
            return
        c, k = self.coordinator, self.coordinator.counters
        in_training = 0 if self.batch is None else len(self.batch.groups)
        assert k.submitted == len(c.open_groups) + len(c.ready_groups) + k.consumed + k.failed
        assert len(c.open_groups) + len(c.ready_groups) + in_training <= self.options.async_factor * (
            self.options.batch_groups
        )
        ends = list(self.ended.values())
        assert (k.consumed - in_training, k.failed) == (ends.count("trained"), ends.count("failed"))
        if self.options.updates is not None:
            assert k.submitted - k.failed <= self.options.updates * self.options.batch_groups
        here = {g.id for g in [*c.open_groups, *c.ready_groups]} | {g.id for g in (self.batch or NONE).groups}
        assert here | set(self.ended) == set(self.prompts) and not here & set(self.ended)

    @invariant()
    def every_task_once_an_epoch(self):
        if hasattr(self, "prompts"):
            drawn = list(self.prompts.values())
            assert len(set(drawn)) == len(drawn)
            assert [epoch for epoch, _ in drawn] == [i // self.TASKS for i in range(len(drawn))]

    def teardown(self):
        """Whatever happened, the run can go on: without further losses it reaches its end."""
        if not hasattr(self, "coordinator"):
            return
        c = self.coordinator
        if self.batch is not None:
            c.give_back(self.batch)
        target = c.counters.consumed + 2 * self.options.batch_groups
        if self.options.updates is not None:
            target = self.options.updates * self.options.batch_groups
        while c.counters.consumed < target:
            c.admit()
            batch = c.take_batch()
            if batch is not None:
                assert max(batch.staleness()) <= self.options.eta
                c.published(batch.version + 1)
                continue
            trajectory = self.live()[0]  # IndexError: nothing runs and no batch may be taken
            if not trajectory.turns:
                trajectory.append_generated([1], [-1.0], c.version)
            trajectory.complete(0.0)
            c.trajectory_done(trajectory)


class NONE:
    groups = ()


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestLife = Life.TestCase

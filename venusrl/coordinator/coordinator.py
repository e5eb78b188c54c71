"""The coordinator: which groups are open, which are ready, what is in training. When to open and take: see rules.py.

Invariant, checked at every transition: submitted = open + ready + consumed + failed + discarded.
"""

import dataclasses
import math
from typing import Any

from venusrl.coordinator.prompts import PromptStream
from venusrl.coordinator.rules import Bounded, Rule
from venusrl.core.errors import ConfigError, ContractError
from venusrl.core.group import Batch, Group
from venusrl.core.trajectory import Status, Trajectory, sampling_seed


@dataclasses.dataclass(frozen=True)
class CoordinatorOptions:
    """Attributes:
    group_size: n, trajectories of a prompt.
    batch_groups: B, groups of an optimizer step.
    async_factor: bound on groups in the system, in batches; 1.0 is strictly on-policy.
    max_refills: lost trajectories that a group may replace before it fails.
    updates: batches to make in all; None is without end. Groups that fail are made up for.
    seed: of the trajectories' sampling.
    """

    group_size: int = 8
    batch_groups: int = 8
    async_factor: float = 1.0
    max_refills: int = 8
    updates: int | None = None
    seed: int = 0

    def __post_init__(self):
        if self.group_size < 1 or self.batch_groups < 1:
            raise ConfigError(
                f"group_size={self.group_size}, batch_groups={self.batch_groups}; both must be at least 1"
            )
        if not 1.0 <= self.async_factor < math.inf:  # false of nan, too
            raise ConfigError(
                f"async_factor={self.async_factor} is below 1.0, which is strictly on-policy, or no number; use 1.0 or "
                "more"
            )
        if self.max_refills < 0:
            raise ConfigError(f"max_refills={self.max_refills} is negative; use 0 to fail a group at once")

    @property
    def eta(self) -> int:
        """Versions by which a trained trajectory may be behind."""
        return math.ceil(self.async_factor) - 1


@dataclasses.dataclass
class Counters:
    """Groups and refilled trajectories, counted over the whole run."""

    submitted: int = 0
    consumed: int = 0
    failed: int = 0
    discarded: int = 0
    refilled_trajectories: int = 0


class Coordinator:
    """See the module. Its caller starts trajectories, reports their ends, and trains on batches."""

    def __init__(self, prompts: PromptStream, options: CoordinatorOptions, rule: Rule | None = None):
        self._prompts = prompts
        self._rule = rule or Bounded()
        self.options = options
        self.version = 0
        self.counters = Counters()
        self.failures: list[dict[str, Any]] = []
        self._open: dict[str, Group] = {}
        self._ready: dict[str, Group] = {}
        self._in_training: int = 0

    @property
    def open_groups(self) -> list[Group]:
        return list(self._open.values())

    @property
    def ready_groups(self) -> list[Group]:
        return list(self._ready.values())

    @property
    def in_training(self) -> int:
        """Groups of the batch in training."""
        return self._in_training

    def admit(self) -> list[Group]:
        """Opens as many new groups as the rule allows; their trajectories are to be started."""
        opened = []
        while self._rule.may_open(self):
            epoch, prompt_id = self._prompts.next()
            number = self.counters.submitted
            group = Group(id=f"g{number}", prompt_id=prompt_id, epoch=epoch, opened_version=self.version)
            group.trajectories = [self._trajectory(group, i) for i in range(self.options.group_size)]
            self._open[group.id] = group
            self.counters.submitted += 1
            opened.append(group)
        self.check()
        return opened

    def trajectory_done(self, trajectory: Trajectory) -> Group | None:
        """Reports a trajectory that has its reward; returns its group where that made it ready."""
        group = self._group_of(trajectory)
        if trajectory.status != Status.DONE:
            raise ContractError(f"trajectory {trajectory.id} is {trajectory.status}, not done; complete() it first")
        if not group.ready:
            return None
        self._ready[group.id] = self._open.pop(group.id)
        self.check()
        return group

    def trajectory_lost(self, trajectory: Trajectory, reason: str) -> Trajectory | None:
        """Reports a trajectory that cannot be finished.

        Returns:
          the trajectory to start in its place, or None: the group has failed, and its others are to be cancelled.
        """
        group = self._group_of(trajectory)
        trajectory.status = Status.LOST
        group.reasons.append(f"{trajectory.id}: {reason}")
        if group.refills >= self.options.max_refills:
            del self._open[group.id]
            self.counters.failed += 1
            self.failures.append({"group": group.id, "prompt_id": group.prompt_id, "reasons": list(group.reasons)})
            self.check()
            return None
        group.refills += 1
        self.counters.refilled_trajectories += 1
        fresh = self._trajectory(group, trajectory.index, group.refills)
        group.trajectories[trajectory.index] = fresh
        return fresh

    def take_batch(self) -> Batch | None:
        """The next batch where there is one.

        None while fewer than B groups are ready, while another batch is in training, or while the rule waits.
        """
        if self._in_training or len(self._ready) < self.options.batch_groups:
            return None
        chosen = self._rule.choose(self)
        if chosen is None:
            return None
        for group in chosen:
            del self._ready[group.id]
        self.counters.consumed += len(chosen)
        self._in_training = len(chosen)
        self.check()
        return Batch(tuple(chosen), self.version)

    @property
    def may_publish(self) -> bool:
        """Whether the weights of the batch in training may be given to the workers, or more ends must come first."""
        return self._rule.may_publish(self)

    def published(self, version: int) -> list[Group]:
        """Reports that the batch was trained on and workers generate with `version` now.

        Returns:
          groups that the rule discards for their age; what still runs of them is to be stopped. VenusRL's has none.
        """
        if version <= self.version:
            raise ContractError(f"published version {version} is not newer than {self.version}")
        self.version = version
        self._in_training = 0
        discarded = self._rule.too_old(self)
        for group in discarded:
            (self._open if group.id in self._open else self._ready).pop(group.id)
        self.counters.discarded += len(discarded)
        self.check()
        return discarded

    def give_back(self, batch: Batch) -> None:
        """Undoes `take_batch` for an update that was given up."""
        for group in batch.groups:
            self._ready[group.id] = group
        self.counters.consumed -= len(batch.groups)
        self._in_training = 0
        self.check()

    def check(self) -> None:
        """Verifies the invariant.

        Raises:
          ContractError: the counts do not add up; a bug in this file.
        """
        c = self.counters
        parts = len(self._open) + len(self._ready) + c.consumed + c.failed + c.discarded
        if c.submitted != parts:
            raise ContractError(
                f"groups do not add up: submitted {c.submitted} != open {len(self._open)} + ready {len(self._ready)} "
                f"+ consumed {c.consumed} + failed {c.failed} + discarded {c.discarded}"
            )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, partial trajectories included. To be taken between `published` and `take_batch`."""
        if self._in_training:
            raise ContractError("state_dict() while a batch is in training would lose it; take it after published()")
        return {
            "cursor": self._prompts.cursor,
            "version": self.version,
            "counters": dataclasses.asdict(self.counters),
            "failures": list(self.failures),
            "open": [group.state_dict() for group in self._open.values()],
            "ready": [group.state_dict() for group in self._ready.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state. Open groups keep what is done; `restart_unfinished` readies the rest."""
        self._prompts.cursor = state["cursor"]
        self.version = state["version"]
        self.counters = Counters(**state["counters"])
        self.failures = list(state["failures"])
        self._open = {g["id"]: Group.from_state_dict(g) for g in state["open"]}
        self._ready = {g["id"]: Group.from_state_dict(g) for g in state["ready"]}
        # Trajectories whose end was not yet reported when the state was taken: nobody would report it again.
        for group in [g for g in self._open.values() if g.ready]:
            self._ready[group.id] = self._open.pop(group.id)
        self._in_training = 0
        self.check()

    def restart_unfinished(self) -> list[Trajectory]:
        """Replaces unfinished trajectories by fresh ones, for a driver whose sandboxes are gone; not a refill.

        Returns:
          the trajectories to start.
        """
        fresh = []
        for group in self._open.values():
            for i, trajectory in enumerate(group.trajectories):
                if trajectory.status != Status.DONE:
                    group.trajectories[i] = self._trajectory(group, i, group.refills)
                    fresh.append(group.trajectories[i])
        return fresh

    def group(self, group_id: str) -> Group | None:
        """The open group of that id; None where it is no longer open."""
        return self._open.get(group_id)

    def _trajectory(self, group: Group, index: int, refill: int = 0) -> Trajectory:
        name = f"{group.id}/{index}" + (f"r{refill}" if refill else "")
        seed = sampling_seed(self.options.seed, group.number, index, refill)
        return Trajectory(id=name, group_id=group.id, index=index, seed=seed)

    def _group_of(self, trajectory: Trajectory) -> Group:
        group = self._open.get(trajectory.group_id)
        if group is None or group.trajectories[trajectory.index] is not trajectory:
            raise ContractError(
                f"trajectory {trajectory.id} is not in an open group; it was replaced or its group ended"
            )
        return group

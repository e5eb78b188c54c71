"""A group: n trajectories of one prompt, the unit of GRPO. A batch: the B groups of one optimizer step."""

import dataclasses
from typing import Any

from venusrl.core.trajectory import Status, Trajectory


@dataclasses.dataclass
class Group:
    """n trajectories of one prompt; ready when all are done.

    Attributes:
      id: unique in a run: "g" and its number in the order of opening.
      prompt_id: index of the task in the prompt stream's task list.
      epoch: pass over the task list.
      opened_version: the policy version when it was opened.
      trajectories: n of them; a refill replaces one in place.
      refills: number of trajectories that were refilled so far.
      reasons: why each of those was lost.
    """

    id: str
    prompt_id: int
    epoch: int
    opened_version: int
    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
    refills: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)

    @property
    def number(self) -> int:
        """Its place in the order of opening."""
        return int(self.id[1:])

    @property
    def ready(self) -> bool:
        return bool(self.trajectories) and all(t.status == Status.DONE for t in self.trajectories)

    @property
    def oldest_version(self) -> int:
        """The oldest start version of its trajectories; `opened_version` where none has started."""
        started = [t.start_version for t in self.trajectories if t.start_version is not None]
        return min(started, default=self.opened_version)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the done trajectories, in index order."""
        return [t.reward for t in self.trajectories if t.reward is not None]

    def state_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "prompt_id": self.prompt_id,
            "epoch": self.epoch,
            "opened_version": self.opened_version,
            "refills": self.refills,
            "reasons": list(self.reasons),
            "trajectories": [t.state_dict() for t in self.trajectories],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Group":
        return cls(**{**state, "trajectories": [Trajectory.from_state_dict(t) for t in state["trajectories"]]})


@dataclasses.dataclass(frozen=True)
class Batch:
    """The groups of one optimizer step.

    Attributes:
      groups: B ready groups.
      version: the policy version at the time the batch was taken; its staleness counts from here.
    """

    groups: tuple[Group, ...]
    version: int

    @property
    def trajectories(self) -> list[Trajectory]:
        return [t for group in self.groups for t in group.trajectories]

    def staleness(self) -> list[int]:
        """Versions behind `version` at which each trajectory was started."""
        return [self.version - (t.start_version or 0) for t in self.trajectories]

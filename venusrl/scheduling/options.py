"""What a scheduling policy is told of the run, and its switches."""

import dataclasses

from venusrl.core.errors import ConfigError
from venusrl.core.names import check_name

PREDICTIONS = ("none", "predictor")
THUNDERAGENT_MODES = ("as_shipped", "as_documented", "tuned")


@dataclasses.dataclass(frozen=True)
class SchedulerOptions:
    """Attributes:
    batch_groups: B, groups that the trainer waits for.
    eta: versions by which a trained trajectory may be behind.
    prediction: "predictor" ranks groups by predicted remaining length, "none" by the order in which they were opened.
      Where no predictor answers (none does in a live run so far), the length is the mean of finished group-mates, then
      of the run; `SchedulerPolicy.length_sources` counts which.
    residency: pages of high-priority trajectories are kept before others.
    demotion: only as many trajectories as a worker's KV holds are kept and run; the others wait.
    migration: waiting actions move to workers with more room, with their KV.
    preemption: a running action gives its slot to one of a higher class.
    thunderagent: "as_shipped", "as_documented" or "tuned"; see thunderagent.py.

    The four switches and `prediction` are `venus`'s; the other policies have none of this.
    """

    batch_groups: int = 8
    eta: int = 0
    prediction: str = "predictor"
    residency: bool = True
    demotion: bool = True
    migration: bool = True
    preemption: bool = True
    thunderagent: str = "as_shipped"

    def __post_init__(self):
        if self.batch_groups < 1 or self.eta < 0:
            raise ConfigError(f"batch_groups={self.batch_groups}, eta={self.eta}; at least 1 and at least 0")
        check_name("scheduler.prediction", self.prediction, PREDICTIONS)
        check_name("scheduler.thunderagent", self.thunderagent, THUNDERAGENT_MODES)

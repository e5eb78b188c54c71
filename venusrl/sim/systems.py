"""The systems that are compared: a policy, the coordinator's rule that goes with it, and what a weight update does."""

import dataclasses
import enum

from venusrl.coordinator.rules import RULES
from venusrl.core.names import check_name
from venusrl.scheduling import POLICIES, SchedulerOptions


class Interrupt(enum.StrEnum):
    """What happens to requests on a worker when weights change. KV is dropped in every case: it is of old weights."""

    CONTINUE = "continue"  # they go on from the tokens they have
    RETRY_TURN = "retry turn"  # the turn is generated again from its beginning
    RESTART = "restart"  # the trajectory starts again in a new sandbox


@dataclasses.dataclass(frozen=True)
class System:
    """Attributes:
    scheduler: name of the policy.
    rule: name of the coordinator's rule; empty for the one that goes with the policy.
    interrupt: see Interrupt.
    releases: KV of a trajectory that has ended is given back; otherwise it stays until it is evicted as the least
      recently used, as in an engine that is told nothing of trajectories.
    cancels: what runs of a discarded group is stopped; otherwise it runs to its end, and is wasted.
    environments: trajectories alive at once, in multiples of async_factor * B * n; 0 is no limit.
    host: tokens of KV in host memory behind each worker's own, in multiples of those.
    switches: fields of SchedulerOptions that differ from their defaults.
    """

    scheduler: str
    rule: str = ""
    interrupt: Interrupt = Interrupt.CONTINUE
    releases: bool = False
    cancels: bool = True
    environments: float = 0.0
    host: float = 0.0
    switches: tuple[tuple[str, object], ...] = ()

    def __post_init__(self):
        check_name("scheduler", self.scheduler, POLICIES)
        if self.rule:
            check_name("rule", self.rule, RULES)
        known = {field.name for field in dataclasses.fields(SchedulerOptions)} - {"batch_groups", "eta"}
        for name, _ in self.switches:
            check_name("switch", name, sorted(known))


# VenusRL's order of actions on an engine that knows nothing of trajectories and evicts what was used least recently.
_PLAIN_CACHE = (("residency", False), ("demotion", False))

SYSTEMS: dict[str, System] = {
    "venus": System("venus", releases=True),
    "venus_lru": System("venus", switches=_PLAIN_CACHE),
    # HiCache's host pool is twice the device's unless it is told otherwise (SGLang, --hicache-ratio).
    "venus_two_tier": System("venus", host=2.0, switches=_PLAIN_CACHE),
    "venus_host": System("venus", releases=True, host=2.0),
    # slime's abort-all makes an agent's call fail, and its agent examples build a new session then. `slime_resume` is
    # kinder than the code: the trajectory goes on. Neither bounds the age of what is trained on; `_bounded` does, as
    # VenusRL does, by discarding.
    "slime": System("slime", interrupt=Interrupt.RESTART),
    "slime_resume": System("slime"),
    "slime_bounded": System("slime", "discarding"),
    "slime_step": System("slime_step"),  # nothing runs while weights change
    "rollflash": System("rollflash", interrupt=Interrupt.RETRY_TURN, cancels=False, environments=1.0),
    # A router needs a host; this one lets requests go on over a weight update, as SkyRL's does.
    "thunderagent": System("thunderagent"),
    "thunderagent_documented": System("thunderagent", switches=(("thunderagent", "as_documented"),)),
    "thunderagent_tuned": System("thunderagent", switches=(("thunderagent", "tuned"),)),
    "thunderagent_bounded": System("thunderagent", "discarding"),
    "areal": System("areal"),
    "fcfs_trajectory": System("fcfs_trajectory", releases=True),
    "fcfs_action": System("fcfs_action", releases=True),
    "fcfs_priority": System("fcfs_priority", releases=True),
}


def system(name: str) -> System:
    """Raises:
    ConfigError: no such system.
    """
    check_name("system", name, SYSTEMS)
    return SYSTEMS[name]

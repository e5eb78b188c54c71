"""Pure scheduling policies: events in, decisions out. No clock, no I/O, no randomness of their own."""

from venusrl.core.errors import ConfigError
from venusrl.scheduling.fcfs import FcfsAction
from venusrl.scheduling.protocol import SchedulerPolicy

POLICIES: dict[str, type[SchedulerPolicy]] = {"fcfs_action": FcfsAction}


def make_policy(name: str) -> SchedulerPolicy:
    """The policy that `config.scheduler.name` selects.

    Raises:
      ConfigError: no such policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"scheduler.name={name!r} is unknown; one of {', '.join(POLICIES)}")
    return POLICIES[name]()

"""Pure scheduling policies: events in, decisions out. No clock, no I/O, no randomness of their own."""

import dataclasses
from collections.abc import Callable

from venusrl.core.errors import ConfigError
from venusrl.core.names import check_name
from venusrl.scheduling.fcfs import FcfsAction
from venusrl.scheduling.options import SchedulerOptions
from venusrl.scheduling.protocol import SchedulerPolicy
from venusrl.scheduling.sticky import Sticky
from venusrl.scheduling.thunderagent import ThunderAgent
from venusrl.scheduling.venus import Venus

__all__ = ["POLICIES", "SchedulerOptions", "SchedulerPolicy", "make_policy"]


def _fcfs_priority(options: SchedulerOptions) -> SchedulerPolicy:
    """The groups of the next batch first, in order of opening: priority without any of what makes it clever."""
    plain = {"prediction": "none", "residency": False, "demotion": False, "migration": False}
    return Venus(dataclasses.replace(options, **plain))


POLICIES: dict[str, Callable[[SchedulerOptions], SchedulerPolicy]] = {
    "venus": Venus,
    "fcfs_action": lambda _: FcfsAction(),
    "fcfs_trajectory": lambda _: Sticky(route="fewest", hold=True),
    "fcfs_priority": _fcfs_priority,
    "slime": lambda _: Sticky(route="hash", hold=True),
    "slime_step": lambda _: Sticky(route="hash", hold=True),
    "rollflash": lambda _: Sticky(route="fewest", hold=False),
    "thunderagent": lambda options: ThunderAgent(options.thunderagent),
    "areal": lambda _: Sticky(route="fewest", hold=False),
}


# Fields of SchedulerOptions that each policy looks at.
_SWITCHES: dict[str, tuple[str, ...]] = {
    "venus": ("prediction", "residency", "demotion", "migration", "preemption"),
    "fcfs_priority": ("preemption",),
    "thunderagent": ("thunderagent",),
}


def make_policy(name: str, options: SchedulerOptions = SchedulerOptions()) -> SchedulerPolicy:
    """The policy that `config.scheduler.name` selects.

    Raises:
      ConfigError: no such policy, or a switch that it does not have.
    """
    check_name("scheduler.name", name, POLICIES)
    for field in dataclasses.fields(SchedulerOptions):
        value = getattr(options, field.name)
        if field.name in ("batch_groups", "eta") or field.name in _SWITCHES.get(name, ()):
            continue
        if value != field.default:
            raise ConfigError(
                f"scheduler.{field.name}={value!r} does nothing under scheduler.name={name!r}; "
                f"leave it at {field.default!r}"
            )
    return POLICIES[name](options)

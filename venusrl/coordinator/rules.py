"""When groups are opened, which batch is taken, and what is thrown away: VenusRL's rule, and those of other systems.

Each rule but the first behaves as the published code of the system it is named after; where that code has no setting
like `async_factor`, the rule bounds the same quantity that the code bounds by what `async_factor` asks for.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from venusrl.core.errors import ConfigError
from venusrl.core.group import Group
from venusrl.core.names import check_name

if TYPE_CHECKING:
    from venusrl.coordinator.coordinator import Coordinator


class Rule(Protocol):
    """Asked by the coordinator; sees it, changes nothing in it."""

    def may_open(self, c: "Coordinator") -> bool:
        """Whether one more group may be opened."""
        ...

    def choose(self, c: "Coordinator") -> list[Group] | None:
        """The B ready groups to train on now; None to wait. The trainer is free, and B groups are ready."""
        ...

    def may_publish(self, c: "Coordinator") -> bool:
        """Whether the weights of the batch in training may be given to the workers now."""
        ...

    def too_old(self, c: "Coordinator") -> list[Group]:
        """Groups, open or ready, that are thrown away at the present version."""
        ...


def _room(c: "Coordinator") -> bool:
    """Whether the run has a use for one more group."""
    in_system = len(c.open_groups) + len(c.ready_groups) + c.in_training
    return c.options.updates is None or in_system < (c.options.updates - c.version) * c.options.batch_groups


class Bounded:
    """VenusRL's. Two inequalities.

    - admission: open + ready + in training <= async_factor * B. With 1.0 nothing is generated while the trainer is at
      work, so every trajectory is trained on by the version that generated it.
    - staleness: a trajectory started at version v may train while current <= v + eta, eta = ceil(async_factor) - 1. A
      batch is held back while it would leave more groups due than the batches after it can take, so nothing is
      discarded for age.
    """

    def may_open(self, c: "Coordinator") -> bool:
        in_system = len(c.open_groups) + len(c.ready_groups) + c.in_training
        return _room(c) and in_system + 1 <= c.options.async_factor * c.options.batch_groups

    def choose(self, c: "Coordinator") -> list[Group] | None:
        if self._must_wait(c):
            return None
        return sorted(c.ready_groups, key=lambda g: g.oldest_version)[: c.options.batch_groups]

    def may_publish(self, c: "Coordinator") -> bool:
        del c
        return True

    def too_old(self, c: "Coordinator") -> list[Group]:
        del c
        return []

    def _must_wait(self, c: "Coordinator") -> bool:
        """Whether a batch now would leave more open groups due within k versions than the k batches after it can take.

        Ready groups need no look: a batch leaves one that is due only where all that it takes are due too.
        """
        unfinished = [group.oldest_version for group in c.open_groups]
        first_due = c.version - c.options.eta
        return any(
            sum(version <= first_due + k for version in unfinished) > k * c.options.batch_groups
            for k in range(c.options.eta + 1)
        )


class Slime(Bounded):
    """slime's fully asynchronous rollout: completed groups first in, first out; no bound on age, nothing discarded.

    Its bound on groups that are open or queued is ceil(async_factor * B) here; at 1.0, to be strictly on-policy, the
    batch in training counts too.
    """

    def may_open(self, c: "Coordinator") -> bool:
        bound = math.ceil(c.options.async_factor * c.options.batch_groups)
        training = c.in_training if c.options.async_factor == 1.0 else 0
        return _room(c) and len(c.open_groups) + len(c.ready_groups) + training + 1 <= bound

    def choose(self, c: "Coordinator") -> list[Group] | None:
        return c.ready_groups[: c.options.batch_groups]


class Discarding(Slime):
    """Slime, or whatever it hosts, held to VenusRL's bound on age in the usual way: what is older is thrown away.

    A group is dropped, open or ready, once its oldest trajectory is more than eta versions behind.
    """

    def too_old(self, c: "Coordinator") -> list[Group]:
        return [g for g in [*c.open_groups, *c.ready_groups] if g.oldest_version < c.version - c.options.eta]


class SlimeStep(Slime):
    """slime's train.py (async_factor 1.0) and train_async.py (above): B groups at once, and all of them are waited for.

    Above 1.0 the next B are generated while the trainer is at work; weights are published once those are complete.
    """

    def may_open(self, c: "Coordinator") -> bool:
        k = c.counters
        collected = k.consumed if c.options.async_factor > 1 else k.consumed - c.in_training
        return _room(c) and k.submitted - k.failed - collected < c.options.batch_groups

    def may_publish(self, c: "Coordinator") -> bool:
        return not c.open_groups


class RollFlash(Bounded):
    """ROLL Flash's agentic rollout: environment groups in waves, and deletion by age.

    async_factor * B environment groups; each opens ratio + 1 episodes at first and one more at every step, ratio =
    ceil(async_factor) - 1. A wave takes the oldest episode of every environment group, in order of completion, and the
    next begins when it is used up. Episodes opened more than `ratio` steps ago are deleted, finished or not.

    An episode that failed is made up for in its environment group: a wave waits for one of each.
    """

    def __init__(self):
        self._wave: set[int] = set()
        self._collected: dict[str, Group] = {}
        self._places: dict[str, int] = {}  # environment group of each episode that is open or ready
        self._taken: dict[str, int] = {}  # of the batch in training, which may be given back
        self._opened: list[int] = []  # episodes of each environment group so far, failed ones not counted

    def may_open(self, c: "Coordinator") -> bool:
        rounds = 1 + c.options.eta + c.version
        return c.counters.submitted - c.counters.failed < rounds * self.environments(c)

    def environments(self, c: "Coordinator") -> int:
        """Number of environment groups."""
        return int(c.options.async_factor * c.options.batch_groups)

    def choose(self, c: "Coordinator") -> list[Group] | None:
        self._place(c)
        ready = {g.id: g for g in c.ready_groups}
        self._collected = {name: g for name, g in self._collected.items() if name in ready}
        while len(self._collected) < c.options.batch_groups:
            if not self._wave:
                self._wave = set(range(self.environments(c)))
            oldest: dict[int, int] = {}
            for group in [*c.open_groups, *ready.values()]:
                if group.id not in self._collected:
                    place = self._places[group.id]
                    oldest[place] = min(oldest.get(place, group.number), group.number)
            found = next(
                (
                    g
                    for g in ready.values()
                    if self._places[g.id] in self._wave and oldest.get(self._places[g.id]) == g.number
                ),
                None,
            )
            if found is None:
                return None
            self._collected[found.id] = found
            self._wave.discard(self._places[found.id])
        chosen, self._collected = list(self._collected.values()), {}
        self._taken = {g.id: self._places.pop(g.id) for g in chosen}
        return chosen

    def too_old(self, c: "Coordinator") -> list[Group]:
        old = [g for g in [*c.open_groups, *c.ready_groups] if c.version - g.opened_version > c.options.eta]
        self._place(c)
        for group in old:
            del self._places[group.id]
        return old

    def _place(self, c: "Coordinator") -> None:
        """Gives new episodes to the environment groups that had fewest, and forgets those that failed."""
        self._opened = self._opened or [0] * self.environments(c)
        alive = sorted([*c.open_groups, *c.ready_groups], key=lambda g: g.number)
        present = {g.id for g in alive}
        for name in [name for name in self._places if name not in present]:
            self._opened[self._places.pop(name)] -= 1
        for group in alive:
            if group.id in self._places:
                continue
            if group.id in self._taken:  # its batch was given back
                self._places[group.id] = self._taken.pop(group.id)
                continue
            place = min(range(len(self._opened)), key=lambda p: (self._opened[p], p))
            self._places[group.id] = place
            self._opened[place] += 1


class AReaL(Bounded):
    """AReaL's staleness manager: groups ever accepted or running <= (version + async_factor) * B; oldest first.

    What is admitted is never discarded, whatever its age becomes.
    """

    def may_open(self, c: "Coordinator") -> bool:
        k = c.counters
        admitted = k.submitted - k.failed
        return _room(c) and admitted + 1 <= (c.version + c.options.async_factor) * c.options.batch_groups

    def choose(self, c: "Coordinator") -> list[Group] | None:
        return sorted(c.ready_groups, key=lambda g: g.number)[: c.options.batch_groups]


# By name of the policy, or of the rule where a policy goes with several.
RULES: dict[str, Callable[[], Rule]] = {
    "venus": Bounded,
    "fcfs_action": Bounded,
    "fcfs_trajectory": Bounded,
    "fcfs_priority": Bounded,
    "slime": Slime,
    "slime_step": SlimeStep,
    "thunderagent": Slime,  # a router has no rule of its own; slime is one of its hosts
    "discarding": Discarding,
    "rollflash": RollFlash,
    "areal": AReaL,
}


def make_rule(name: str) -> Rule:
    """The rule that goes with a scheduling policy, or that is called so.

    Raises:
      ConfigError: no such rule.
    """
    check_name("scheduler.name", name, RULES)
    return RULES[name]()


def check_dataset(batch_groups: int, num_tasks: int) -> None:
    """Raises:
    ConfigError: a batch would hold the same prompt twice.
    """
    if batch_groups > num_tasks:
        raise ConfigError(
            f"batch_groups={batch_groups} is larger than env.train_tasks={num_tasks}, and a batch would hold a prompt "
            "twice; lower the one or raise the other"
        )

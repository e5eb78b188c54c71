"""Which groups the next batch waits for: critical groups by least predicted time to completion, and due ones."""

import dataclasses
import math

from venusrl.scheduling.cut import PriorityCut

DUE, CRITICAL, REST = 0, 1, 2  # classes of priority; the lower, the sooner
DONE_BATCHES = 8  # times the groups that may be ready at once, whose names are kept
STEPS = 8  # places are told apart in so many steps to a doubling, so that the order does not change at every token


@dataclasses.dataclass(slots=True)
class OpenGroup:
    """Attributes:
    order: its place in the order of opening.
    opened: version at its opening.
    oldest: oldest start version of its trajectories; None before the first.
    unseen: trajectories of which nothing is known yet.
    remaining: predicted remaining tokens, by unfinished trajectory.
    """

    order: int
    opened: int
    unseen: int
    oldest: int | None = None
    remaining: dict[str, float] = dataclasses.field(default_factory=dict)
    klass: int = REST


@dataclasses.dataclass(slots=True)
class _Evaluation:
    """Attributes:
    since: versions that had been published when it was opened.
    remaining: predicted remaining tokens, by unfinished trajectory.
    """

    since: int
    remaining: dict[str, float] = dataclasses.field(default_factory=dict)
    klass: int = REST


def coarse(tokens: float) -> int:
    """A length in steps of 2^(1 / STEPS)."""
    return int(STEPS * math.log2(tokens)) if tokens > 1 else 0


class CriticalGroups:
    """Ranks open groups; tells whose class has changed.

    A group's predicted time is that of its longest trajectory, or of all its trajectories at their share of the slots
    if that is more: max(longest, sum x B / slots), in tokens of one request. This is the order of shortest bottleneck
    first for coflows (Varys, SIGCOMM 2014), with the batch's groups as the flows that are let through. Equal ones go in
    the order in which they were opened.

    With `ranked` False a group's place is its order of opening.
    """

    def __init__(self, batch_groups: int, eta: int, ranked: bool):
        self._batch = batch_groups
        self._eta = eta
        self._ranked = ranked
        self._groups: dict[str, OpenGroup] = {}
        self._cut = PriorityCut(batch_groups)
        self._evaluations: dict[str, _Evaluation] = {}
        self._by_version: dict[int, set[str]] = {}
        self._ready = 0
        self._done: dict[str, None] = {}  # groups that closed as ready, the last ones
        self._opened = self._publications = 0
        self._version = 0
        self._changed: dict[str, None] = {}
        self.slots = 1  # of all workers
        self.typical = 1.0  # tokens that a trajectory of which nothing is known is taken to generate

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def klass(self, group: str) -> int:
        """DUE, CRITICAL or REST; groups that nobody opened (a program's calls) are CRITICAL."""
        found = self._groups.get(group) or self._evaluations.get(group)
        return CRITICAL if found is None else found.klass

    def trajectories(self, group: str) -> list[str]:
        """Its unfinished trajectories, so far as they have been seen."""
        found = self._groups.get(group) or self._evaluations.get(group)
        return [] if found is None else list(found.remaining)

    def changed(self) -> list[str]:
        """Groups whose class changed since the last call; closed ones left out."""
        for group in self._cut.crossed():
            self._classify(group)
        if not self._changed:
            return []
        changed, self._changed = self._changed, {}
        return [group for group in changed if group in self._groups or group in self._evaluations]

    def open(self, group: str, size: int, version: int) -> None:
        found = self._groups[group] = OpenGroup(self._opened, version, size)
        self._opened += 1
        self._version = max(self._version, version)
        self._by_version.setdefault(version, set()).add(group)
        self._place(group, found)

    def evaluate(self, group: str) -> None:
        """A group of an evaluation: it has no place among those that a batch waits for, and goes after them; as one of
        them, lest it starve, once more than eta versions were published since."""
        self._evaluations[group] = _Evaluation(self._publications)

    def evaluates(self, group: str) -> bool:
        return group in self._evaluations

    def close(self, group: str, ready: bool) -> None:
        self._evaluations.pop(group, None)
        found = self._groups.pop(group, None)
        if found is None:
            if group in self._done and not ready:  # it was ready, and is thrown away
                del self._done[group]
                self._ready = max(0, self._ready - 1)
                self._resize()
            return
        self._by_version.get(self._deadline(found), set()).discard(group)
        self._cut.remove(group)
        if ready:
            self._ready += 1
            self._done[group] = None
            # Which ones a batch took is not told; what no rule can still throw away for its age is forgotten.
            while len(self._done) > DONE_BATCHES * (self._eta + 2) * self._batch:
                del self._done[next(iter(self._done))]
        self._resize()

    def taken(self, groups: int) -> None:
        """The trainer took `groups` ready ones."""
        self._ready = max(0, self._ready - groups)
        self._resize()

    def published(self, version: int) -> None:
        """Groups at their last admissible version become due."""
        self._publications += 1
        for group, found in self._evaluations.items():
            if found.klass == REST and self._publications - found.since > self._eta:
                found.klass = CRITICAL
                self._changed[group] = None
        first, self._version = self._version - self._eta, version
        for bucket in range(first, version - self._eta + 1):
            for group in self._by_version.get(bucket, ()):
                self._classify(group)

    def started(self, group: str, version: int) -> None:
        """A trajectory of it has tokens of `version`."""
        found = self._groups.get(group)
        if found is None or (found.oldest is not None and found.oldest <= version):
            return
        self._by_version.get(self._deadline(found), set()).discard(group)
        found.oldest = version
        self._by_version.setdefault(version, set()).add(group)
        self._classify(group)

    def expect(self, group: str, remaining: dict[str, float]) -> None:
        """Predicted remaining tokens of some of its unfinished trajectories."""
        if group in self._evaluations:
            self._evaluations[group].remaining.update(remaining)
            return
        found = self._groups.get(group)
        if found is not None:
            known = found.remaining
            before = len(known)
            known.update(remaining)
            if len(known) > before and found.unseen:
                found.unseen = max(0, found.unseen + before - len(known))
            self._place(group, found)

    def ended(self, group: str, trajectory: str) -> None:
        """A trajectory ended, whichever way."""
        if group in self._evaluations:
            self._evaluations[group].remaining.pop(trajectory, None)
            return
        found = self._groups.get(group)
        if found is not None and found.remaining.pop(trajectory, None) is not None:
            self._place(group, found)

    def _deadline(self, group: OpenGroup) -> int:
        return group.opened if group.oldest is None else group.oldest

    def _place(self, group: str, found: OpenGroup) -> None:
        place = 0
        if self._ranked:
            remaining = found.remaining.values()
            unseen = self.typical if found.unseen else 0.0
            total = sum(remaining) + found.unseen * unseen
            place = coarse(max(unseen, total * self._batch / self.slots, *remaining))
        self._cut.put(group, place << 40 | found.order, 1)  # the first opened among equals
        self._classify(group)

    def _classify(self, group: str) -> None:
        found = self._groups.get(group)
        if found is None:
            return
        if self._deadline(found) <= self._version - self._eta:
            klass = DUE
        else:
            klass = CRITICAL if self._cut.inside(group) else REST
        if klass != found.klass:
            found.klass = klass
            self._changed[group] = None

    def _resize(self) -> None:
        self._cut.resize(self._batch - self._ready % self._batch)

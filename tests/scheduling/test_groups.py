"""CriticalGroups against ranking everything anew."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling.groups import CRITICAL, DUE, REST, CriticalGroups, coarse


class Plain:
    """The rules, written down without any care for cost."""

    def __init__(self, batch: int, eta: int, ranked: bool, slots: int):
        self.batch, self.eta, self.ranked, self.slots = batch, eta, ranked, slots
        self.groups: dict[str, dict] = {}
        self.ready = self.version = self.opened = 0

    def place(self, name: str) -> tuple[float, int]:
        group = self.groups[name]
        if not self.ranked:
            return (0.0, group["order"])
        lengths = [*group["remaining"].values(), *[1.0] * group["unseen"]]
        return (coarse(max([0.0, *lengths, sum(lengths) * self.batch / self.slots])), group["order"])

    def klass(self, name: str) -> int:
        group = self.groups[name]
        version = group["opened"] if group["oldest"] is None else group["oldest"]
        if version <= self.version - self.eta:
            return DUE
        wanted = self.batch - self.ready % self.batch
        return CRITICAL if name in sorted(self.groups, key=self.place)[:wanted] else REST


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_classes_are_what_ranking_gives(seed):
    rng = random.Random(seed)
    batch, eta, ranked, slots = rng.randint(1, 4), rng.randint(0, 2), rng.random() < 0.7, rng.randint(1, 20)
    groups, plain = CriticalGroups(batch, eta, ranked), Plain(batch, eta, ranked, slots)
    groups.slots = slots
    told: dict[str, int] = {}
    for _ in range(100):
        kind, names = rng.random(), sorted(plain.groups)
        if kind < 0.25 or not names:
            name = f"g{plain.opened}"
            group = {"order": plain.opened, "opened": plain.version, "oldest": None, "remaining": {}, "unseen": 3}
            plain.groups[name] = group
            plain.opened += 1
            groups.open(name, 3, plain.version)
        elif kind < 0.35:
            name, ready = rng.choice(names), rng.random() < 0.8
            del plain.groups[name]
            told.pop(name, None)
            plain.ready += ready
            groups.close(name, ready)
        elif kind < 0.45 and plain.ready >= batch:
            plain.ready -= batch
            groups.taken(batch)
            plain.version += 1
            groups.published(plain.version)
        elif kind < 0.55:
            name = rng.choice(names)
            version = rng.randint(plain.groups[name]["opened"], plain.version)
            old = plain.groups[name]["oldest"]
            plain.groups[name]["oldest"] = version if old is None else min(old, version)
            groups.started(name, version)
        elif kind < 0.9:
            name, trajectory, length = rng.choice(names), f"t{rng.randrange(3)}", rng.random() * 100
            group = plain.groups[name]
            group["unseen"] -= trajectory not in group["remaining"] and group["unseen"] > 0
            group["remaining"][trajectory] = length
            groups.expect(name, {trajectory: length})
        else:
            name, trajectory = rng.choice(names), f"t{rng.randrange(3)}"
            plain.groups[name]["remaining"].pop(trajectory, None)
            groups.ended(name, trajectory)
        for name in groups.changed():
            told[name] = groups.klass(name)
        for name in plain.groups:
            assert groups.klass(name) == plain.klass(name)
            assert told.get(name, REST) == plain.klass(name), "a change of class was not told"


def test_a_group_that_was_never_opened_is_critical():
    """Evaluation shares the policy with training; somebody waits for it."""
    assert CriticalGroups(2, 0, True).klass("heldout") == CRITICAL


def test_closing_twice_or_the_unknown_is_ignored():
    groups = CriticalGroups(2, 0, True)
    groups.close("g9", True)
    groups.expect("g9", {"t": 1.0})
    groups.ended("g9", "t")
    groups.started("g9", 0)
    assert groups.changed() == []

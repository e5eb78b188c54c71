"""PriorityCut against sorting everything anew."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.scheduling.cut import PriorityCut


def plain(items: dict[str, tuple[int, float]], capacity: float) -> set[str]:
    """The longest front part that fits, at least one."""
    inside, weight = set(), 0.0
    for name in sorted(items, key=lambda n: items[n][0]):
        if inside and weight + items[name][1] > capacity:
            break
        inside.add(name)
        weight += items[name][1]
    return inside


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_it_is_what_sorting_gives(seed):
    rng = random.Random(seed)
    capacity = rng.randint(1, 30)
    cut, items = PriorityCut(capacity), {}
    believed: set[str] = set()
    for _ in range(80):
        number = rng.randrange(12)
        name = f"i{number}"
        kind = rng.random()
        if kind < 0.7:
            items[name] = (rng.randrange(8) << 4 | number, float(rng.randint(1, 12)))
            cut.put(name, *items[name])
        elif kind < 0.9:
            items.pop(name, None)
            believed.discard(name)
            cut.remove(name)
        else:
            capacity = rng.randint(1, 30)
            cut.resize(capacity)
        expected = plain(items, capacity)
        assert {n for n in items if cut.inside(n)} == expected
        assert cut.weight == sum(items[n][1] for n in expected)
        assert len(cut) == len(items)
        for crossed in cut.crossed():
            (believed.add if cut.inside(crossed) else believed.discard)(crossed)
        assert believed == expected, "a crossing was not told"


def test_a_single_item_is_inside_however_heavy():
    cut = PriorityCut(10)
    cut.put("whale", 5, 100.0)
    assert cut.inside("whale")
    cut.put("fry", 1, 1.0)
    assert cut.inside("fry") and not cut.inside("whale")

"""PrefixCache: pages add up under random use, and go in the order that residency asks for."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.sim.cache import PrefixCache
from venusrl.sim.host import HostTier

PAGE = 4


def check(cache: PrefixCache, running: dict[str, int]) -> None:
    assert 0 <= cache.used <= cache.capacity
    assert cache.running == sum(running.values())
    assert cache.tails == sum(t.tokens for t in cache._tails.values())
    assert cache.prompts == sum(p.tokens for p in cache._prompts.values())
    for group, prompt in cache._prompts.items():
        leaning = {n for n, t in cache._tails.items() if t.group == group and (t.tokens or n in running)}
        assert prompt.leaning == len(leaning)
    for name, tail in cache._tails.items():
        assert not tail.tokens or tail.group in cache._prompts, f"{name} leans on a prompt that is gone"
    for name, prompt in cache._prompts.items():
        assert prompt.leaning or (-1.0, prompt.stamp, False, name) in [e[1:] for e in cache._heap], (
            "never to be evicted"
        )
    for group, references in cache._references.items():
        assert references == sum(t.resident for t in cache._tails.values() if t.group == group)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_pages_add_up(seed):
    rng = random.Random(seed)
    cache = PrefixCache(rng.randint(20, 60) * PAGE, PAGE, host_tokens=rng.choice([0, 40, 400]))
    context: dict[str, int] = {}
    running: dict[str, int] = {}
    for now in range(120):
        name = f"g{rng.randrange(3)}/{rng.randrange(3)}"
        group, prompt = name.split("/")[0], 10
        kind = rng.random()
        length = context.setdefault(name, prompt + rng.randint(0, 20))
        if kind < 0.4 and name not in running:
            tail = cache.pages(length - prompt)
            fixed = cache.running + cache.prompts + cache.missing_prompt(group, prompt)
            if fixed + tail <= cache.capacity:
                held = cache.held(name, group, prompt, length)
                assert 0 <= held <= held + cache.behind(name, group, prompt, length) <= length
                cache.pin(name, group, prompt, length)
                running[name] = tail
                assert cache.make_room(0)
        elif kind < 0.7 and running:
            name = rng.choice(sorted(running))
            group = name.split("/")[0]
            context[name] += rng.randint(0, 3)
            cache.unpin(name, prompt, context[name], running.pop(name), now)
            held = cache.held(name, group, prompt, context[name])
            assert context[name] - held < PAGE or held == prompt
            cache.make_room(0)
        elif kind < 0.8:
            cache.refer(name, group, rng.random() < 0.5)
        elif kind < 0.9 and name not in running:
            cache.release(name)
            context.pop(name)
        elif kind < 0.95 and not running:
            cache.clear()
            assert cache.used == 0
        elif name not in running and cache.make_room(length + PAGE):
            cache.insert(name, group, prompt, length, now)
        check(cache, running)


def filled(*names: str) -> PrefixCache:
    """Tails of 8 tokens on prompts of 4, used in the order given."""
    cache = PrefixCache(1000, PAGE)
    for now, name in enumerate(names):
        group = name.split("/")[0]
        cache.pin(name, group, 4, 12)
        cache.unpin(name, 4, 12, 8, float(now))
    return cache


def held(cache: PrefixCache, name: str) -> int:
    return cache.held(name, name.split("/")[0], 4, 12)


def test_without_references_the_least_recently_used_goes_first_from_its_end():
    cache = filled("a/0", "b/0")
    cache.make_room(cache.capacity - cache.used + 1)
    assert (held(cache, "a/0"), held(cache, "b/0")) == (8, 12)
    cache.make_room(cache.capacity - cache.used + 8)
    assert (held(cache, "a/0"), held(cache, "b/0")) == (0, 12)


def test_a_referenced_tail_stays_before_one_that_is_not():
    cache = filled("a/0", "b/0")
    cache.refer("a/0", "a", True)
    cache.make_room(cache.capacity - cache.used + 8)
    assert (held(cache, "a/0"), held(cache, "b/0")) == (12, 4)


def test_a_prompt_is_computed_once_for_its_group_and_goes_last():
    cache = filled("a/0", "a/1")
    assert cache.prompts == 4 and cache.tails == 16
    cache.make_room(cache.capacity - cache.used + 16)
    assert held(cache, "a/2") == 4
    cache.make_room(cache.capacity - cache.used + 1)
    assert held(cache, "a/2") == 0


def test_what_runs_is_never_evicted():
    cache = PrefixCache(16, PAGE)
    cache.pin("a/0", "a", 4, 12)
    assert cache.make_room(4)
    assert not cache.make_room(5)
    assert held(cache, "a/0") == 4 and cache.running == 8


def test_what_is_evicted_can_be_had_from_host_memory():
    cache = PrefixCache(24, PAGE, host_tokens=100)
    for now, name in enumerate(("a/0", "b/0")):
        cache.pin(name, name[0], 4, 12)
        cache.unpin(name, 4, 12, 8, float(now))
    cache.make_room(4)
    assert (held(cache, "a/0"), cache.behind("a/0", "a", 4, 12)) == (8, 4)
    cache.make_room(12)
    assert (held(cache, "a/0"), cache.behind("a/0", "a", 4, 12)) == (0, 12)  # its prompt, too
    assert cache.behind("a/1", "a", 4, 12) == 4  # a group-mate has the prompt alone
    cache.clear()
    assert cache.behind("a/0", "a", 4, 12) == 0


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 5)), max_size=40),
    st.integers(1, 20),
)
def test_host_memory_holds_the_runs_used_last(steps, capacity):
    """Against a plain list of single tokens by name."""
    tier = HostTier(capacity)
    runs: list[tuple[str, list[int]]] = []  # the least recently used first
    for keeps, name, low, size in steps:
        old = next((tokens for other, tokens in runs if other == name), [])
        others = [run for run in runs if run[0] != name]
        if keeps:
            tier.keep(name, low, low + size)
            new = list(range(low, low + size))
            touches = old and low <= old[-1] + 1 and old[0] <= low + size
            runs = [*others, (name, sorted({*old, *new}) if touches else new)]
            while sum(len(tokens) for _, tokens in runs) > capacity:
                runs[0][1].pop()
                runs = [run for run in runs if run[1]]
        else:
            expected = old[-1] + 1 if low in old else low
            assert tier.reach(name, low) == expected
            runs = [*others, (name, old)] if low in old else runs
        assert tier.used == sum(len(tokens) for _, tokens in runs)

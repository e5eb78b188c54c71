"""KV that the device gave up comes back from host memory, and is that of the same tokens, namespace and weights."""

import dataclasses
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from venusrl.rollout.engine.cache import LayerCache
from venusrl.rollout.engine.host import HostTier

from . import tiny
from .tiny import ask, run

PAGE = 4


def blocks(names: list[tuple]) -> list[LayerCache]:
    """A page of every layer for each name, whose numbers all follow from the name."""
    c = tiny.CONFIG
    marks = np.array([zlib.crc32(repr(name).encode()) % 1000 for name in names], np.float32)
    keys = np.zeros((len(names), c.kv_heads, c.head_dim, PAGE), np.float32) + marks[:, None, None, None]
    return [LayerCache(keys + layer, keys.swapaxes(2, 3) - layer) for layer in range(c.layers)]


def touched(used: list[tuple], name: tuple) -> list[tuple]:
    return [other for other in used if other != name] + [name]


# Few different pages, so that prefixes are often shared.
sequences = st.lists(st.integers(0, 1), max_size=5).map(lambda kinds: [kind for kind in kinds for _ in range(PAGE)])
steps = st.tuples(st.sampled_from(["write", "read"]), st.sampled_from("ab"), sequences, st.integers(0, 4))


@given(st.lists(steps, max_size=40), st.integers(1, 6))
def test_it_holds_the_pages_that_were_used_last(steps, capacity):
    tier = HostTier(tiny.CONFIG, capacity, PAGE)
    used: list[tuple] = []  # pages by everything up to their end, the least recently used first
    for kind, namespace, tokens, first in steps:
        names = [(namespace, *tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)][first:]
        if kind == "write" and names:
            tier.write(namespace, tokens, blocks(names), born=len(names))
            for name in reversed(names):
                used = touched(used, name)[-capacity:]
        elif kind == "read":
            held = []
            while len(held) < len(names) and names[len(held)] in used:
                held.append(names[len(held)])
            for name in reversed(held):
                used = touched(used, name)
            slots = tier.find(namespace, tokens, first * PAGE, len(tokens))
            assert len(slots) == len(held)
            if held:
                for got, wanted in zip(tier.read(slots, 8)[0], blocks(held), strict=True):
                    np.testing.assert_array_equal(got.keys[: len(held)], wanted.keys)
                    np.testing.assert_array_equal(got.values[: len(held)], wanted.values)
        assert len(tier) == len(used)
    tier.drop()
    assert len(tier) == 0 and not tier.find("a", [0] * PAGE, 0, PAGE)


def test_a_long_prefix_that_loses_pages_keeps_its_beginning():
    tier = HostTier(tiny.CONFIG, 6, PAGE)
    long, other = [1] * 5 * PAGE, [0] * 3 * PAGE
    tier.write("a", long, blocks([("a", i) for i in range(5)]), 0)
    tier.write("a", other, blocks([("a", i) for i in range(3)]), 0)
    assert len(tier.find("a", long, 0, len(long))) == 3
    tier.write("a", [2] * 9 * PAGE, blocks([("a", i) for i in range(9)]), 0)  # more than there is room for
    assert len(tier.find("a", [2] * 9 * PAGE, 0, 9 * PAGE)) == 6


def two_turns(engine, weights) -> int:
    """Two turns of many trajectories, more than the pages hold; tokens that were prefilled beyond the new ones."""
    contexts = {f"t{i}": tiny.tokens(i, 13) for i in range(8)}
    new = 0
    for turn in range(2):
        for i, name in enumerate(contexts):
            expected = tiny.greedy(weights, contexts[name], 4)
            done = run(engine, [ask(name, contexts[name], 4, seed=i)])[name]
            assert done.tokens == expected
            new += len(contexts[name]) - 1 if not turn else 4
            contexts[name] = contexts[name] + done.tokens + tiny.tokens(40 + i, 3)
    return engine.load().prefilled_tokens - new


def test_what_the_device_gave_up_comes_back(weights):
    small = dict(kv_tokens=32, residency="lru")
    without = tiny.engine(weights, **small)
    with_host = tiny.engine(weights, **small, host_tokens=400)
    assert two_turns(without, weights) > 60
    again = two_turns(with_host, weights)
    assert again <= 8 * (tiny.OPTIONS.page - 1)  # the last page of each, where it was not full
    assert with_host.load().returned_tokens > 60
    assert with_host.load().evicted_pages > 0


def test_samples_of_a_prompt_all_find_it(weights):
    engine = tiny.engine(weights, kv_tokens=40, host_tokens=400, residency="lru")
    prompt = tiny.tokens(1, 17)
    run(engine, [ask("first", prompt, 2)])
    run(engine, [ask(f"other{i}", tiny.tokens(20 + i, 30), 4) for i in range(3)])  # these take all pages
    before = engine.load().prefilled_tokens
    for i in range(3):
        engine.submit(ask(f"g{i}", prompt, 2))
    engine.step()
    assert engine.load().prefilled_tokens == before
    assert engine.load().returned_tokens > 0
    load = engine.load()
    assert load.pages - load.free_pages - load.evictable_pages <= 4 + 3  # the prompt once, and a page for each


def test_new_weights_find_nothing_of_the_old(weights):
    engine = tiny.engine(weights, kv_tokens=32, host_tokens=400, residency="lru")
    two_turns(engine, weights)
    returned = engine.load().returned_tokens
    other = tiny.params(seed=5)
    engine.set_weights(other, 1)
    context = tiny.tokens(0, 13)
    assert run(engine, [ask("t0", context, 4)])["t0"].tokens == tiny.greedy(other, context, 4)
    assert engine.load().returned_tokens == returned


def test_other_namespaces_find_nothing(weights):
    engine = tiny.engine(weights, kv_tokens=32, host_tokens=400, residency="lru")
    contexts = [tiny.tokens(i, 17) for i in range(6)]
    run(engine, [ask(f"a{i}", context, 2) for i, context in enumerate(contexts)])
    before = engine.load()
    others = [ask(f"b{i}", context, 2) for i, context in enumerate(contexts)]
    run(engine, [dataclasses.replace(request, namespace="other") for request in others])
    assert engine.load().returned_tokens == before.returned_tokens
    assert engine.load().prefilled_tokens == 2 * before.prefilled_tokens


def test_kv_that_comes_back_is_as_old_as_it_was(weights):
    engine = tiny.engine(weights, kv_tokens=32, host_tokens=400, residency="lru", on_update="keep")
    context = tiny.tokens(0, 17)
    run(engine, [ask("t", context, 2)])
    run(engine, [ask(f"other{i}", tiny.tokens(20 + i, 25), 4) for i in range(3)])  # these take all pages
    engine.set_weights(weights, 1)
    run(engine, [ask("u", context, 2)])
    assert engine.load().returned_tokens > 0
    assert engine.load().stale_tokens == 16
    run(engine, [ask("v", context, 2)])
    assert engine.load().stale_tokens == 32

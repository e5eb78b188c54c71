"""RadixTree against a plain model of it, over random schedules."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from venusrl.rollout.engine.radix import RadixTree
from venusrl.rollout.engine.residency import ORDERS, by_references

PAGE, PAGES = 2, 12
NAMES = st.sampled_from("abcd")
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Machine(RuleBasedStateMachine):
    """The model is what each page holds: the tokens from the start of the sequence to its end. A match must give pages
    that hold just its tokens, and may only miss what was evicted."""

    def __init__(self):
        super().__init__()
        self.tree = RadixTree(PAGES, PAGE, by_references)
        self.content: dict[int, tuple] = {}  # page -> (namespace, tokens up to its end)
        self.running: dict[str, list] = {}  # name -> [namespace, tokens, pages, node, shared]
        self.resident: set[str] = set()

    def holds(self, namespace, tokens, pages):
        for i, page in enumerate(pages):
            assert self.content[page] == (namespace, tuple(tokens[: (i + 1) * PAGE]))

    @rule(name=NAMES, tokens=TOKENS, namespace=st.sampled_from([0, 1]))
    def begin(self, name, tokens, namespace):
        if name in self.running:
            return
        node, pages, length = self.tree.match(namespace, tokens, len(tokens) - 1, name)
        assert length <= max(0, len(tokens) - 1) and len(pages) == -(-length // PAGE)
        self.holds(namespace, tokens[:length], pages)
        self.tree.lock(node)
        need = -(-len(tokens) // PAGE) - len(pages)
        shared = len(pages)
        if need > self.tree.free + self.tree.evictable:
            with pytest.raises(ValueError, match="are wanted"):
                self.tree.take(need)
            self.tree.unlock(node)
            return
        if node.owner is not None:
            assert node.owner == name
            self.tree.unlock(node)
            node = self.tree.take_tail(node)
            self.tree.lock(node)
            shared -= 1
        new = self.tree.take(need)
        locked = {p for r in self.running.values() for p in r[2]} | set(pages)
        assert not locked & set(new), "a page in use was given away"
        self.running[name] = [namespace, tokens, pages + new, node, shared]

    @rule(name=NAMES)
    def end(self, name):
        if name not in self.running:
            return
        namespace, tokens, pages, node, _ = self.running.pop(name)
        for i, page in enumerate(pages):
            self.content[page] = (namespace, tuple(tokens[: (i + 1) * PAGE]))
        end, held = self.tree.insert(namespace, name, tokens, pages)
        self.holds(namespace, tokens, held)
        self.tree.unlock(node)
        again, same, length = self.tree.match(namespace, tokens, len(tokens), name)
        assert (again, same, length) == (end, held, len(tokens))  # all of it is there
        assert self.tree.path(name) == (tokens, held)

    @rule(name=NAMES)
    def abandon(self, name):
        if name in self.running:
            _, _, pages, node, shared = self.running.pop(name)
            self.tree.unlock(node)
            self.tree.give_back(pages[shared:])

    @rule(name=NAMES, resident=st.booleans())
    def refer(self, name, resident):
        self.tree.refer(name, resident)

    @rule(name=NAMES)
    def release(self, name):
        if name not in self.running:
            self.tree.release(name)

    @rule()
    def drop(self):
        if not self.running:
            self.tree.drop(keep=1)
            assert self.tree.match(0, [0, 0, 0, 0], 4, "a")[2] == 0

    @invariant()
    def pages_add_up(self):
        self.tree.check([p for r in self.running.values() for p in r[2][r[4] :]])
        assert sum(self.tree.by_references().values()) <= PAGES


TestRadixTree = Machine.TestCase
TestRadixTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def cached(tree, name, tokens):
    tree.insert(0, name, tokens, tree.take(-(-len(tokens) // tree.page)))


def here(tree, tokens):
    return tree.match(0, tokens, len(tokens), "")[2]


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_what_goes_first(name):
    tree = RadixTree(6, 1, ORDERS[name])
    for trajectory, tokens in {"high": [1, 1], "often": [2, 2], "new": [3, 3]}.items():
        cached(tree, trajectory, tokens)
    tree.refer("high", True)
    for _ in range(3):
        here(tree, [2, 2])
    here(tree, [3, 3])
    tree.take(2)
    left = {t for t, tokens in {"high": [1, 1], "often": [2, 2], "new": [3, 3]}.items() if here(tree, tokens) == 2}
    assert left == {"references": {"high", "new"}, "lru": {"often", "new"}, "lfu": {"often", "new"}}[name]


def test_pages_with_more_references_stay_longest():
    """Two trajectories of high priority on one prefix, one on another, none on the third."""
    tree = RadixTree(6, 1, by_references)
    for name, tokens in {"a": [1, 1], "c": [2, 2], "d": [3, 3]}.items():
        cached(tree, name, tokens)
    tree.insert(0, "b", [1, 1], tree.path("a")[1])
    for name in "abc":
        tree.refer(name, True)
    order = []
    for _ in range(3):
        tree.take(2)
        order.append({k for k in (1, 2, 3) if here(tree, [k, k]) == 2})
    assert order == [{1, 2}, {1}, set()]


def test_references_follow_a_trajectory_that_goes_on_and_end_with_it():
    tree = RadixTree(8, 2, by_references)
    tree.refer("a", True)
    cached(tree, "a", [1, 1, 1])
    assert tree.by_references() == {"unreferenced": 0, "low": 2, "high": 0}
    tree.insert(0, "a", [1, 1, 2, 2], [*tree.path("a")[1][:1], *tree.take(1)])
    assert tree.by_references() == {"unreferenced": 0, "low": 2, "high": 0}  # the tail went
    tree.refer("a", False)
    assert tree.by_references() == {"unreferenced": 2, "low": 0, "high": 0}
    tree.check([])

"""The radix tree of cached prefixes, page by page: which pages hold the KV of which tokens. Pure: no arrays, no clock.

A node is a run of whole pages that follow its parent's. Beside them a node may have tails: the last page of one
trajectory, not full, which only that trajectory can go on from. What runs locks its path; pages of unlocked leaves can
be given up, from their end. Trajectories of high priority hold references on their paths, which decide the order.

Trees of different namespaces (weight versions, tenants) share nothing but the pool of pages.
"""

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence

from venusrl.rollout.engine.residency import Order


class Node:
    """Attributes:
    tokens: of its run; a multiple of the page, or fewer than a page in a tail.
    pages: that hold them.
    locks: running requests at or below it.
    references: trajectories of high priority at or below it.
    owner: the trajectory, where it is a tail.
    born: the tree's clock when its KV came.
    """

    __slots__ = (
        "born",
        "children",
        "last_use",
        "locks",
        "owner",
        "pages",
        "parent",
        "references",
        "stamp",
        "tokens",
        "uses",
    )

    def __init__(self, parent: "Node | None", tokens: tuple[int, ...], pages: list[int], owner: str | None = None):
        self.parent, self.tokens, self.pages, self.owner = parent, tokens, pages, owner
        self.children: dict[Hashable, Node] = {}
        self.born = self.locks = self.references = self.last_use = self.uses = self.stamp = 0


# (namespace, tokens up to the end of the pages, the pages, the tree's clock when their KV came)
GivenUp = Callable[[Hashable, list[int], list[int], int], None]

AHEAD = 16  # pages given up at once, at least, where somebody is told of them


class RadixTree:
    """Pages are numbers below `pages`; each is free, in one node, or taken by the caller.

    Args:
      given_up: told of pages that are evicted, before they are anybody's; not of tails.

    Attributes:
      free: number of free pages.
      evictable: pages of nodes that nothing has locked; all of them can be given up.
      evicted: pages given up so far.
      ticks: look-ups and insertions so far, the tree's clock.
    """

    def __init__(self, pages: int, page: int, order: Order, given_up: GivenUp | None = None):
        self.page = page
        self.capacity = pages
        self.evictable = self.evicted = 0
        self._order = order
        self._given_up = given_up
        self._free = list(range(pages - 1, -1, -1))
        self._roots: dict[Hashable, Node] = {}
        self._heap: list[tuple[tuple, int, Node]] = []  # leaves that may be given up, and outdated entries
        self._stamps = self.ticks = 0
        self._compact_at = 1024
        self._ends: dict[str, Node] = {}  # the deepest node of each trajectory
        self._resident: set[str] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    # Look up and add

    def match(
        self, namespace: Hashable, tokens: Sequence[int], limit: int, trajectory: str
    ) -> tuple[Node, list[int], int]:
        """The longest cached prefix of at most `limit` tokens.

        Returns:
          (the node where it ends, its pages, its length in tokens). A tail of `trajectory` counts where all of it
          fits; its page is then the last of the pages and the length no multiple of the page.
        """
        self.ticks += 1
        node, pages, length = self._root(namespace), [], 0
        while True:
            child = node.children.get(tuple(tokens[length : length + self.page])) if length < limit else None
            if child is None:
                break
            same = self._same(child.tokens, tokens, length, limit)
            if same < len(child.tokens):
                child = self._split(child, same) if same else None
            if child is None:
                break
            node, pages, length = child, pages + child.pages, length + len(child.tokens)
            self._touch(node)
        tail = node.children.get(("tail", trajectory))
        if tail is None:
            return node, pages, length
        end = length + len(tail.tokens)
        if end > limit or tuple(tokens[length:end]) != tail.tokens:
            return node, pages, length
        self._touch(tail)
        return tail, pages + tail.pages, end

    def insert(
        self, namespace: Hashable, trajectory: str, tokens: Sequence[int], pages: Sequence[int]
    ) -> tuple[Node, list[int]]:
        """Caches `tokens`, whose KV is in `pages` in order. Pages whose content is here already are freed, unless they
        are the very pages that are here; where the last page is not full it becomes the trajectory's tail.

        Returns:
          (the node where they end, the pages that hold them now).
        """
        self.ticks += 1
        node, length, held = self._root(namespace), 0, []
        whole = len(tokens) // self.page * self.page
        while length < whole:
            child = node.children.get(tuple(tokens[length : length + self.page]))
            if child is None:
                break
            same = self._same(child.tokens, tokens, length, whole)
            if same < len(child.tokens):
                child = self._split(child, same)
            first = length // self.page
            self._give_back(set(pages[first : first + len(child.pages)]) - set(child.pages))
            node, length, held = child, length + len(child.tokens), held + child.pages
            self._touch(node)
        rest = list(pages[length // self.page :])
        if length < whole:
            node = self._add(node, tuple(tokens[length:whole]), rest[: (whole - length) // self.page])
        self._drop_tail(trajectory)
        if whole < len(tokens):
            node = self._add(node, tuple(tokens[whole:]), rest[-1:], trajectory)
        self._move_end(trajectory, node)
        return node, held + rest

    def path(self, trajectory: str) -> tuple[list[int], list[int]]:
        """What is cached of a trajectory, as far as it was last inserted: (tokens, pages)."""
        return self._down_to(self._alive(self._ends.get(trajectory)))[:2]

    def take_tail(self, node: Node) -> Node:
        """The page of a tail now belongs to the caller, who goes on from it. Returns the node above it."""
        parent = node.parent
        if node.locks:
            raise ValueError("the tail is locked")
        self._detach(node)
        return parent

    # Locks and references

    def lock(self, node: Node) -> None:
        """Nothing down to `node` is given up until `unlock`."""
        while node is not None:
            if not node.locks:
                self.evictable -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        leaf = node
        while node is not None:
            node.locks -= 1
            if not node.locks:
                self.evictable += len(node.pages)
            node = node.parent
        self._offer(leaf)

    def refer(self, trajectory: str, resident: bool) -> None:
        """Whether the path of `trajectory`, present and future, counts it as a reference."""
        if resident == (trajectory in self._resident):
            return
        (self._resident.add if resident else self._resident.discard)(trajectory)
        end = self._ends.get(trajectory)
        if end is not None:
            self._count(end, 1 if resident else -1)

    def release(self, trajectory: str) -> None:
        """The trajectory has ended: its references and its tail go; the rest stays until its pages are needed."""
        self.refer(trajectory, False)
        self._drop_tail(trajectory)
        self._ends.pop(trajectory, None)

    # Pages

    def take(self, count: int) -> list[int]:
        """`count` pages for the caller, given up by others where too few are free.

        Raises:
          ValueError: there are not so many; nothing is taken.
        """
        if count > len(self._free) + self.evictable:
            raise ValueError(f"{count} pages are wanted, {len(self._free)} free and {self.evictable} evictable")
        self._evict(count - len(self._free))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages that the caller took and did not insert."""
        self._give_back(pages)

    def drop(self, keep: Hashable = None) -> None:
        """Forgets every namespace but `keep`. Nothing in them may be locked."""
        for namespace in [n for n in self._roots if n != keep]:
            for node in self._walk(self._roots.pop(namespace)):
                if node.locks:
                    raise ValueError("a request runs on pages that are to be dropped")
                self.evictable -= len(node.pages)
                self._give_back(node.pages)
                node.pages, node.parent, node.stamp = [], None, -1
        self._ends = {t: n for t, n in self._ends.items() if self._alive(n) is not None}

    def by_references(self) -> dict[str, int]:
        """Cached pages by class: "unreferenced", "low" (one reference), "high"."""
        counts = {"unreferenced": 0, "low": 0, "high": 0}
        for root in self._roots.values():
            for node in self._walk(root):
                kind = "unreferenced" if not node.references else "low" if node.references == 1 else "high"
                counts[kind] += len(node.pages)
        return counts

    def check(self, taken: Sequence[int]) -> None:
        """Every page is free, in one node, or among `taken`; counts are what they say. For tests and debugging.

        Raises:
          AssertionError: they are not.
        """
        held, evictable = list(self._free) + list(taken), 0
        references: dict[int, int] = {}
        for trajectory in self._resident:
            node = self._alive(self._ends.get(trajectory))
            while node is not None:
                references[id(node)] = references.get(id(node), 0) + 1
                node = node.parent
        for root in self._roots.values():
            for node in self._walk(root):
                held += node.pages
                evictable += 0 if node.locks else len(node.pages)
                assert node.locks >= sum(child.locks for child in node.children.values())
                assert node.references == references.get(id(node), 0), "references"
                assert node.parent is None or -(-len(node.tokens) // self.page) == len(node.pages)
        assert sorted(held) == list(range(self.capacity)), "a page is lost, or there twice"
        assert evictable == self.evictable, "evictable"

    # Inside

    def _root(self, namespace: Hashable) -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, (), [])
        return self._roots[namespace]

    def _same(self, run: tuple[int, ...], tokens: Sequence[int], start: int, limit: int) -> int:
        """Leading tokens of `run`, in whole pages, that stand in `tokens` from `start` on and end by `limit`."""
        if start + len(run) <= limit and tuple(tokens[start : start + len(run)]) == run:
            return len(run)
        same = 0
        while same + self.page <= min(len(run), limit - start):
            if tuple(tokens[start + same : start + same + self.page]) != run[same : same + self.page]:
                break
            same += self.page
        return same

    def _split(self, node: Node, tokens: int) -> Node:
        """Cuts the first `tokens` off a node; they become its parent, which is returned. A lock or a reference on the
        lower part holds the upper one too, so both have the same count."""
        upper = Node(node.parent, node.tokens[:tokens], node.pages[: tokens // self.page])
        upper.locks, upper.references = node.locks, node.references
        upper.last_use, upper.uses, upper.born = node.last_use, node.uses, node.born
        node.parent.children[node.tokens[: self.page]] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[tokens:], node.pages[tokens // self.page :]
        upper.children[node.tokens[: self.page]] = node
        return upper

    def _add(self, parent: Node, tokens: tuple[int, ...], pages: list[int], owner: str | None = None) -> Node:
        node = Node(parent, tokens, pages, owner)
        parent.children[("tail", owner) if owner is not None else tokens[: self.page]] = node
        node.born = self.ticks
        self.evictable += len(pages)
        self._touch(node)
        return node

    def _touch(self, node: Node) -> None:
        node.last_use, node.uses = self.ticks, node.uses + 1
        if not node.children and not node.locks:
            self._offer(node)

    def _offer(self, node: Node) -> None:
        """Lets a node be given up when its turn comes, if it is an unlocked leaf."""
        if node.children or node.locks or node.parent is None:
            return
        self._stamps += 1
        node.stamp = self._stamps
        heapq.heappush(self._heap, (self._order(node), node.stamp, node))
        if len(self._heap) > self._compact_at:
            self._heap = [e for e in self._heap if e[2].stamp == e[1] and not e[2].children and not e[2].locks]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + 1024

    def _evict(self, count: int) -> None:
        if count > 0 and self._given_up is not None:
            count = min(max(count, AHEAD), self.evictable)
        while count > 0:
            _, stamp, node = heapq.heappop(self._heap)
            if node.stamp != stamp or node.children or node.locks:
                continue
            cut = min(count, len(node.pages))
            if self._given_up is not None and node.owner is None:
                tokens, pages, root = self._down_to(node)
                namespace = next(name for name, other in self._roots.items() if other is root)
                self._given_up(namespace, tokens, pages[len(pages) - cut :], node.born)
            self._give_back(node.pages[len(node.pages) - cut :])
            self.evicted += cut
            self.evictable -= cut
            count -= cut
            if cut < len(node.pages):
                node.pages = node.pages[:-cut]
                node.tokens = node.tokens[: len(node.pages) * self.page]
                self._offer(node)
            else:
                node.pages = []
                self._detach(node)

    @staticmethod
    def _down_to(node: Node | None) -> tuple[list[int], list[int], Node | None]:
        """The tokens and pages from the root down to `node`, and the root."""
        runs, root = [], None
        while node is not None:
            runs.append(node)
            node, root = node.parent, node
        runs.reverse()
        return [t for run in runs for t in run.tokens], [p for run in runs for p in run.pages], root

    def _detach(self, node: Node) -> None:
        """Takes a leaf out of the tree; pages that it still has are the caller's."""
        parent = node.parent
        del parent.children[("tail", node.owner) if node.owner is not None else node.tokens[: self.page]]
        self.evictable -= len(node.pages)
        node.pages, node.stamp = [], -1  # `parent` stays: ends that are here go on from it
        self._offer(parent)

    def _drop_tail(self, trajectory: str) -> None:
        end = self._ends.get(trajectory)
        if end is not None and end.owner == trajectory and end.stamp >= 0 and not end.locks:
            self._give_back(end.pages)
            self._detach(end)

    def _move_end(self, trajectory: str, node: Node) -> None:
        if trajectory in self._resident:
            old = self._ends.get(trajectory)
            if old is not None:
                self._count(old, -1)
            self._count(node, 1)
        self._ends[trajectory] = node

    def _count(self, end: Node, step: int) -> None:
        node = leaf = self._alive(end)
        while node is not None:
            node.references += step
            node = node.parent
        if leaf is not None:
            self._offer(leaf)

    @staticmethod
    def _alive(node: Node | None) -> Node | None:
        """`node`, or what is left of its path where it was given up."""
        while node is not None and node.stamp < 0:
            node = node.parent
        return node

    def _give_back(self, pages) -> None:
        self._free.extend(pages)

    def _walk(self, node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

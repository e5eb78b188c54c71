"""Where KV is: in rows while a sequence runs, in pages of the radix tree when it does not. Drives the copies between.

Every page is free, cached in the tree, or private to a running sequence; `RadixTree.check` holds that.
"""

import dataclasses
from collections import Counter
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np

from venusrl.core.errors import WorkerError
from venusrl.models.config import ModelConfig
from venusrl.rollout.engine.cache import LayerCache, new_caches, new_pool
from venusrl.rollout.engine.host import HostTier
from venusrl.rollout.engine.options import EngineOptions, bucket
from venusrl.rollout.engine.programs import Programs
from venusrl.rollout.engine.radix import RadixTree
from venusrl.rollout.engine.residency import order
from venusrl.rollout.engine.sequence import Sequence

COPIES = (8, 64, 256)  # pages of one copy that is compiled; more take several


@dataclasses.dataclass
class Row:
    """Attributes:
    trajectory, namespace: whose KV was there last.
    tokens: whose KV is there, once it is idle.
    busy: a sequence runs on it.
    """

    trajectory: str | None = None
    namespace: Hashable = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    busy: bool = False


@dataclasses.dataclass(frozen=True)
class Prefix:
    """KV of a trajectory's context, to be moved to another worker.

    Attributes:
      trajectory, namespace: it belongs to.
      version: of the weights that made it.
      tokens: whose KV it is.
      blocks: by layer, keys [M, K, H, page] and values [M, K, page, H]; those after the last token mean nothing.
    """

    trajectory: str
    namespace: str
    version: int
    tokens: list[int]
    blocks: list[LayerCache]


class KvStore:
    """Attributes:
    tree: of cached pages.
    caches: the rows, by lane and layer; row r is row r % lane_rows of lane r // lane_rows.
    returned: tokens whose KV came back from host memory.
    """

    def __init__(self, config: ModelConfig, o: EngineOptions, programs: Programs):
        self._host = HostTier(config, o.host_pages, o.page) if o.host_pages else None
        self._leaving: list[tuple[Hashable, list[int], list[int], int]] = []  # given up, for host memory to take
        given_up = None if self._host is None else lambda *pages: self._leaving.append(pages)
        self.tree = RadixTree(o.pages, o.page, order(o.residency), given_up)
        self.returned = 0
        lanes = o.lanes or 1
        self.caches = [new_caches(config, o.lane_rows, o.row_tokens) for _ in range(lanes)]
        self._pool = new_pool(config, o.pages, o.page)
        self._page = o.page
        self._programs = programs
        self._lane_rows = o.lane_rows
        self._rows = [Row() for _ in range(lanes * o.lane_rows)]
        self._idle: dict[int, None] = dict.fromkeys(range(len(self._rows)))  # rows in order of last use, oldest first
        self._homes: dict[str, int] = {}  # the row that a trajectory had last
        self._loads: list[tuple[int, int, int]] = []  # (row, index, page) to be copied before anything is computed

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self._page)

    # A sequence's life

    def begin(self, s: Sequence, namespace: Hashable, reserve: int) -> bool:
        """Gives `s` a row and the pages of its context and one token more; False, and nothing, where pages are short.

        Args:
          reserve: pages that are to stay available to others.
        """
        tree = self.tree
        node, pages, length = tree.match(namespace, s.tokens, len(s.tokens) - 1, s.trajectory)
        tree.lock(node)
        short = self.pages_for(len(s.tokens)) - len(pages)
        if short + reserve > tree.free + tree.evictable:
            tree.unlock(node)
            return False
        s.shared = len(pages)
        if node.owner is not None:  # its own last page, not full; it goes on writing there
            tree.unlock(node)
            node = tree.take_tail(node)
            tree.lock(node)
            s.shared -= 1
        back = []
        if self._host is not None and node.owner is None:
            back = self._host.find(namespace, s.tokens, length, len(s.tokens) - 1)
        blocks, born = self._host.read(back, bucket(len(back), _powers(len(back)))) if back else ([], 0)
        s.node, s.pages = node, pages + self._take(short)
        if back:
            self._place(s.pages[len(pages) : len(pages) + len(back)], blocks)
            length += len(back) * self._page
            self.returned += len(back) * self._page
            self._share(s, namespace, length)
            s.node.born = min(s.node.born, born)
        s.cached = s.stored = length
        s.row = self._take_row(s, namespace)
        row, kept = self._rows[s.row], 0
        if row.trajectory == s.trajectory and row.namespace == namespace:
            kept = min(len(row.tokens), length)
            kept = kept if row.tokens[:kept] == s.tokens[:kept] else 0
        first, last = kept // self._page, self.pages_for(length)
        if kept < length:
            self._loads += [(s.row, i, s.pages[i]) for i in range(first, last)]
        row.trajectory, row.namespace, row.tokens = s.trajectory, namespace, []
        return True

    def grow(self, s: Sequence, tokens: int) -> bool:
        """Pages for `tokens` of KV in all; False, and nothing, where there are too few."""
        short = self.pages_for(tokens) - len(s.pages)
        if short <= 0:
            return True
        if short > self.tree.free + self.tree.evictable:
            return False
        s.pages += self._take(short)
        return True

    def publish(self, s: Sequence) -> None:
        """Others may share what `s` has computed, in whole pages, while it goes on."""
        whole = s.cached // self._page * self._page
        if whole <= s.shared * self._page:
            return
        self._store([s], whole)
        self._share(s, self._rows[s.row].namespace, whole)
        s.stored = whole

    def _share(self, s: Sequence, namespace: Hashable, whole: int) -> None:
        """The first `whole` tokens, whose pages are filled, go into the tree."""
        old, count = s.node, whole // self._page
        s.node, held = self.tree.insert(namespace, s.trajectory, s.tokens[:whole], s.pages[:count])
        self.tree.lock(s.node)
        self.tree.unlock(old)
        s.pages[:count], s.shared = held, count

    def end(self, ended: list[Sequence]) -> None:
        """The sequences stop; what they have computed is cached."""
        self._store(ended)
        for s in ended:
            used = self.pages_for(s.cached)
            self.tree.give_back(s.pages[used:])
            row = self._rows[s.row]
            self.tree.insert(row.namespace, s.trajectory, s.tokens[: s.cached], s.pages[:used])
            self.tree.unlock(s.node)
            row.tokens = s.tokens[: s.cached]
            self._leave(s)

    def abandon(self, s: Sequence) -> None:
        """The sequence stops, and nothing of it is kept but what was cached before."""
        self.tree.unlock(s.node)
        self.tree.give_back(s.pages[s.shared :])
        self._leave(s)

    def _leave(self, s: Sequence) -> None:
        self._rows[s.row].busy = False
        self._idle[s.row] = None
        s.row, s.node, s.pages, s.shared, s.cached, s.stored = None, None, [], 0, 0, 0

    def _take_row(self, s: Sequence, namespace: Hashable) -> int:
        index = self._homes.get(s.trajectory)
        if index not in self._idle or self._rows[index].trajectory != s.trajectory:
            index = self._oldest_idle()
            self._homes.pop(self._rows[index].trajectory, None)
        del self._idle[index]
        self._homes[s.trajectory] = index
        self._rows[index].busy = True
        return index

    def _oldest_idle(self) -> int:
        """The oldest idle row of the lane that has most of them."""
        if len(self.caches) == 1:
            return next(iter(self._idle))
        idle = Counter(row // self._lane_rows for row in self._idle)
        lane = max(idle, key=idle.get)
        return next(row for row in self._idle if row // self._lane_rows == lane)

    # Between sequences

    def release(self, trajectory: str) -> None:
        """The trajectory has ended."""
        self.tree.release(trajectory)
        index = self._homes.pop(trajectory, None)
        if index is not None and not self._rows[index].busy:
            self._rows[index] = Row()
            del self._idle[index]
            self._idle = {index: None, **self._idle}  # the first to be taken

    def drop(self) -> None:
        """Forgets everything that is cached; nothing may run."""
        self.tree.drop()
        if self._host is not None:
            self._host.drop()
        for row in self._rows:
            row.tokens = []

    def wipe(self) -> None:
        """As `drop`, and what was there is overwritten."""
        self.drop()
        self.caches, self._pool = jax.tree.map(jnp.zeros_like, (self.caches, self._pool))

    def export(self, trajectory: str, namespace: str, version: int) -> Prefix | None:
        """What is cached of a trajectory; None where nothing is."""
        tokens, pages = self.tree.path(trajectory)
        if not tokens:
            return None
        return Prefix(trajectory, namespace, version, tokens, self._pick(pages))

    def bring(self, prefix: Prefix, namespace: Hashable) -> int:
        """Caches KV from elsewhere, in place of what is needed least; tokens that came, 0 where there is no room.

        Raises:
          WorkerError: the device did not take it; all is as before, but for what was given up to make room.
        """
        tree, total = self.tree, self.pages_for(len(prefix.tokens))
        node, pages, length = tree.match(namespace, prefix.tokens, len(prefix.tokens), "")
        if length == len(prefix.tokens):
            return 0
        tree.lock(node)
        try:
            if total - len(pages) > tree.free + tree.evictable:
                return 0
            here = len(pages)
            pages = pages + self._take(total - here)
            try:
                self._place([*[tree.capacity] * here, *pages[here:]], prefix.blocks)
            except Exception as error:  # of whatever kind, the pages are nobody's
                tree.give_back(pages[here:])
                if isinstance(error, RuntimeError) and not self._pool_is_gone():
                    raise WorkerError(f"KV of {prefix.trajectory} was not taken: {error!r}") from error
                raise
            tree.insert(namespace, prefix.trajectory, prefix.tokens, pages)
        finally:
            tree.unlock(node)
        return len(prefix.tokens) - length

    # Copies

    def _take(self, count: int) -> list[int]:
        """Pages of the tree's; what they held goes to host memory, where there is any."""
        pages = self.tree.take(count)
        leaving, self._leaving = self._leaving, []
        try:
            self._to_host(leaving)
        except Exception:  # of whatever kind, the pages are nobody's
            self.tree.give_back(pages)
            raise
        return pages

    def _to_host(self, leaving: list[tuple[Hashable, list[int], list[int], int]]) -> None:
        if not leaving:
            return
        blocks, at = self._pick([page for _, _, gone, _ in leaving for page in gone]), 0
        blocks = [LayerCache(*(np.asarray(x) for x in layer)) for layer in blocks]
        for namespace, tokens, gone, born in leaving:
            part = slice(at, at + len(gone))
            self._host.write(namespace, tokens, [LayerCache(b.keys[part], b.values[part]) for b in blocks], born)
            at += len(gone)

    def _pick(self, pages: list[int]) -> list[LayerCache]:
        """Copies of pages; some more than asked for, at the end."""
        wanted = np.zeros(bucket(len(pages), _powers(len(pages))), np.int32)
        wanted[: len(pages)] = pages
        return self._programs.pick(self._pool, wanted)

    def _place(self, pages: list[int], blocks: list[LayerCache]) -> None:
        """Blocks into pages; what there is more of blocks is dropped, and so are pages outside."""
        where = np.full(len(blocks[0].keys), self.tree.capacity, np.int32)
        where[: len(pages)] = pages
        self._pool = self._programs.place(self._pool, where, blocks)

    def _pool_is_gone(self) -> bool:
        """Whether a program that failed has taken the pages with it: it writes where they were."""
        return any(x.is_deleted() for layer in self._pool for x in layer)

    def fill_rows(self) -> None:
        """Rows of sequences that began get what pages have of them."""
        loads, self._loads = self._loads, []
        for lane, copies in self._by_lane(loads):
            for rows, index, pages in _parts(copies, self._lane_rows, 0, 0):
                self.caches[lane] = self._programs.load(self.caches[lane], self._pool, rows, index, pages)

    def _store(self, sequences: list[Sequence], upto: int | None = None) -> None:
        """Pages get what rows have computed since."""
        copies = []
        for s in sequences:
            last = self.pages_for(s.cached if upto is None else upto)
            if s.cached > s.stored:
                copies += [(s.row, i, s.pages[i]) for i in range(s.stored // self._page, last)]
        for lane, part in self._by_lane(copies):
            for rows, index, pages in _parts(part, 0, 0, self.tree.capacity):
                self._pool = self._programs.store(self._pool, self.caches[lane], rows, index, pages)

    def _by_lane(self, copies: list[tuple[int, int, int]]):
        """(lane, its copies, whose rows are now counted in it)."""
        lanes: dict[int, list[tuple[int, int, int]]] = {}
        for row, index, page in copies:
            lanes.setdefault(row // self._lane_rows, []).append((row % self._lane_rows, index, page))
        return lanes.items()

    def wait(self) -> None:
        """Until everything asked of the device is done."""
        jax.block_until_ready(self.caches)


def _powers(most: int) -> list[int]:
    sizes = [8]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes


def _parts(copies: list[tuple[int, int, int]], *padding: int):
    """`copies` as arrays of few lengths."""
    for begin in range(0, len(copies), COPIES[-1]):
        part = copies[begin : begin + COPIES[-1]]
        size = bucket(len(part), COPIES)
        part = part + [padding] * (size - len(part))
        yield tuple(np.array(part, np.int32).T)

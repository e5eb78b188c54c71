"""Pages of KV in host memory, behind those of the device: what was given up there comes back by a copy.

The second tier of a two-tier cache (SGLang's HiCache). It is written when the device gives a page up, keeps what it
lends, and forgets the least recently used, of one prefix its end first: what comes after a gap cannot be found. A page
is known by a hash of everything up to its end.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from venusrl.models.config import ModelConfig
from venusrl.rollout.engine.cache import LayerCache, new_pool

Key = bytes


class HostTier:
    """Holds up to `pages` pages of `page` tokens."""

    def __init__(self, config: ModelConfig, pages: int, page: int):
        self._page = page
        one = new_pool(config, 1, page)  # for shapes and types
        self._pool = [LayerCache(*(np.zeros((pages, *x.shape[1:]), x.dtype) for x in layer)) for layer in one]
        self._slots: OrderedDict[Key, int] = OrderedDict()  # the least recently used first
        self._born = np.zeros(pages, np.int64)
        self._free = list(range(pages - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, namespace: Hashable, tokens: Sequence[int], start: int, limit: int) -> list[int]:
        """Slots of the pages that go on from the first `start` tokens, a whole number of pages, and end by `limit`."""
        found: list[tuple[Key, int]] = []
        if not self._slots:
            return []
        for number, key in enumerate(self._keys(namespace, tokens[:limit])):
            if number * self._page < start:
                continue
            slot = self._slots.get(key)
            if slot is None:
                break
            found.append((key, slot))
        for key, _ in reversed(found):
            self._slots.move_to_end(key)
        return [slot for _, slot in found]

    def read(self, slots: Sequence[int], size: int) -> tuple[list[LayerCache], int]:
        """(copies of `slots`, by layer, padded to `size` pages, when the oldest of them was computed)."""
        where = np.zeros(size, np.int64)
        where[: len(slots)] = slots
        blocks = [LayerCache(layer.keys[where], layer.values[where]) for layer in self._pool]
        return blocks, int(self._born[list(slots)].min())

    def write(self, namespace: Hashable, tokens: Sequence[int], blocks: list[LayerCache], born: int) -> None:
        """Takes the last pages of `tokens`, a whole number of pages; as many as `blocks` holds, computed at `born`."""
        keys = list(self._keys(namespace, tokens))[-len(blocks[0].keys) :]
        where, what = [], []
        for number, key in reversed(list(enumerate(keys))):
            if key in self._slots:
                self._slots.move_to_end(key)
                continue
            self._slots[key] = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._born[self._slots[key]] = born
            where.append(self._slots[key])
            what.append(number)
        # A slot that was taken twice, where more came than there are, holds what came last.
        for layer, block in zip(self._pool, blocks, strict=True):
            layer.keys[where], layer.values[where] = block.keys[what], block.values[what]

    def drop(self) -> None:
        """Forgets everything."""
        self._free += self._slots.values()
        self._slots.clear()

    def _keys(self, namespace: Hashable, tokens: Sequence[int]) -> Iterator[Key]:
        """Of each whole page of `tokens`."""
        so_far = hashlib.blake2b(repr(namespace).encode(), digest_size=16)
        data = np.asarray(tokens, np.int32)
        for end in range(self._page, len(data) + 1, self._page):
            so_far.update(data[end - self._page : end].tobytes())
            yield so_far.digest()

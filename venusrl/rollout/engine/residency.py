"""In which order cached pages are given up. Pure: an order is a function of what is known of a leaf.

`references` is how many trajectories of high priority have the page in their prefix, also while they are in a tool
(the paper's KV residency); `last_use` and `uses` are counted by the engine's own clock, one tick a look-up.
"""

from collections.abc import Callable
from typing import Protocol

from venusrl.core.names import check_name


class Leaf(Protocol):
    references: int
    last_use: int
    uses: int


Order = Callable[[Leaf], tuple]  # the least goes first


def by_references(leaf: Leaf) -> tuple:
    """Unreferenced pages first, then those with few references; the least recently used first among equals."""
    return (leaf.references, leaf.last_use)


def least_recently_used(leaf: Leaf) -> tuple:
    return (leaf.last_use,)


def least_frequently_used(leaf: Leaf) -> tuple:
    return (leaf.uses, leaf.last_use)


ORDERS: dict[str, Order] = {
    "references": by_references,
    "lru": least_recently_used,
    "lfu": least_frequently_used,
}


def order(name: str) -> Order:
    """Raises:
    ConfigError: no such order.
    """
    check_name("rollout.residency", name, ORDERS)
    return ORDERS[name]

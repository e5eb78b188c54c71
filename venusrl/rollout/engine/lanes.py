"""Parts of the slots that are computed at once, each dispatched by a thread of its own.

On a CPU one program does not fill two cores: its operations are short, and a core that waits for the next costs more
to wake than the operation takes. Two programs on half of the rows each fill them. Every lane reads all weights, so this
pays while those are small: tokens a second of two lanes against one, 32 rows on two cores: 1.75 times with 0.85 million
values, 1.5 with 6, 1.08 with 55, 0.87 with 135 million (`python -m launchers.bench.engine --lanes=1` compares).
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

MOST_VALUES = 64_000_000  # of weights, above which one lane is faster
LEAST_ROWS = 8  # of a lane, below which dispatch costs more than it gains


def fitting(params: Any, slots: int) -> int:
    """Lanes for these weights and slots on this process's device: on a CPU one a core, as far as that is faster."""
    if jax.default_backend() != "cpu" or sum(x.size for x in jax.tree.leaves(params)) > MOST_VALUES:
        return 1
    return max(1, min(len(os.sched_getaffinity(0)), slots // LEAST_ROWS))


class Lanes:
    """Runs one job a lane at the same time. A job dispatches a program; JAX orders programs by the thread that
    dispatches them, so those of one thread would wait for one another."""

    def __init__(self, count: int):
        self._threads = ThreadPoolExecutor(count - 1, thread_name_prefix="lane") if count > 1 else None

    def run(self, jobs: list[Callable[[], Any]]) -> list[Any]:
        """The jobs' results, in order.

        Raises:
          what the first job that failed raised, once all have ended.
        """
        if not jobs:
            return []
        others = [self._threads.submit(job) for job in jobs[1:]]
        try:
            first = jobs[0]()
        finally:
            errors = [job.exception() for job in others]
        for error in errors:
            if error is not None:
                raise error
        return [first, *(job.result() for job in others)]

"""The order in which tasks are tried: seeded, a fresh permutation every epoch, resumable from one number."""

import numpy as np

from venusrl.core.errors import ConfigError


class PromptStream:
    """An endless, deterministic stream of (epoch, task index).

    Its whole state is `cursor`, the number of prompts given so far.
    """

    def __init__(self, num_tasks: int, seed: int, cursor: int = 0):
        if num_tasks < 1:
            raise ConfigError(f"env.train_tasks={num_tasks}; there must be at least one task")
        self._num_tasks = num_tasks
        self._seed = seed
        self.cursor = cursor
        self._epoch = -1
        self._order: np.ndarray | None = None

    def next(self) -> tuple[int, int]:
        """(epoch, task index) of the next prompt."""
        epoch, place = divmod(self.cursor, self._num_tasks)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self._num_tasks)
            self._epoch = epoch
        self.cursor += 1
        return epoch, int(self._order[place])

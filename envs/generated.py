"""Task sets whose tasks are generated from (split, index, seed): what the environments here share."""

from collections.abc import Callable
from typing import Any, ClassVar

from venusrl.core.env import Env
from venusrl.sandbox import SandboxPool


class GeneratedTasks:
    """The tasks of one split; see venusrl.core.env.TaskSet. A subclass names its parts.

    Attributes:
      generate: (split, index, seed) to the task.
      episode: (task, pool, max_turns, command_s) to its Env.
      described: fields of a task that the log shows.
    """

    generate: ClassVar[Callable[[str, int, int], Any]]
    episode: ClassVar[Callable[[Any, SandboxPool, int, float], Env]]
    described: ClassVar[tuple[str, ...]]

    def __init__(
        self, pool: SandboxPool, split: str, num_tasks: int, seed: int = 0, max_turns: int = 12, command_s: float = 10.0
    ):
        self._pool = pool
        self._split = split
        self._num_tasks = num_tasks
        self._seed = seed
        self._max_turns = max_turns
        self._command_s = command_s

    def __len__(self) -> int:
        return self._num_tasks

    def task(self, index: int) -> Any:
        return self.generate(self._split, index, self._seed)

    def make(self, index: int) -> Env:
        return self.episode(self.task(index), self._pool, self._max_turns, self._command_s)

    def describe(self, index: int) -> dict[str, Any]:
        task = self.task(index)
        return {name: getattr(task, name) for name in self.described}

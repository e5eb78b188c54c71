"""Held-out success: one episode a task, apart from training."""

import asyncio
import dataclasses

from venusrl.core.env import TaskSet
from venusrl.core.trajectory import Trajectory
from venusrl.rollout.service import RolloutService


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Attributes:
    trajectories: the finished ones, in task order.
    lost: reasons of episodes that failed after all attempts; not counted as failures of the policy.
    """

    trajectories: tuple[Trajectory, ...]
    lost: tuple[str, ...]

    @property
    def successes(self) -> float:
        return sum(t.reward for t in self.trajectories)

    @property
    def rate(self) -> float:
        """Mean reward of the finished episodes."""
        return self.successes / len(self.trajectories) if self.trajectories else 0.0


async def evaluate(
    service: RolloutService, tasks: TaskSet, count: int, concurrency: int, seed: int = 0, attempts: int = 3
) -> Evaluation:
    """Runs tasks 0 to `count` - 1 once each, `concurrency` at a time; a lost episode is tried `attempts` times.

    Sampling is seeded by (seed, task): the same weights give the same result. `service` is used for this alone.
    """
    count = min(count, len(tasks))
    finished: dict[int, Trajectory] = {}
    lost: list[str] = []
    waiting = [(task, 0) for task in reversed(range(count))]
    running: dict[str, tuple[int, int]] = {}
    while waiting or running:
        while waiting and len(running) < concurrency:
            task, attempt = waiting.pop()
            name = f"eval/{task}" + (f"r{attempt}" if attempt else "")
            running[name] = (task, attempt)
            service.start(Trajectory(name, "eval", task, seed=seed * 1_000_003 + task), tasks.make(task))
        outcome = await service.outcomes.get()
        task, attempt = running.pop(outcome.trajectory.id)
        if outcome.lost is None:
            finished[task] = outcome.trajectory
        elif attempt + 1 < attempts:
            waiting.append((task, attempt + 1))
        else:
            lost.append(f"task {task}: {outcome.lost}")
        await asyncio.sleep(0)
    return Evaluation(tuple(finished[i] for i in sorted(finished)), tuple(lost))

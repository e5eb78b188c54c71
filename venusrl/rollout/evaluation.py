"""Held-out success: one episode a task, beside whatever else the service drives."""

import asyncio
import dataclasses

from venusrl.core.env import TaskSet
from venusrl.core.group import Group
from venusrl.core.trajectory import Trajectory, sampling_seed
from venusrl.rollout.service import Outcome, RolloutService

ATTEMPTS = 3  # at an episode that is lost


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
    def rate(self) -> float | None:
        """Mean reward of the finished episodes; None where every one was lost, which says nothing of the policy."""
        return self.successes / len(self.trajectories) if self.trajectories else None


async def evaluate(
    service: RolloutService, tasks: TaskSet, count: int, concurrency: int, temperature: float, seed: int
) -> Evaluation:
    """Runs tasks 0 to `count` - 1 once each, `concurrency` at a time; a lost episode is tried again.

    Sampling is seeded by (seed, task): the same weights give the same result, whatever else is running.
    """
    count = min(count, len(tasks))
    outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
    finished: dict[int, Trajectory] = {}
    lost: list[str] = []
    waiting = [(task, 0) for task in reversed(range(count))]
    running: dict[str, int] = {}  # attempts that failed so far, by trajectory
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                task, failed = waiting.pop()
                name = f"eval/{task}" + (f"r{failed}" if failed else "")
                trajectory = Trajectory(name, name, task, seed=sampling_seed(seed, task))
                running[name] = failed
                service.open_group(Group(name, task, 0, 0, [trajectory]), training=False)
                service.start(trajectory, tasks.make(task), temperature, outcomes)
            outcome = await outcomes.get()
            service.close_group(outcome.trajectory.id, ready=False)
            task, failed = outcome.trajectory.index, running.pop(outcome.trajectory.id) + 1
            if outcome.lost is None:
                finished[task] = outcome.trajectory
            elif failed < ATTEMPTS:
                waiting.append((task, failed))
            else:
                lost.append(f"task {task}: {outcome.lost}")
            await asyncio.sleep(0)
    finally:
        for name in running:  # given up by the caller
            service.cancel(name)
            service.close_group(name, ready=False)
    return Evaluation(tuple(finished[i] for i in sorted(finished)), tuple(lost))

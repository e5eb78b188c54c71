"""Held-out success of a run's newest checkpoint, with a 95% confidence interval.

    python -m launchers.evaluate --workdir=runs/quickstart --tasks=200
    python -m launchers.evaluate --workdir=runs/quickstart --baseline=one_fix

It generates with an engine of its own, whatever the run was trained with: a run's workers may be at work for it. With
--addresses it asks for workers in other processes. The last line is one JSON object.
"""

import asyncio
import json
import os
from collections import defaultdict

from absl import flags

from configs import limits
from envs.repair.baselines import BASELINES
from envs.repair.env import RepairTasks
from launchers import program, system
from launchers.configuration import load_config
from launchers.finished import newest
from launchers.run_id import named
from venusrl.core.errors import ConfigError, TaskError
from venusrl.observe.intervals import wilson
from venusrl.rollout.evaluation import evaluate
from venusrl.sandbox import SandboxPool

_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Folder of the run.")
_TASKS = flags.DEFINE_integer(
    "tasks", None, "Held-out tasks, from the first. Default: 200, or all where the run has fewer.", lower_bound=1
)
_TEMPERATURE = flags.DEFINE_float("temperature", None, "Of sampling; 0 is greedy. Default: the run's eval.temperature.")
_BASELINE = flags.DEFINE_enum(
    "baseline", None, list(BASELINES), "A scripted policy instead of the run's (repair only)."
)
_ADDRESSES = flags.DEFINE_list(
    "addresses", [], "Workers in other processes that are to generate, in place of an engine in this one."
)

_DEFAULT_TASKS = 200

Graded = list[tuple[str, float]]  # (family, reward) of each task


async def _policy(config, count: int) -> tuple[Graded, int]:
    """Results of the newest checkpoint, and the number of lost episodes."""
    model = system.load_model(config)
    step, state = newest(config, model.config, _WORKDIR.value)
    print(f"step {step} of {_WORKDIR.value}, temperature {config.eval.temperature}")
    name = named(os.urandom(8).hex(), f"evaluation of {_WORKDIR.value}")
    async with system.open_rollout(config, model, state.params, step, run=name, patient=False) as rollout:
        tasks = rollout.heldout_tasks
        result = await evaluate(
            rollout.service, tasks, count, config.rollout.slots, config.eval.temperature, config.seed
        )
        graded = [(tasks.describe(t.index).get("family", "all"), t.reward) for t in result.trajectories]
        if not graded:
            raise TaskError(f"no episode came to its end; the first: {result.lost[0]}")
        return graded, len(result.lost)


async def _baseline(config, count: int) -> tuple[Graded, int]:
    """Results of a scripted policy."""
    if config.env.name != "repair":
        raise ConfigError(f"--baseline is for env.name='repair', this run has {config.env.name!r}")
    limit = asyncio.Semaphore(8)

    async def one(tasks: RepairTasks, index: int) -> tuple[str, float]:
        async with limit:
            env = tasks.make(index)
            try:
                await env.reset()
                for reply in BASELINES[_BASELINE.value](env.task):
                    await env.step(reply)
                return env.task.family, await env.grade()
            finally:
                await env.close()

    async with SandboxPool(max_sandboxes=config.sandbox.max_sandboxes) as pool:
        tasks = system.make_tasks(config, pool, "heldout")
        return list(await asyncio.gather(*(one(tasks, i) for i in range(count)))), 0


def _count(config) -> int:
    """Held-out tasks to evaluate."""
    there = config.env.heldout_tasks
    count = min(_DEFAULT_TASKS, there) if _TASKS.value is None else _TASKS.value
    if count > there:
        raise ConfigError(f"--tasks={count} is above the {there} held-out tasks of the run (env.heldout_tasks)")
    return count


def main(argv) -> None:
    del argv
    config = load_config(_WORKDIR.value)
    config.rollout.addresses = tuple(_ADDRESSES.value)  # those of the run may be at work for it
    system.check(config)
    if _TEMPERATURE.value is not None:
        if wrong := limits.RUN["eval.temperature"].wrong(_TEMPERATURE.value):
            raise ConfigError(f"--temperature={_TEMPERATURE.value}: {wrong}")
        config.eval.temperature = _TEMPERATURE.value
    system.use_compile_cache()
    work = _baseline if _BASELINE.value else _policy
    graded, lost = asyncio.run(work(config, _count(config)))
    families = defaultdict(list)
    for family, reward in graded:
        families[family].append(reward)
    for family, rewards in sorted(families.items()):
        print(f"  {family:12s} {sum(rewards) / len(rewards):.3f} of {len(rewards)}")
    successes = sum(reward for _, reward in graded)
    low, high = wilson(successes, len(graded))
    rate = successes / len(graded)
    print(f"held-out success {rate:.3f}, 95% interval [{low:.3f}, {high:.3f}], {len(graded)} tasks, {lost} lost")
    print(json.dumps({"heldout_success": rate, "low": low, "high": high, "tasks": len(graded), "lost": lost}))


if __name__ == "__main__":
    program.run(main)

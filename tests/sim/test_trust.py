"""The simulator against the live service: the same coordinator, policies and trajectories, on the JAX engine.

The cost of the engine's steps, and of a turn of a single trajectory around them, is measured first; nothing is fitted
to the run that is predicted. Batch times must agree within 15%.
"""

import asyncio
import contextlib
import random
import statistics
import time

import flax.linen as nn
import jax
import pytest

from launchers.bench.calibrate import admit_s, measured_cost
from tests.rollout.scripted import Script
from venusrl.coordinator.coordinator import Coordinator, CoordinatorOptions
from venusrl.coordinator.prompts import PromptStream
from venusrl.coordinator.rules import make_rule
from venusrl.core.clock import WallClock
from venusrl.core.env import Observation
from venusrl.core.trajectory import Trajectory
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import init_params
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.jax_worker import JaxWorker
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.service import RolloutOptions, RolloutService
from venusrl.scheduling import SchedulerOptions, make_policy
from venusrl.sim.cluster import Cluster
from venusrl.sim.simulation import Simulation
from venusrl.sim.systems import system
from venusrl.sim.workload import TrajectorySpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OUTPUT = 32  # tokens of every turn: no token stops it
ANSWER = "go on please"
TRAIN_S = 0.4
SLOTS = 8
LENGTH = 768
OPTIONS = CoordinatorOptions(group_size=4, batch_groups=4, async_factor=2.0, updates=5)


class TimedEnv:
    """An episode of as many turns, with tools as slow, as its tools tell."""

    def __init__(self, tools: tuple[float, ...]):
        self._tools = list(tools)

    async def reset(self):
        return [{"role": "user", "content": ANSWER}]

    async def step(self, reply):
        await asyncio.sleep(self._tools.pop(0))
        return Observation(ANSWER, done=not self._tools)

    async def grade(self):
        return 1.0

    async def close(self): ...


class Timed:
    """The same trajectories for the live run and the simulated one."""

    def __init__(self, chat):
        self.num_tasks, self.max_tokens = 1000, 9 * (OUTPUT + 32)
        self._prompt = len(chat.prompt([{"role": "user", "content": ANSWER}]))
        self._observation = len(chat.observation(ANSWER, 0))

    def trajectory(self, prompt: int, epoch: int, index: int, refill: int) -> TrajectorySpec:
        rng = random.Random(f"{prompt}/{index}")
        mean = 2 + 6 * random.Random(prompt).random()  # group-mates are alike
        turns = max(1, min(9, round(mean * rng.uniform(0.7, 1.3))))
        tools = tuple(rng.choice([0.02, 0.1, 0.6]) for _ in range(turns))
        return TrajectorySpec(self._prompt, (OUTPUT,) * turns, (self._observation,) * turns, tools)


@contextlib.asynccontextmanager
async def serving(name: str, engine: Engine, script: Script):
    worker = JaxWorker("w", engine)
    await worker.start()
    policy = make_policy(name, SchedulerOptions(OPTIONS.batch_groups, OPTIONS.eta))
    service = RolloutService({"w": worker}, policy, script.chat, WallClock(), RolloutOptions(1.0, OUTPUT, 60.0))
    try:
        yield service
    finally:
        await service.close()
        await worker.close()


async def lone_turn_s(engine: Engine, script: Script) -> float:
    """Seconds of a turn of a trajectory that is alone, without a tool; of three, after one that compiles."""
    medians = []
    async with serving("fcfs_action", engine, script) as service:
        for i in range(4):
            t = Trajectory(f"g{i}/0", f"g{i}", 0)
            service.start(t, TimedEnv((0.0,) * 9))
            await service.outcomes.get()
            medians.append(statistics.median(turn.generate_s + turn.tool_s for turn in t.turns[1:]))
    return statistics.median(medians[1:])


async def live(name: str, engine: Engine, params, script: Script, workload: Timed) -> list[float]:
    """Times at which batches are published."""
    coordinator = Coordinator(PromptStream(workload.num_tasks, 0), OPTIONS, make_rule(name))
    began, published = time.perf_counter(), []
    async with serving(name, engine, script) as service:
        while coordinator.version < OPTIONS.updates:
            for group in coordinator.admit():
                service.open_group(group)
                for t in group.trajectories:
                    spec = workload.trajectory(group.prompt_id, group.epoch, t.index, 0)
                    service.start(t, TimedEnv(spec.tools))
            batch = coordinator.take_batch()
            if batch is None:
                outcome = await service.outcomes.get()
                assert outcome.lost is None, outcome.lost
                # Group-mates that ended together make it ready with the first of them that is reported.
                known = coordinator.group(outcome.trajectory.group_id) is not None
                if known and (ready := coordinator.trajectory_done(outcome.trajectory)) is not None:
                    service.close_group(ready.id)
                continue
            service.batch_taken(len(batch.groups))
            await asyncio.sleep(TRAIN_S)
            await service.update_weights(params, engine.version + 1)
            coordinator.published(coordinator.version + 1)
            published.append(time.perf_counter() - began)
    return published


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def model(script):
    config = ModelConfig(script.tokenizer.vocab_size, 128, 4, 4, 2, 64, 320, rope_theta=1e4, max_length=LENGTH)
    return config, nn.unbox(init_params(config, jax.random.key(0)))


@pytest.mark.parametrize("name", ["venus", "fcfs_action", "fcfs_trajectory"])
def test_batch_times_of_a_live_run_are_predicted(name, script, model):
    config, params = model
    # One shape of everything, so that a step costs the same whatever is in it.
    options = EngineOptions(
        slots=SLOTS,
        max_length=LENGTH,
        decode_steps=4,
        decode_rows=(),
        prefill_rows=(1,),
        prefill_tokens=(32, 128),
        read_lengths=(),
    )
    never = (config.vocab_size,)
    engine = Engine(config, params, 0, never, options)
    workload = Timed(script.chat)
    cost = measured_cost(engine, options.pages * options.page)
    turn = workload.trajectory(0, 0, 0, 0)
    wait_s = admit_s(asyncio.run(lone_turn_s(engine, script)), cost, engine, OUTPUT, turn.observations[0])
    was = asyncio.run(live(name, engine, params, script, workload))
    cluster = Cluster(cost, None, workers=1, slots=SLOTS, train_s=TRAIN_S, admit_s=wait_s)
    said = Simulation(system(name), cluster, workload, OPTIONS).run().batches_s
    print(f"{name}: {cost}, {wait_s:.4f} s to admit")
    print(f"  live      {[round(x, 2) for x in was]}\n  simulated {[round(x, 2) for x in said]}")
    for simulated, measured in zip(said[1:], was[1:], strict=True):
        assert simulated == pytest.approx(measured, rel=0.15)

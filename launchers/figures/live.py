"""Live runs on JAX engines, for figures: the whole service, with lengths and tools of trajectories that are given.

Everything is real but the model's weights and what the tools say: a turn generates as many tokens as its trajectory
has there, and its tool takes as long. Lengths and times are those of the simulator's workload, so many times smaller.
Weights are published, and are the same, and KV of old ones is kept: what is computed again is what had no room.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator

from absl import logging

from launchers.bench.common import random_params
from launchers.figures.common import Settings
from venusrl.coordinator.coordinator import Coordinator, CoordinatorOptions
from venusrl.coordinator.prompts import PromptStream
from venusrl.coordinator.rules import make_rule
from venusrl.core.clock import WallClock
from venusrl.core.env import Observation
from venusrl.core.errors import VenusError
from venusrl.core.trajectory import Trajectory
from venusrl.models.chat import ChatFormat
from venusrl.models.config import ModelConfig
from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.jax_worker import JaxWorker
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.service import RolloutOptions, RolloutService
from venusrl.rollout.worker import Chunk, Request, total
from venusrl.scheduling import SchedulerOptions, make_policy
from venusrl.sim.systems import system
from venusrl.sim.workload import Generated, TrajectorySpec

GROUP, BATCH, ASYNC = 8, 4, 2.0
SLOTS, LENGTH = 16, 1024  # of a worker
TOKEN_SCALE, TOOL_SCALE = 48, 50
MAX_TOKENS = LENGTH // 2  # of a turn
TEXT = "the tool says that it has done what it was asked to do 0123456789"


@dataclasses.dataclass(frozen=True)
class LiveCell:
    """One live run. Attributes:
    system: name of a simulated system (sim/systems.py); its policy, switches and host memory are used.
    switches: fields of SchedulerOptions beside those of the system.
    residency: order in which the engine gives pages up.
    load: tokens of context of all open trajectories, over a trajectory's time, against the KV of all workers.
    """

    system: str
    switches: tuple[tuple[str, object], ...] = ()
    residency: str = "references"
    load: float = 2.0
    workers: int = 2
    updates: int = 6
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class LiveOutcome:
    """Attributes:
    total_s: seconds to the last batch, from a cold start.
    hit: share of the context tokens that a worker had computed before and that were not computed again.
    kept: share that was still there, of the contexts of trajectories that stayed resident between two turns.
    moved: actions that took their KV to another worker.
    retracted: requests that had to wait again.
    prefilled, returned: tokens, the latter from host memory.
    """

    total_s: float
    hit: float
    kept: float
    moved: int
    retracted: int
    prefilled: int
    returned: int


class Small:
    """The simulator's trajectories with fewer tokens and faster tools."""

    def __init__(self, seed: int):
        self._whole = Generated(seed, max_tokens=TOKEN_SCALE * (LENGTH - 64) // 2, tool_scale=1 / TOOL_SCALE)
        self.num_tasks = self._whole.num_tasks

    def trajectory(self, prompt: int, epoch: int, index: int) -> TrajectorySpec:
        s = self._whole.trajectory(prompt, epoch, index, 0)

        def small(tokens):
            return tuple(min(MAX_TOKENS, max(1, round(n / TOKEN_SCALE))) for n in tokens)

        return TrajectorySpec(small([s.prompt])[0], small(s.outputs), small(s.observations), s.tools)

    def mean_context(self, groups: int = 64) -> float:
        """Tokens of a trajectory's context, averaged over its turns and over trajectories."""
        means = []
        for prompt in range(groups):
            s = self.trajectory(prompt, 0, 0)
            context, contexts = s.prompt, []
            for output, observation in zip(s.outputs, s.observations, strict=True):
                contexts.append(context + output)
                context += output + observation
            means.append(sum(contexts) / len(contexts))
        return sum(means) / len(means)


class TimedEnv:
    """An episode that goes as its trajectory says; `plan` is told how long the next turn is."""

    def __init__(self, name: str, spec: TrajectorySpec, plan: dict[str, int]):
        self._name, self._spec, self._plan, self._turn = name, spec, plan, 0

    async def reset(self):
        self._plan[self._name] = self._spec.outputs[0]
        return [{"role": "user", "content": _text(self._spec.prompt)}]

    async def step(self, reply: str) -> Observation:
        del reply
        await asyncio.sleep(self._spec.tools[self._turn])
        said = _text(self._spec.observations[self._turn])
        self._turn += 1
        done = self._turn == len(self._spec.outputs)
        if not done:
            self._plan[self._name] = self._spec.outputs[self._turn]
        return Observation(said, done=done)

    async def grade(self) -> float:
        return 1.0

    async def close(self) -> None:
        self._plan.pop(self._name, None)


def _text(tokens: int) -> str:
    """A text of about so many tokens."""
    words = TEXT.split()
    return " ".join(words[i % len(words)] for i in range(max(1, tokens // 2)))


class PlannedWorker(JaxWorker):
    """Generates as many tokens as `plan` says."""

    def __init__(self, name: str, engine: Engine, plan: dict[str, int]):
        super().__init__(name, engine)
        self._plan = plan

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        made = MAX_TOKENS - request.max_tokens  # of this turn, before it was preempted
        left = max(1, self._plan[request.trajectory] - made)
        return super().generate(dataclasses.replace(request, max_tokens=left))


def run_live(cell: LiveCell) -> LiveOutcome:
    """Runs one cell. The first of its shape compiles, too."""
    return asyncio.run(_Run(cell).run())


def run_seeds(cells: dict[str, LiveCell], settings: Settings) -> dict[str, list[LiveOutcome]]:
    """Every cell with every seed; cells take turns, so that a machine whose speed drifts slows all of them."""
    for cell in {(c.load, system(c.system).host): c for c in cells.values()}.values():
        run_live(dataclasses.replace(cell, updates=1))  # compiles
    runs: dict[str, list[LiveOutcome]] = {name: [] for name in cells}
    for seed in range(settings.seeds):
        for name, cell in cells.items():
            outcome = run_live(dataclasses.replace(cell, seed=seed, updates=1 if settings.quick else cell.updates))
            runs[name].append(outcome)
            logging.info("live, load %.1f, %s, seed %d: %s", cell.load, name, seed, outcome)
    return runs


class _Run:
    def __init__(self, cell: LiveCell):
        self.cell = cell
        tokenizer = Tokenizer.train([TEXT, "user\nassistant\n"], 300)
        self.chat = ChatFormat(tokenizer)
        config = ModelConfig(tokenizer.vocab_size, 128, 4, 4, 2, 32, 384, rope_theta=1e4, max_length=LENGTH)
        self.workload = Small(cell.seed)
        open_tokens = ASYNC * BATCH * GROUP * Small(0).mean_context()  # of one size, so that nothing compiles anew
        kv_tokens = max(2 * LENGTH, int(open_tokens / cell.load / cell.workers))
        self.what = system(cell.system)
        options = EngineOptions(
            slots=SLOTS,
            lanes=1,  # the workers share the cores
            max_length=LENGTH,
            kv_tokens=kv_tokens,
            host_tokens=int(self.what.host * kv_tokens),
            residency=cell.residency,
            on_update="keep",
            decode_rows=(),
            prefill_rows=(4,),
            prefill_tokens=(32, 128),
            read_lengths=(512,),
        )
        self.params, self.plan = random_params(config), {}
        never = (config.vocab_size,)  # no token ends a turn
        engines = [Engine(config, self.params, 0, never, options) for _ in range(cell.workers)]
        self.workers = [PlannedWorker(f"w{i}", engine, self.plan) for i, engine in enumerate(engines)]
        self.started: list[Trajectory] = []

    async def run(self) -> LiveOutcome:
        c = self.cell
        options = CoordinatorOptions(GROUP, BATCH, ASYNC, updates=c.updates, seed=c.seed)
        rule = make_rule(self.what.rule or self.what.scheduler)
        coordinator = Coordinator(PromptStream(self.workload.num_tasks, c.seed), options, rule)
        switches = dict(self.what.switches) | dict(c.switches)
        policy = make_policy(self.what.scheduler, SchedulerOptions(BATCH, options.eta, **switches))
        for worker in self.workers:
            await worker.start()
        by_name = {worker.name: worker for worker in self.workers}
        service = RolloutService(by_name, policy, self.chat, WallClock(), RolloutOptions(1.0, MAX_TOKENS, 600.0))
        began = time.perf_counter()
        try:
            await self._batches(coordinator, service)
            took, moved = time.perf_counter() - began, service.moved
            load = total(worker.load() for worker in self.workers)
        finally:
            await service.close()
            for worker in self.workers:
                await worker.close()
        kept = load.kept_hit_tokens / load.kept_tokens if load.kept_tokens else 1.0
        hit = self._hit(load.prefilled_tokens)
        return LiveOutcome(took, hit, kept, moved, load.retracted, load.prefilled_tokens, load.returned_tokens)

    async def _batches(self, coordinator: Coordinator, service: RolloutService) -> None:
        while coordinator.version < self.cell.updates:
            for group in coordinator.admit():
                service.open_group(group)
                for t in group.trajectories:
                    spec = self.workload.trajectory(group.prompt_id, group.epoch, t.index)
                    service.start(t, TimedEnv(t.id, spec, self.plan))
                    self.started.append(t)
            batch = coordinator.take_batch()
            if batch is not None:
                service.batch_taken(len(batch.groups))
                await service.update_weights(self.params, coordinator.version + 1)
                coordinator.published(coordinator.version + 1)
                continue
            outcome = await service.outcomes.get()
            if outcome.lost is not None:
                raise VenusError(f"{outcome.trajectory.id} was lost: {outcome.lost}")
            # Group-mates that ended together make it ready with the first of them that is reported.
            known = coordinator.group(outcome.trajectory.group_id) is not None
            if known and (ready := coordinator.trajectory_done(outcome.trajectory)) is not None:
                service.close_group(ready.id)

    def _hit(self, prefilled: int) -> float:
        """From what was prefilled beyond prompts (once a group) and observations."""
        new, known, prompts = 0, 0, {}
        for t in self.started:
            ends = [turn.end for turn in t.turns]
            if t.turns:
                prompts[t.group_id] = t.turns[0].begin - 1
            for turn, end in zip(t.turns[1:], ends, strict=False):
                known += end - 1
                new += turn.begin - end
        again = prefilled - new - sum(prompts.values())
        return 1.0 - max(0, again) / max(1, known)

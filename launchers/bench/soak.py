"""Random load, cancellations, lost and new workers and weight updates, for as long as it is told to.

    python -m launchers.bench.soak --minutes=30

Two engines of the tiny model, short of KV, with some in host memory, under `venus`. Every trajectory that is started
has to end once, done or cancelled; every page has to be accounted for after every step; memory has to stay flat. The
last line is one JSON object; the exit code is 1 where something of that did not hold.
"""

import asyncio
import json
import random
import resource
import sys
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

from launchers import program
from launchers.bench import common
from venusrl.core.clock import WallClock
from venusrl.core.env import Observation
from venusrl.core.group import Group
from venusrl.core.trajectory import Trajectory
from venusrl.models.chat import ChatFormat
from venusrl.models.config import ModelConfig
from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.jax_worker import JaxWorker
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.service import RolloutOptions, RolloutService
from venusrl.scheduling import SchedulerOptions, make_policy
from venusrl.scheduling.protocol import Preempt

_MINUTES = flags.DEFINE_float("minutes", 30.0, "Minutes to run.", lower_bound=0.05)
_SEED = flags.DEFINE_integer("seed", 0, "Of everything random.", lower_bound=0)

GROUP, GROUPS, BATCH = 4, 12, 6
TEXTS = ["user\nassistant\n", "the tool says that it has done what it was asked to do 0123456789"]
KILL_S, UPDATE_S, CANCEL_S, PREEMPT_S = 20.0, 7.0, 0.5, 0.3  # means of the times between two of each
STUCK_S = 40.0
WARM_SHARE = 0.2  # of the run, in which memory may grow
MEGABYTES = 60.0  # that memory may differ by after that


class RandomEnv:
    """A few turns with short tools; some fail."""

    def __init__(self, rng: random.Random):
        self._rng = random.Random(rng.random())
        self._turns = self._rng.randint(1, 6)

    async def reset(self):
        return [{"role": "user", "content": TEXTS[1][: self._rng.choice([10, 60])]}]

    async def step(self, reply: str) -> Observation:
        await asyncio.sleep(self._rng.expovariate(20.0))
        if self._rng.random() < 0.002:
            raise RuntimeError("the tool is broken")
        self._turns -= 1
        return Observation(TEXTS[1][: self._rng.randint(3, 60)], done=self._turns <= 0)

    async def grade(self) -> float:
        return 1.0

    async def close(self) -> None: ...


class Soak:
    """The run and its counts."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.tokenizer = Tokenizer.train(TEXTS, 300)
        self.chat = ChatFormat(self.tokenizer)
        self.config = ModelConfig(self.tokenizer.vocab_size, 64, 2, 4, 2, 16, 128, rope_theta=1e4, max_length=512)
        self.params = common.random_params(self.config)
        self.options = EngineOptions(
            slots=16,
            max_length=384,
            kv_tokens=3072,
            host_tokens=2048,
            prefill_rows=(4,),
            prefill_tokens=(64,),
            decode_rows=(),
            read_lengths=(),
            stall_s=0.05,
            debug=True,
        )
        self.workers: list[JaxWorker] = []
        self.started: set[str] = set()
        self.ended: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.left: dict[str, int] = {}  # unfinished trajectories of each group
        self.counts = dict.fromkeys(("done", "lost", "kills", "updates", "cancels", "preempts", "batches"), 0)
        self.version = self.opened = self.ready = 0
        self.memory: list[tuple[float, float]] = []
        self.moved = 0
        self.over = False  # nothing new begins

    def new_worker(self) -> JaxWorker:
        engine = Engine(self.config, self.params, self.version, self.chat.stop_tokens, self.options)
        worker = JaxWorker(f"w{self.counts['kills']}-{len(self.workers)}", engine)
        self.workers.append(worker)
        return worker

    async def run(self, seconds: float) -> None:
        first = [self.new_worker(), self.new_worker()]
        for worker in first:
            await worker.start()
        self.policy = make_policy("venus", SchedulerOptions(BATCH, eta=1))
        options = RolloutOptions(1.0, 40, 30.0)
        by_name = {worker.name: worker for worker in first}
        self.service = RolloutService(by_name, self.policy, self.chat, WallClock(), options)
        began = time.monotonic()
        chores = [
            asyncio.create_task(self.every(KILL_S, self.kill)),
            asyncio.create_task(self.every(UPDATE_S, self.update)),
            asyncio.create_task(self.every(CANCEL_S, self.cancel)),
            asyncio.create_task(self.every(PREEMPT_S, self.preempt)),
            asyncio.create_task(self.watch(began)),
        ]
        for _ in range(GROUPS):
            self.open()
        while time.monotonic() - began < seconds:
            taken = asyncio.create_task(self.take_one())
            done, _ = await asyncio.wait({taken, *chores}, timeout=STUCK_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a chore that failed fails the run
            assert done, f"no trajectory ended in {STUCK_S} s: {self.state()}"
            await taken
        self.over = True
        for chore in chores:
            chore.cancel()
        await asyncio.gather(*chores, return_exceptions=True)
        while self.started - self.cancelled - set(self.ended):
            try:
                await asyncio.wait_for(self.take_one(), STUCK_S)
            except TimeoutError:
                raise AssertionError(f"no trajectory ended in {STUCK_S} s: {self.state()}") from None
        await self.service.close()
        self.moved = self.service.moved
        for worker in self.alive():
            self.check_pages(worker)
            await worker.close()

    def state(self) -> str:
        """What is under way, for whoever has to find out why nothing goes on."""
        dispatcher = self.service._dispatcher
        return (
            f"waiting {sorted(dispatcher._waiting)}, running {dispatcher._running}, live "
            f"{ {t.id: t.status.name for t in self.service._live.values()} }, "
            f"workers { {w.name: (w.load(), w.failure) for w in self.workers} }"
        )

    def alive(self) -> list[JaxWorker]:
        return [worker for worker in self.workers if worker.failure is None]

    def check_pages(self, worker: JaxWorker) -> None:
        load = worker.load()
        worker._engine.check()
        assert load.running == load.waiting == 0
        assert load.free_pages + load.evictable_pages == load.pages, "a page is held by nobody"

    def open(self) -> None:
        name = f"g{self.opened}"
        self.opened += 1
        trajectories = [Trajectory(f"{name}/{i}", name, i, seed=self.rng.randrange(2**31)) for i in range(GROUP)]
        self.service.open_group(Group(name, 0, 0, self.version, trajectories))
        self.left[name] = GROUP
        for trajectory in trajectories:
            self.start(trajectory)

    def start(self, trajectory: Trajectory) -> None:
        assert trajectory.id not in self.started
        self.started.add(trajectory.id)
        self.service.start(trajectory, RandomEnv(self.rng))

    async def take_one(self) -> None:
        outcome = await self.service.outcomes.get()
        trajectory = outcome.trajectory
        self.ended[trajectory.id] = self.ended.get(trajectory.id, 0) + 1
        if trajectory.id in self.cancelled:
            return  # it was on its way out already
        if outcome.lost is None:
            self.counts["done"] += 1
            assert len(trajectory.tokens) == len(trajectory.logprobs) == len(trajectory.versions)
        else:
            self.counts["lost"] += 1
            assert "the tool is broken" in outcome.lost, outcome.lost  # nothing else may lose one
        self.close_one(trajectory.group_id)

    def close_one(self, group: str) -> None:
        self.left[group] -= 1
        if self.left[group]:
            return
        del self.left[group]
        self.service.close_group(group)
        self.ready += 1
        if self.ready >= BATCH:
            self.ready -= BATCH
            self.counts["batches"] += 1
            self.service.batch_taken(BATCH)
        if not self.over:
            self.open()

    async def every(self, mean_s: float, act) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / mean_s))
            await act()

    async def kill(self) -> None:
        """A worker's device is lost in mid-step; another one joins."""
        victim = self.rng.choice(self.alive())
        step = victim._engine.step

        def lost():
            step()
            raise RuntimeError("device lost")

        victim._engine.step = lost
        self.counts["kills"] += 1
        fresh = self.new_worker()
        await fresh.start()
        self.service.add_worker(fresh)
        while victim.failure is None:
            await asyncio.sleep(0.01)
        self.workers.remove(victim)
        await asyncio.gather(victim.close(), return_exceptions=True)

    async def update(self) -> None:
        self.version += 1
        self.counts["updates"] += 1
        try:
            await self.service.update_weights(jax.tree.map(lambda x: x * 1.0001, self.params), self.version)
        except Exception as error:
            if "device lost" not in str(error):
                raise
        for worker in self.alive():  # one that joined meanwhile
            if worker._engine.version != self.version:
                await worker.update_weights(self.params, self.version)

    async def cancel(self) -> None:
        running = sorted(self.started - self.cancelled - set(self.ended))
        if not running:
            return
        name = self.rng.choice(running)
        if name not in self.service._live:
            return  # it is on its way out
        self.cancelled.add(name)
        self.counts["cancels"] += 1
        self.service.cancel(name)
        self.close_one(name.split("/")[0])

    async def preempt(self) -> None:
        dispatcher = self.service._dispatcher
        if dispatcher._running:
            self.counts["preempts"] += 1
            name = self.rng.choice(sorted(dispatcher._running))
            worker = dispatcher._workers.get(dispatcher._running[name])
            if worker is not None and worker.failure is None:
                await worker.preempt(Preempt(name).trajectory)

    async def watch(self, began: float) -> None:
        while True:
            await asyncio.sleep(5)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.memory.append((time.monotonic() - began, pages * resource.getpagesize() / 1e6))


def main(argv) -> None:
    del argv
    soak = Soak(_SEED.value)
    asyncio.run(soak.run(_MINUTES.value * 60))
    times, memory = np.array(soak.memory or [(0.0, 0.0)]).T
    settled = memory[times > WARM_SHARE * times[-1]]
    growth = float(settled[-1] - settled[0]) if len(settled) > 1 else 0.0
    twice = [name for name, count in soak.ended.items() if count > 1]
    missing = soak.started - soak.cancelled - set(soak.ended)
    result = {
        "minutes": _MINUTES.value,
        **soak.counts,
        "moved": soak.moved,
        "duplicated": len(twice),
        "missing": len(missing),
        "memory_mb": round(float(memory[-1])),
        "memory_growth_mb": round(growth, 1),
        "memory_mb_over_time": [round(float(mb)) for mb in memory[:: max(1, len(memory) // 30)]],
    }
    print(json.dumps(result))
    sys.exit(bool(twice or missing or growth > MEGABYTES))


if __name__ == "__main__":
    program.run(main, lasting=True)

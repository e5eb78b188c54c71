"""Microseconds that the scheduling policy takes for an event, and events a second of the simulator.

    python -m launchers.bench.scheduler

Trajectories in groups of 8 live through turns and tools on workers whose KV holds about half of them; an event is one
`observe` and one `decide`. Prints one JSON line: p50_us and p99_us by size "TRAJECTORIESxWORKERS", the exponent of p50
against the number of trajectories beside that which log n has over the same sizes, and the events a second of a
simulated run, the best and the median of fifteen (what else a machine does only slows a run), everything on one core.
"""

import gc
import heapq
import json
import math
import random
import re
import statistics
import time

import numpy as np
from absl import flags

from launchers import program
from venusrl.coordinator.coordinator import CoordinatorOptions
from venusrl.core.errors import ConfigError
from venusrl.scheduling import SchedulerOptions, make_policy
from venusrl.scheduling.protocol import (
    ActionDone,
    ActionReady,
    Admit,
    BatchTaken,
    Event,
    GroupClosed,
    GroupOpened,
    Preempt,
    TrajectoryDone,
    VersionPublished,
    WorkerUp,
)
from venusrl.sim.cluster import paper_cluster
from venusrl.sim.simulation import Simulation
from venusrl.sim.systems import system
from venusrl.sim.workload import Generated

_SIZES = flags.DEFINE_list("sizes", ["1024x16", "4096x64", "16384x256", "65536x1024"], "TRAJECTORIESxWORKERS.")
_EVENTS = flags.DEFINE_integer("events", 40_000, "Timed events of each size.", lower_bound=1000)
_POLICY = flags.DEFINE_string("policy", "venus", "Name of the policy.")

GROUP = 8
KV_TOKENS = 1_000_000
MEAN_TURNS = 30
TURNS = 40  # in which the sizes are measured


class Life:
    """Random lives of trajectories around a policy; times every call of it.

    Half of the groups in the system make a batch; when so many are done, the batch is taken and a version published.
    """

    def __init__(self, policy: str, trajectories: int, workers: int, seed: int = 0):
        self.batch = max(1, trajectories // GROUP // 2)
        self.policy = make_policy(policy, SchedulerOptions(self.batch, eta=1))
        self.rng = random.Random(seed)
        self.took: list[int] = []
        self.now = 0.0
        self.version = self.ready = self.opened = 0
        self.heap: list[tuple[float, int, str, str]] = []
        self.serial = 0
        self.left: dict[str, int] = {}  # unfinished trajectories of a group
        self.context: dict[str, int] = {}
        self.generated: dict[str, int] = {}
        self.start: dict[str, int] = {}
        self.running: set[str] = set()
        for worker in range(workers):
            self.tell(WorkerUp(0.0, f"w{worker}", 64, KV_TOKENS))
        for _ in range(trajectories // GROUP):
            self.open()

    def tell(self, event: Event) -> None:
        began = time.perf_counter_ns()
        self.policy.observe(event)
        decisions = self.policy.decide(self.now)
        self.took.append(time.perf_counter_ns() - began)
        for decision in decisions:
            if isinstance(decision, Admit):
                self.running.add(decision.trajectory)
                self.start.setdefault(decision.trajectory, self.version)
                self.later(self.rng.expovariate(0.2), "done", decision.trajectory)
            elif isinstance(decision, Preempt):
                self.later(0.0, "preempt", decision.trajectory)

    def later(self, seconds: float, what: str, name: str) -> None:
        self.serial += 1
        heapq.heappush(self.heap, (self.now + seconds, self.serial, what, name))

    def open(self) -> None:
        group = f"g{self.opened}"
        self.opened += 1
        self.left[group] = GROUP
        self.tell(GroupOpened(self.now, group, GROUP, self.version))
        for i in range(GROUP):
            name = f"{group}/{i}"
            self.context[name], self.generated[name] = 2000, 0
            self.later(self.rng.random() * 30, "ready", name)

    def step(self) -> None:
        self.now, _, what, name = heapq.heappop(self.heap)
        group = name.partition("/")[0]
        if what == "ready":
            turn = self.generated[name] // 250
            self.tell(
                ActionReady(self.now, name, group, self.context[name], self.generated[name], turn, self.start.get(name))
            )
        elif name not in self.running:
            return  # it was preempted, or was done already
        else:
            self.running.discard(name)
            tokens = 250 if what == "done" else 50
            self.context[name] += tokens
            self.generated[name] += tokens
            self.tell(ActionDone(self.now, name, tokens, what == "preempt"))
            if what == "preempt":
                self.later(0.0, "ready", name)
            elif self.rng.random() > 1 / MEAN_TURNS:
                self.context[name] += 600
                self.later(self.rng.expovariate(0.25), "ready", name)
            else:
                self.finish(name, group)

    def finish(self, name: str, group: str) -> None:
        self.tell(TrajectoryDone(self.now, name, group, False))
        self.left[group] -= 1
        if self.left[group]:
            return
        del self.left[group]
        self.tell(GroupClosed(self.now, group))
        self.ready += 1
        self.open()
        if self.ready == self.batch:
            self.ready = 0
            self.version += 1
            self.tell(BatchTaken(self.now, self.batch))
            self.tell(VersionPublished(self.now, self.version))


def measure(policy: str, sizes: list[tuple[int, int]], events: int) -> list[np.ndarray]:
    """Microseconds of each of `events` events at each (trajectories, workers), in the steady state.

    The sizes take turns, so that a machine whose speed drifts slows all of them.
    """
    lives = [Life(policy, trajectories, workers) for trajectories, workers in sizes]
    for life, (trajectories, _) in zip(lives, sizes, strict=True):
        for _ in range(4 * trajectories):
            life.step()
        life.took.clear()
    for turn in range(1, TURNS + 1):
        for life in lives:
            while len(life.took) < events * turn // TURNS:
                life.step()
    return [np.asarray(life.took) / 1000 for life in lives]


def simulated_events_per_s() -> list[float]:
    """Of fifteen runs of the paper's set-up under `venus`, 32 groups a batch, asynchronous; ascending."""
    options = CoordinatorOptions(GROUP, 32, 2.0, updates=3)
    rates = []
    for _ in range(16):
        gc.collect()
        gc.disable()
        report = Simulation(system("venus"), paper_cluster("qwen3-4b", 1), Generated(0), options).run()
        gc.enable()
        rates.append(report.events / report.wall_s)
    return sorted(rates[1:])  # the first warms caches up


def read_size(text: str) -> tuple[int, int]:
    """(trajectories, workers) of an entry of --sizes.

    Raises:
      ConfigError: it is none.
    """
    found = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,4})", text)
    if found is None or int(found[1]) < GROUP * int(found[2]):
        raise ConfigError(f"--sizes: {text!r} is no size; give TRAJECTORIESxWORKERS, {GROUP} trajectories or more each")
    return int(found[1]), int(found[2])


def main(argv: list[str]) -> None:
    del argv
    sizes = [read_size(size) for size in _SIZES.value]
    make_policy(_POLICY.value)  # refused now rather than minutes later
    rates = simulated_events_per_s()  # first, in a small heap
    result: dict = {"policy": _POLICY.value, "p50_us": {}, "p99_us": {}}
    logs = []
    timings = measure(_POLICY.value, sizes, _EVENTS.value)
    for size, (trajectories, _), took in zip(_SIZES.value, sizes, timings, strict=True):
        p50, p99 = np.percentile(took, [50, 99])
        print(f"{size:>12}: p50 {p50:6.1f} us, p99 {p99:6.1f} us, mean {took.mean():6.1f} us", flush=True)
        result["p50_us"][size], result["p99_us"][size] = round(p50, 1), round(p99, 1)
        logs.append((math.log(trajectories), math.log(p50)))
    if len(logs) > 1:
        x, y = np.array(logs).T
        result["exponent"] = round(float(np.polyfit(x, y, 1)[0]), 3)
        result["exponent_of_log"] = round(float(np.polyfit(x, np.log(x), 1)[0]), 3)
        print(f"p50 ~ trajectories^{result['exponent']}; over these sizes log n ~ n^{result['exponent_of_log']}")
    result["sim_events_per_s"] = round(rates[-1])
    result["sim_events_per_s_median"] = round(statistics.median(rates))
    print(json.dumps(result))


if __name__ == "__main__":
    program.run(main)

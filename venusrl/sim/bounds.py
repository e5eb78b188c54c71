"""Lower bounds on the time to train k batches, which no scheduler can beat under the rule of admission.

- path: a trajectory alone on a worker, its KV always there, takes its turns one after the other; a group takes as long
  as its slowest; and a group is not opened before the batches that make place for it are published.
- work: every generated token costs at least its share of a full batch's decode step, every context token is prefilled
  at least once (prompts once a group), on all workers together.
- KV: while a trajectory decodes, its context is in some worker's KV.

The trainer takes one batch at a time. The bounds leave out the staleness rule and what weight updates drop.
"""

import dataclasses

from venusrl.coordinator.coordinator import CoordinatorOptions
from venusrl.coordinator.prompts import PromptStream
from venusrl.sim.cluster import Cluster
from venusrl.sim.workload import TrajectorySpec, Workload


@dataclasses.dataclass(frozen=True)
class _GroupCost:
    """Attributes:
    path: seconds of its slowest trajectory alone.
    work: seconds of all its trajectories on a worker that is full.
    kv: token-seconds of KV.
    train: seconds of the trainer.
    """

    path: float
    work: float
    kv: float
    train: float


def batch_times(cluster: Cluster, workload: Workload, options: CoordinatorOptions) -> list[float]:
    """For k = 1 .. options.updates, seconds before which the k-th batch cannot be published."""
    size, batches = options.batch_groups, options.updates
    in_system = int(options.async_factor * size)
    prompts = PromptStream(workload.num_tasks, options.seed)
    groups = []
    for _ in range((batches - 1) * size + in_system):
        epoch, prompt = prompts.next()
        specs = [workload.trajectory(prompt, epoch, i, 0) for i in range(options.group_size)]
        groups.append(_cost(cluster, specs))
    published: list[float] = []
    for k in range(1, batches + 1):
        candidates = groups[: (k - 1) * size + in_system]
        opened = [_opened(j, in_system, size, published) for j in range(len(candidates))]
        path = sorted(start + g.path for start, g in zip(opened, candidates, strict=True))[k * size - 1]
        # On-policy, nothing of batch k is done before batch k - 1 is published; else work adds up from the start.
        on_policy = in_system == size
        since = published[-1] if on_policy and published else 0.0
        pool = candidates[-size:] if on_policy else candidates
        count = size if on_policy else k * size
        work = since + sum(sorted(g.work for g in pool)[:count]) / cluster.workers
        kv = since + sum(sorted(g.kv for g in pool)[:count]) / (cluster.engine.kv_tokens * cluster.workers)
        ready = max(path, work, kv, published[-1] if published else 0.0)
        train = sum(sorted(g.train for g in candidates)[:size])
        published.append(ready + train + cluster.publish_s)
    return published


def _opened(number: int, in_system: int, size: int, published: list[float]) -> float:
    """Earliest opening of a group: all but `in_system` of those before it are in published batches."""
    batches = -(-(number + 1 - in_system) // size)
    return published[batches - 1] if batches > 0 else 0.0


def _cost(cluster: Cluster, specs: list[TrajectorySpec]) -> _GroupCost:
    engine, slots = cluster.engine, cluster.slots
    paths, work, kv = [], 0.0, 0.0
    for i, spec in enumerate(specs):
        context, path, held = spec.prompt, sum(spec.tools), 0 if i == 0 else spec.prompt
        for output, observation in zip(spec.outputs, spec.observations, strict=True):
            new = max(0, context - held)
            prefill = engine.prefill_s([(new, held)]) if new else 0.0
            alone = output * engine.decode_s(1, context + output / 2)
            path += prefill + alone
            kv += (context + output / 2) * alone
            # A pass with many chunks costs its compute alone; one chunk is charged as if it shared the pass.
            passes = max(1, 8192 // max(1, new))
            work += engine.prefill_s([(new, held)] * passes) / passes if new else 0.0
            work += output * engine.decode_s(slots, slots * (context + output / 2)) / slots
            held = context + output
            context = held + observation
        paths.append(path)
    return _GroupCost(max(paths), work, kv, cluster.train_step_s([s.length for s in specs]))

"""Costs that one can reckon with by hand, and small workloads."""

from venusrl.sim.cluster import Cluster
from venusrl.sim.workload import TrajectorySpec


class PlainCost:
    """A step is 1 s and 0.1 s a request; a prefilled token 0.01 s; a token moves in 1 ms, from host memory in
    2 ms."""

    def __init__(self, kv_tokens: int = 10_000):
        self.kv_tokens = kv_tokens

    def decode_s(self, requests: int, kv_tokens: float) -> float:
        return 1.0 + 0.1 * requests

    def prefill_s(self, chunks: list[tuple[int, int]]) -> float:
        return 0.01 * sum(new for new, _ in chunks)

    def transfer_s(self, tokens: int) -> float:
        return 0.001 * tokens

    def host_s(self, tokens: int) -> float:
        return 0.002 * tokens


class Listed:
    """A workload from a function of (prompt, index)."""

    def __init__(self, make, num_tasks: int = 1000, max_tokens: int = 2000):
        self.make, self.num_tasks, self.max_tokens = make, num_tasks, max_tokens

    def trajectory(self, prompt: int, epoch: int, index: int, refill: int) -> TrajectorySpec:
        return self.make(prompt, index)


def cluster(workers: int = 2, slots: int = 4, kv_tokens: int = 10_000, train_s: float = 5.0, **options) -> Cluster:
    return Cluster(PlainCost(kv_tokens), None, workers, slots, publish_s=1.0, train_s=train_s, **options)

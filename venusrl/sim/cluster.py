"""What the simulated system runs on."""

import dataclasses

from venusrl.core.errors import ConfigError
from venusrl.models.config import model_config
from venusrl.sim.cost import EngineCost, Roofline, TrainerCost, accelerator


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Attributes:
    engine: cost of generation on each worker.
    trainer: cost of a training step; None takes `train_s` for every step.
    workers: number of workers.
    slots: requests that each runs at once.
    publish_s: seconds for which a weight update keeps workers from running.
    train_s: seconds of a training step where there is no `trainer`.
    admit_s: seconds from a decision, to admit or to preempt, until the worker has it; of live systems.
    sandboxes: at once; 0 is no limit. A trajectory above it waits to start.
    """

    engine: EngineCost
    trainer: TrainerCost | None
    workers: int
    slots: int = 64
    publish_s: float = 0.0
    train_s: float = 0.0
    admit_s: float = 0.0
    sandboxes: int = 0

    def __post_init__(self):
        if self.workers < 1 or self.slots < 1 or self.sandboxes < 0:
            raise ConfigError(
                f"workers={self.workers}, slots={self.slots}, sandboxes={self.sandboxes}: at least 1, 1 and 0"
            )

    def train_step_s(self, lengths: list[int]) -> float:
        return self.train_s if self.trainer is None else self.trainer.step_s(lengths)


def paper_cluster(model: str, tensor: int, device: str = "h100", sandboxes: int = 0) -> Cluster:
    """The paper's testbed: 16 accelerators generate, in workers of `tensor` each, and 16 train."""
    shape, kind = model_config(model), accelerator(device)
    if tensor < 1 or 16 % tensor:
        raise ConfigError(f"tensor={tensor} does not divide the 16 generation accelerators")
    trainer = TrainerCost(shape, kind, 16)
    return Cluster(
        Roofline(shape, kind, tensor), trainer, 16 // tensor, publish_s=trainer.publish_s(tensor), sandboxes=sandboxes
    )

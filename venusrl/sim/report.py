"""What a simulated run tells."""

import dataclasses
import statistics

from venusrl.sim.worker import SimWorker


@dataclasses.dataclass
class Report:
    """Attributes:
    batches_s: times at which batches were trained on and published, in seconds.
    taken_s: times at which the trainer took them.
    trained, generated, wasted: tokens that the policy generated: those trained on, all, and those thrown away.
    prefilled: tokens of prefill.
    hit: share of reusable context tokens whose KV was there, on the device or in host memory.
    kept: the same, of trajectories that were resident ever since their last turn: of what fits.
    returned: tokens whose KV came from host memory.
    active: requests in prefill or decode, averaged over time and workers.
    decoding, prefilling: share of the workers' time spent so.
    discards: (length, discarded) of every trajectory that was trained on or thrown away, by discard or restart; the
      length is in generated tokens, those that it would have had where it was cut off.
    stale: batches' trajectories by staleness, in versions.
    preempted, migrated, retracted: counts.
    events: events of the simulation.
    wall_s: seconds that it took.
    """

    batches_s: list[float] = dataclasses.field(default_factory=list)
    taken_s: list[float] = dataclasses.field(default_factory=list)
    trained: int = 0
    generated: int = 0
    wasted: int = 0
    prefilled: int = 0
    hit: float = 0.0
    kept: float = 0.0
    returned: int = 0
    active: float = 0.0
    decoding: float = 0.0
    prefilling: float = 0.0
    discards: list[tuple[int, bool]] = dataclasses.field(default_factory=list)
    stale: dict[int, int] = dataclasses.field(default_factory=dict)
    preempted: int = 0
    migrated: int = 0
    retracted: int = 0
    events: int = 0
    wall_s: float = 0.0

    @property
    def discard_rate(self) -> float:
        return statistics.fmean([d for _, d in self.discards]) if self.discards else 0.0

    def count(self, worker: SimWorker) -> None:
        """Adds what a worker did, once it is gone or the run has ended."""
        self.prefilled += worker.prefilled
        self.hit += worker.hit
        self.kept += worker.kept_hit
        self.returned += worker.returned
        self.retracted += worker.retracted
        self.active += worker.slot_s
        self.decoding += worker.decode_s
        self.prefilling += worker.prefill_s

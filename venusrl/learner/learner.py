"""The learner: batches of groups in, new weights out. Knows nothing of engines, sandboxes or schedulers."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import Mesh

from venusrl.core.errors import ConfigError, NonFiniteError
from venusrl.core.group import Batch
from venusrl.core.trajectory import Trajectory
from venusrl.learner.advantages import group_normalised
from venusrl.learner.objectives import Objective
from venusrl.learner.packing import Rows, pack
from venusrl.learner.state import TrainState, new_state
from venusrl.learner.step import StepOptions, TrainStep
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import init_params
from venusrl.observe.metric import Metric


@dataclasses.dataclass(frozen=True)
class LearnerOptions:
    """Attributes:
    row_length: tokens of a packed row; no trajectory may be longer.
    rows_per_part: rows of one compiled call; parts are accumulated. Divisible by the mesh's data x fsdp.
    minibatches: optimizer steps an update, over rows in random order; more than 1 costs a forward pass for the
      proximal logprobs.
    max_skipped: consecutive non-finite steps that are passed over; one more stops training.
    skip_zero_variance: leave out groups whose rewards are all equal (the filter of DAPO, arXiv 2503.14476, without its
      resampling): their advantages are 0, so only their compute and their share of the denominator are saved. A batch
      of nothing else is looked at whole, for its metrics.
    """

    row_length: int = 512
    rows_per_part: int = 8
    minibatches: int = 1
    max_skipped: int = 5
    skip_zero_variance: bool = False

    def __post_init__(self):
        for name, least in (("row_length", 2), ("rows_per_part", 1), ("minibatches", 1), ("max_skipped", 0)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"learner.{name}={getattr(self, name)} is too small; give {least} or more")


@dataclasses.dataclass(frozen=True)
class _Step:
    """What came of an optimizer step. Attributes:
    learnt: whether it changed anything.
    """

    loss: float
    grad_norm: float
    learnt: bool
    metrics: dict[str, Metric]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Learner:
    """Owns the TrainState. Not thread-safe; one update at a time."""

    def __init__(
        self,
        config: ModelConfig,
        objective: Objective,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        step_options: StepOptions,
        options: LearnerOptions,
    ):
        split = mesh.shape["data"] * mesh.shape["fsdp"]
        if options.rows_per_part % split:
            raise ConfigError(f"learner.rows_per_part={options.rows_per_part} is not a multiple of data x fsdp={split}")
        self.config = config
        self.options = options
        self._optimizer = optimizer
        self._objective = objective
        self._step = TrainStep(config, objective, optimizer, mesh, step_options, options.minibatches > 1)
        self._reference: dict | None = None
        self.state: TrainState | None = None

    @property
    def shardings(self) -> TrainState:
        """Sharding of every leaf of the state."""
        return self._step.shardings

    def init(self, key: jax.Array) -> None:
        """Starts from random parameters."""
        create = jax.jit(
            lambda k: new_state(nn.meta.unbox(init_params(self.config, k)), self._optimizer),
            out_shardings=self.shardings,
        )
        self._set(create(key))

    def start_from(self, params: dict) -> None:
        """Starts from given parameters, with a fresh optimizer.

        Raises:
          ConfigError: their names or shapes are not the model's.
        """
        wanted = jax.eval_shape(lambda k: nn.meta.unbox(init_params(self.config, k)), jax.random.key(0))
        given = {jax.tree_util.keystr(p): np.shape(x) for p, x in jax.tree_util.tree_leaves_with_path(params)}
        needed = {jax.tree_util.keystr(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(wanted)}
        for name in sorted(set(given) | set(needed)):
            if given.get(name) != needed.get(name):
                raise ConfigError(
                    f"parameter {name}: the checkpoint has shape {given.get(name)}, the model {needed.get(name)}; "
                    "model.name does not belong to this checkpoint"
                )
        placed = jax.device_put(params, self.shardings.params, may_alias=False)
        self._set(jax.jit(lambda p: new_state(p, self._optimizer), out_shardings=self.shardings)(placed))

    def abstract_state(self) -> TrainState:
        """Shape, type and sharding of every leaf of the state: what a checkpoint is restored into."""
        shapes = jax.eval_shape(
            lambda k: new_state(nn.meta.unbox(init_params(self.config, k)), self._optimizer), jax.random.key(0)
        )
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    def restore(self, state: TrainState, reference: dict | None = None) -> None:
        """Goes on from a checkpoint's state."""
        self._set(state, reference)

    def update(self, batch: Batch, stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """One batch of groups: advantages inside each group, then one optimizer step a minibatch.

        A step whose advantages are all 0, where the objective has no term without them, leaves parameters and optimizer
        as they are; `nothing_to_learn` is the share of such steps.

        Args:
          batch: of ready groups.
          stop: asked between parts of the first optimizer step; True gives the update up with the state unchanged.

        Returns:
          metrics of the update; None where it was given up.

        Raises:
          NonFiniteError: more than `max_skipped` consecutive steps had a non-finite loss or gradient.
        """
        started = time.perf_counter()
        advantages = [group_normalised(group.rewards) for group in batch.groups]
        pairs = [
            (t, a)
            for group, many in zip(batch.groups, advantages, strict=True)
            for t, a in zip(group.trajectories, many, strict=True)
            if many.any() or not self.options.skip_zero_variance
        ]
        pairs = pairs or [(t, 0.0) for t in batch.trajectories]
        metrics = self.train([t for t, _ in pairs], [a for _, a in pairs], stop)
        if metrics is None:
            return None
        lengths = [len(t) for t in batch.trajectories]
        metrics |= {
            "zero_variance_groups": float(sum(not a.any() for a in advantages)),
            "tokens": float(sum(lengths)),
            "generated_tokens": float(sum(t.num_generated for t in batch.trajectories)),
            "length_mean": float(np.mean(lengths)),
            "turns_mean": float(np.mean([len(t.turns) for t in batch.trajectories])),
            "train_s": time.perf_counter() - started,
        }
        return metrics

    def train(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[float],
        stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Optimizer steps over given trajectories; see `update`.

        Raises:
          ConfigError: a trajectory is longer than `row_length`.
          NonFiniteError: see `update`.
        """
        rows = pack(trajectories, advantages, self.options.row_length).rows
        if self.options.minibatches > 1:
            rows = rows.replace(proximal=self.score_rows(rows))
            order = np.random.default_rng(int(self.state.step)).permutation(len(rows))  # packing sorts them by length
            rows = jax.tree.map(lambda x: x[order], rows)
        per_step = -(-len(rows) // self.options.minibatches)
        steps: list[_Step] = []
        for begin in range(0, len(rows), per_step):
            give_up = stop if begin == 0 else (lambda: False)
            outcome = self._optimizer_step(rows.take(begin, min(begin + per_step, len(rows))), give_up)
            if outcome is None:
                return None
            steps.append(outcome)
        # Numbers of a step that was not finite are none; it is counted.
        finite = [step for step in steps if step.finite]
        metrics = dict.fromkeys(steps[0].metrics, 0.0)
        for name in metrics if finite else ():
            metrics[name] = functools.reduce(Metric.merge, (step.metrics[name] for step in finite)).result()
        return {
            "loss": float(np.mean([step.loss for step in finite])) if finite else 0.0,
            "grad_norm": float(np.mean([step.grad_norm for step in finite])) if finite else 0.0,
            "nonfinite_steps": float(len(steps) - len(finite)),
            "nothing_to_learn": float(np.mean([step.finite and not step.learnt for step in steps])),
            "skipped_in_a_row": float(self.state.skipped),
            "rows": float(len(rows)),
            **metrics,
        }

    def score_rows(self, rows: Rows) -> np.ndarray:
        """Logprobs [R, T] of every token of `rows` under the current parameters; float32."""
        part = self.options.rows_per_part
        scored = [
            np.asarray(self._step.logprobs(self.state.params, self._place(rows.take(i, i + part)))[0])
            for i in range(0, len(rows), part)
        ]
        return np.concatenate(scored)[: len(rows)]

    def score(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Logprobs of every token of each trajectory; the first token of each is 0."""
        packing = pack(trajectories, [0.0] * len(trajectories), self.options.row_length)
        scored = self.score_rows(packing.rows)
        return [
            np.where(np.arange(len(t)) > 0, scored[row, begin : begin + len(t)], 0.0)
            for t, (row, begin) in zip(trajectories, packing.places, strict=True)
        ]

    def _optimizer_step(self, rows: Rows, stop: Callable[[], bool]) -> "_Step | None":
        """One step; None where it was given up."""
        sums = None
        for begin in range(0, len(rows), self.options.rows_per_part):
            if stop():
                return None
            part = self._place(rows.take(begin, begin + self.options.rows_per_part))
            if sums is None:
                sums = self._step.begin(self.state.params, self._reference, part)
            else:
                sums = self._step.accumulate(sums, self.state.params, self._reference, part)
        collected = sums.metrics
        self.state, outcome = self._step.apply(self.state, sums)
        skipped = int(self.state.skipped)
        if skipped > self.options.max_skipped:
            raise NonFiniteError(
                f"{skipped} optimizer steps in a row had a non-finite loss or gradient (learner.max_skipped="
                f"{self.options.max_skipped}); lower learner.learning_rate and start from the last checkpoint"
            )
        return _Step(float(outcome["loss"]), float(outcome["grad_norm"]), bool(outcome["learnt"]), collected)

    def _place(self, rows: Rows) -> Rows:
        return jax.device_put(rows, self._step.rows_sharding)

    def _set(self, state: TrainState, reference: dict | None = None) -> None:
        self.state = state
        if self._objective.needs_reference:
            source = state.params if reference is None else reference
            self._reference = jax.device_put(source, self.shardings.params, may_alias=False)

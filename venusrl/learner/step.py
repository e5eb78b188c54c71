"""The train step: sums over parts of a batch, then one division and one update."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from venusrl.core.errors import ConfigError
from venusrl.learner import sharding
from venusrl.learner.logprobs import token_logprobs
from venusrl.learner.objectives import Objective, TokenStats
from venusrl.learner.packing import Rows
from venusrl.learner.state import TrainState, state_shardings
from venusrl.models.attention import segment_attention
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import Decoder, head_matrix
from venusrl.observe.metric import Metric


class Sums(NamedTuple):
    """What is added up over the parts of a batch.

    Attributes:
      grads, loss: of the summed loss.
      denominator: what both are divided by.
      signal: 0 where there is nothing to learn from: every advantage is 0, and the objective has no other term.
    """

    grads: dict
    loss: jax.Array
    denominator: jax.Array
    signal: jax.Array
    metrics: dict[str, Metric]


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Attributes:
    temperature: of sampling; the logits are divided by it here as in the engine.
    logprob_chunk: positions of which logits exist at a time.
    """

    temperature: float = 1.0
    logprob_chunk: int = 512

    def __post_init__(self):
        least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        if not least <= self.temperature <= most:  # false of nan, too
            raise ConfigError(
                f"rollout.temperature={self.temperature} is not positive, or no float32; training samples, "
                "give 1.0 or so"
            )
        if self.logprob_chunk < 1:
            raise ConfigError(f"learner.logprob_chunk={self.logprob_chunk}; give a positive number of positions")


class TrainStep:
    """The compiled functions of one (model, objective, optimizer, mesh).

    A step that is not finite, or has nothing to learn from, leaves parameters and optimizer (its moments, its count of
    steps, and with that the schedule of the rate) as they were: momentum and weight decay alone would still move them.

    `accumulate` donates the sums that it replaces, `apply` the state: neither may be used again. Parameters handed to
    an engine must therefore be copies (see learner.publish).

    Args:
      given_proximal: Rows.proximal holds the logprobs of the start of an update of several optimizer steps; else they
        are the current ones.
    """

    def __init__(
        self,
        config: ModelConfig,
        objective: Objective,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        options: StepOptions,
        given_proximal: bool = False,
    ):
        self.shardings = state_shardings(config, optimizer, mesh)
        self.rows_sharding = sharding.rows_sharding(mesh)
        everywhere = sharding.replicated(mesh)
        sums = Sums(self.shardings.params, everywhere, everywhere, everywhere, everywhere)

        def logprobs(params, rows: Rows):
            attend = segment_attention(rows.segments)
            hidden, _ = Decoder(config).apply({"params": params}, rows.tokens, rows.positions, attend)
            return token_logprobs(hidden, head_matrix(params), rows.tokens, options.temperature, options.logprob_chunk)

        def summed_loss(params, reference, rows: Rows):
            current, entropy = logprobs(params, rows)
            proximal = rows.proximal if given_proximal else jax.lax.stop_gradient(current)
            if objective.needs_reference:
                before = jax.lax.stop_gradient(logprobs(reference, rows)[0])
            else:
                before = jax.lax.stop_gradient(current)
            stats = TokenStats(current, proximal, rows.behaviour, before, entropy, rows.advantages, rows.loss_mask)
            loss = objective(stats)
            return loss.total, loss

        def begin(params, reference, rows: Rows) -> Sums:
            (total, loss), grads = jax.value_and_grad(summed_loss, has_aux=True)(params, reference, rows)
            signal = (jnp.abs(rows.advantages) * rows.loss_mask).sum() if objective.needs_advantages else 1.0
            return Sums(grads, total, loss.denominator, jnp.float32(signal), loss.metrics)

        def accumulate(sums: Sums, params, reference, rows: Rows) -> Sums:
            part = begin(params, reference, rows)
            metrics = {name: sums.metrics[name].merge(metric) for name, metric in part.metrics.items()}
            add = jax.tree.map(jnp.add, tuple(sums[:4]), tuple(part[:4]))
            return Sums(*add, metrics)

        def apply(state: TrainState, sums: Sums):
            scale = jnp.where(sums.denominator > 0, 1.0 / jnp.maximum(sums.denominator, 1e-9), 0.0)
            grads = jax.tree.map(lambda g: g * scale, sums.grads)
            norm = optax.tree.norm(grads)
            finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
            take = finite & (sums.denominator > 0) & (sums.signal > 0)
            safe = jax.tree.map(lambda g: jnp.where(take, g, 0.0), grads)
            updates, opt_state = optimizer.update(safe, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)

            def keep(new, old):
                return jax.tree.map(lambda n, o: jnp.where(take, n, o), new, old)

            new = TrainState(
                step=state.step + 1,
                params=keep(params, state.params),
                opt_state=keep(opt_state, state.opt_state),
                skipped=jnp.where(finite, 0, state.skipped + 1),
            )
            return new, {"loss": sums.loss * scale, "grad_norm": norm, "learnt": take}

        params = self.shardings.params
        reference = params if objective.needs_reference else None
        jit = jax.jit
        self.logprobs = jit(logprobs, in_shardings=(params, self.rows_sharding), out_shardings=self.rows_sharding)
        self.begin = jit(begin, in_shardings=(params, reference, self.rows_sharding), out_shardings=sums)
        self.accumulate = jit(
            accumulate, in_shardings=(sums, params, reference, self.rows_sharding), out_shardings=sums, donate_argnums=0
        )
        self.apply = jit(
            apply, in_shardings=(self.shardings, sums), out_shardings=(self.shardings, everywhere), donate_argnums=0
        )

"""What the learner tests share: a model of one layer (compiling is the cost here), trajectories, a slow scorer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from venusrl.core.group import Batch, Group
from venusrl.core.trajectory import Trajectory
from venusrl.learner.learner import Learner, LearnerOptions
from venusrl.learner.sharding import make_mesh
from venusrl.learner.step import StepOptions
from venusrl.models.attention import segment_attention
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import Decoder, head_matrix, init_params

CONFIG = ModelConfig(64, 32, 1, 4, 2, 8, 48, rope_theta=1e4, max_length=128)
ROW = 24


def adam() -> optax.GradientTransformation:
    """Adam with a large epsilon: its step is smooth in the gradient, so results can be compared to 1e-6."""
    return optax.adamw(1e-2, eps=1e-2, weight_decay=0.1)


def params(config: ModelConfig = CONFIG, seed: int = 0) -> dict:
    """Random numpy parameters, without compiling anything; norms near 1."""
    shapes = nn.meta.unbox(jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0)))
    rng = np.random.default_rng(seed)

    def leaf(x):
        noise = rng.normal(size=x.shape).astype(np.float32)
        return 1 + 0.2 * noise if len(x.shape) == 1 else 0.3 * noise

    return jax.tree.map(leaf, shapes)


def trajectory(rng: np.random.Generator, name: str = "t", length: int | None = None) -> Trajectory:
    """A prompt, then one to three turns with observations between them; `length` tokens, 5 to 16 by default."""
    length = int(rng.integers(5, 17)) if length is None else length
    t = Trajectory(id=name, group_id=name.split("/")[0], index=0)
    t.append_observation(rng.integers(0, 64, rng.integers(1, 4)).tolist())
    while len(t) < length:
        size = int(rng.integers(1, 6))
        size = min(size, length - len(t))
        t.append_generated(rng.integers(0, 64, size).tolist(), (-4 * rng.random(size) - 0.1).tolist(), version=0)
        size = min(int(rng.integers(1, 3)), length - len(t) - 1)
        if size > 0:
            t.append_observation(rng.integers(0, 64, size).tolist())
    return t


def trajectories(seed: int, count: int, length: int | None = None) -> list[Trajectory]:
    rng = np.random.default_rng(seed)
    return [trajectory(rng, f"t{i}", length) for i in range(count)]


def batch(seed: int, rewards: list[list[float]]) -> Batch:
    """One group a list of rewards."""
    rng = np.random.default_rng(seed)
    groups = []
    for g, of_group in enumerate(rewards):
        group = Group(f"g{g}", g, 0, 0, [trajectory(rng, f"g{g}/{i}") for i in range(len(of_group))])
        for t, reward in zip(group.trajectories, of_group, strict=True):
            t.complete(reward)
        groups.append(group)
    return Batch(tuple(groups), version=0)


def learner(objective, mesh=None, optimizer=None, temperature=1.0, **options) -> Learner:
    mesh = make_mesh((1, 1, 1)) if mesh is None else mesh
    options = LearnerOptions(**({"row_length": ROW, "rows_per_part": 2} | options))
    step_options = StepOptions(temperature=temperature, logprob_chunk=7)
    return Learner(CONFIG, objective, optimizer or adam(), mesh, step_options, options)


def score_alone(params: dict, t: Trajectory, temperature: float = 1.0) -> np.ndarray:
    """Logprob of each token: one sequence, nothing packed, the whole [T, V] of logits."""
    tokens = np.zeros((1, ROW), np.int32)
    tokens[0, : len(t)] = t.tokens
    logprobs = np.asarray(_log_softmax(params, tokens, temperature))[0]
    return np.concatenate([[0.0], logprobs[np.arange(len(t) - 1), t.tokens[1:]]])


@jax.jit
def _log_softmax(params, tokens, temperature):
    """Padding comes after every real token, so causality alone keeps it out."""
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = Decoder(CONFIG).apply({"params": params}, tokens, positions, segment_attention(jnp.ones_like(tokens)))
    return jax.nn.log_softmax(hidden @ head_matrix(params) / temperature)

"""What the engine tests share: a tiny model, few shapes to compile, and the slow way to do what the engine does."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from venusrl.models.attention import segment_attention
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import Decoder, head_matrix, init_params
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.worker import Request

CONFIG = ModelConfig(64, 32, 2, 4, 2, 8, 48, rope_theta=1e4, max_length=128)
LENGTH = 48
# One prefill and two decode programs (up to two rows copied out, all three in place). Engines of the same options share
# them: JAX caches by function and shapes.
OPTIONS = EngineOptions(
    slots=3,
    max_length=LENGTH,
    decode_steps=4,
    decode_rows=(2,),
    prefill_rows=(2,),
    prefill_tokens=(8,),
    read_lengths=(),
    page=4,
    debug=True,
)
STOP = 7


def params(seed: int = 0) -> dict:
    shapes = nn.meta.unbox(jax.eval_shape(lambda key: init_params(CONFIG, key), jax.random.key(0)))
    rng = np.random.default_rng(seed)

    def leaf(x):
        noise = rng.normal(size=x.shape).astype(np.float32)
        return jnp.asarray(1 + 0.2 * noise if len(x.shape) == 1 else 0.3 * noise)

    return jax.tree.map(leaf, shapes)


def engine(weights: dict, stop_tokens=(), version: int = 0, **overrides) -> Engine:
    return Engine(CONFIG, weights, version, tuple(stop_tokens), dataclasses.replace(OPTIONS, **overrides))


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(8, 64, count).tolist()


@jax.jit
def _log_softmax(weights, tokens_BT, temperature):
    positions = jnp.arange(tokens_BT.shape[1])[None]
    attend = segment_attention(jnp.ones_like(tokens_BT))
    hidden, _ = Decoder(CONFIG).apply({"params": weights}, tokens_BT, positions, attend)
    return jax.nn.log_softmax(hidden @ head_matrix(weights) / temperature)


def distributions(weights: dict, sequence: list[int], temperature: float = 1.0) -> np.ndarray:
    """[T, V]: logprobs of what follows each token, everything computed afresh."""
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(sequence)] = sequence
    return np.asarray(_log_softmax(weights, padded, temperature))[0, : len(sequence)]


def score(weights: dict, sequence: list[int], temperature: float = 1.0) -> np.ndarray:
    """Logprob of each token but the first, whose place holds 0."""
    logprobs = distributions(weights, sequence, temperature)
    return np.concatenate([[0.0], logprobs[np.arange(len(sequence) - 1), sequence[1:]]])


def greedy(weights: dict, context: list[int], count: int, stop_tokens=()) -> list[int]:
    """The naive loop: the whole sequence again for every token."""
    sequence = list(context)
    for _ in range(min(count, LENGTH - len(context))):
        sequence.append(int(distributions(weights, sequence)[-1].argmax()))
        if sequence[-1] in stop_tokens:
            break
    return sequence[len(context) :]


class Collected:
    """Chunks of a turn put together."""

    def __init__(self):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.stop: str | None = None

    def add(self, chunk) -> None:
        assert self.stop is None, "a chunk after the last one"
        assert len(chunk.tokens) == len(chunk.logprobs)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self.versions += [chunk.version] * len(chunk.tokens)
        self.stop = chunk.stop


def run(engine: Engine, requests: list[Request], into: dict[str, Collected] | None = None) -> dict[str, Collected]:
    """Submits all and steps until nothing is left."""
    into = {} if into is None else into
    for request in requests:
        engine.submit(request)
        into.setdefault(request.trajectory, Collected())
    while engine.busy:
        for request, chunk in engine.step():
            into[request.trajectory].add(chunk)
    return into


def ask(name: str, context: list[int], count: int = 8, temperature: float = 0.0, seed: int = 0) -> Request:
    return Request(name, list(context), count, temperature, seed)

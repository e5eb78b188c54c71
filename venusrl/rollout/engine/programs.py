"""The compiled programs of the engine: prefill and decode, and the copies between rows and pages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from venusrl.models.config import ModelConfig
from venusrl.models.decoder import Decoder, head_matrix
from venusrl.rollout.engine.attention.base import RowAttention
from venusrl.rollout.engine.cache import LayerCache, load, pick, place, store

BLOCK = 64  # tokens that sampling looks at together


class RowState(NamedTuple):
    """What decode needs of every row; R rows.

    Attributes:
      token: the last token of the sequence, whose KV is not yet in the cache; int32.
      position: where that token stands; int32.
      remaining: tokens it may still generate; 0 for a row that is not decoding; int32.
      temperature: 0 is greedy; float32.
      seed: of the trajectory; int32.
    """

    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    temperature: jax.Array
    seed: jax.Array


class Decoded(NamedTuple):
    """C steps of R rows; what lies after a row's `count` means nothing. K is 0 or MOST_TOP: the most likely tokens of
    each place, in order."""

    tokens_CR: jax.Array
    logprobs_CR: jax.Array
    count_R: jax.Array
    top_tokens_CRK: jax.Array
    top_logprobs_CRK: jax.Array


def sample(logits_RV: jax.Array, state: RowState) -> tuple[jax.Array, jax.Array]:
    """As `ranked_sample`, without the most likely tokens."""
    return ranked_sample(logits_RV, state, 0)[:2]


def ranked_sample(logits_RV: jax.Array, state: RowState, top: int) -> tuple[jax.Array, ...]:
    """One token a row and its logprob under temperature only (temperature 1 where greedy); then the `top` most likely
    tokens [R, K] and theirs. No logprob is above 0.

    The largest logit is taken off before the division: what the rounding of a large quotient would lose of the
    difference (0.002 of 30 / 0.001) is then never there.

    The draw depends on (seed, position) alone: the same trajectory is sampled the same in any batch.
    """
    rows, vocab = logits_RV.shape
    greedy = state.temperature <= 0
    below_RV = (logits_RV - logits_RV.max(-1, keepdims=True)) / jnp.where(greedy, 1.0, state.temperature)[:, None]
    weights = jnp.exp(below_RV)

    # By inversion, in two levels: a block of tokens, then a token in it. One random number a row, against one a token
    # and its two logarithms by Gumbel's trick (4.4 ms of a step of 32 rows and 2,048 tokens on a CPU, this 1.0 ms).
    blocks = -(-vocab // BLOCK)
    weights_RXY = jnp.pad(weights, ((0, 0), (0, blocks * BLOCK - vocab))).reshape(rows, blocks, BLOCK)
    sums_RX = weights_RXY.sum(-1)
    total = sums_RX.sum(-1)

    def draw(seed, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), seed), position)
        return jax.random.uniform(key, (2,))

    draws_R2 = jax.vmap(draw)(state.seed, state.position)
    block = _invert(sums_RX, draws_R2[:, 0])
    chosen_RY = jnp.take_along_axis(weights_RXY, block[:, None, None], axis=1)[:, 0]
    sampled = block * BLOCK + _invert(chosen_RY, draws_R2[:, 1])
    token = jnp.where(greedy, logits_RV.argmax(-1), sampled).astype(jnp.int32)
    # Two terms that are 0 or less: the sum has a 1 in it, for the largest.
    log_total_R1 = jnp.log(jnp.maximum(total, 1.0))[:, None]
    logprob = (jnp.take_along_axis(below_RV, token[:, None], axis=-1) - log_total_R1)[:, 0]
    top_below_RK, top_RK = jax.lax.top_k(below_RV, min(top, vocab))
    return token, logprob, top_RK.astype(jnp.int32), top_below_RK - log_total_R1


def _invert(weights_RX: jax.Array, draw_R: jax.Array) -> jax.Array:
    """The place in each row at which the running sum of its weights passes a share of their total; its weight is
    positive where any is."""
    running = jnp.cumsum(weights_RX, axis=-1)
    total = running[:, -1:]
    target = jnp.minimum(draw_R[:, None] * total, jnp.nextafter(total, -jnp.inf))
    return (running <= target).sum(-1).astype(jnp.int32)


def prefill(
    config: ModelConfig,
    attention: RowAttention,
    read: int,
    params,
    caches: list[LayerCache],
    rows_R,
    tokens_RT,
    start_R,
    count_R,
) -> list[LayerCache]:
    """Puts the KV of new tokens into the cache.

    Args:
      read: static; cached positions that are looked at, at least start + count of every row.
      rows_R: row of the cache of each sequence; a padding entry has count 0 and any row.
      tokens_RT: new tokens, padded at the end.
      start_R: position of the first new token.
      count_R: how many are real.
    """
    offset_T = jnp.arange(tokens_RT.shape[1])
    positions = start_R[:, None] + offset_T
    valid = offset_T < count_R[:, None]
    attend = attention.prefill(rows_R, positions, valid, read)
    _, caches = Decoder(config).apply({"params": params}, tokens_RT, positions, attend, caches)
    return caches


def decode(
    config: ModelConfig,
    attention: RowAttention,
    steps: int,
    read: int,
    stop_tokens: tuple[int, ...],
    top: int,
    params,
    caches: list[LayerCache],
    rows_R,
    state: RowState,
) -> tuple[list[LayerCache], Decoded]:
    """Up to `steps` tokens for every row that has some remaining; ends early when none has.

    A row ends when it generates a stop token or has none remaining.

    Args:
      read: static; cached positions that are looked at, at least the position of every row.
      top: static; how many of the most likely tokens are told.
      rows_R: row of the cache of each entry of `state`; one outside the cache for padding, with none remaining. None
        where the state speaks of all rows in order.
    """
    still, chunks = zip(*(attention.begin(layer, rows_R, read, steps) for layer in caches), strict=True)
    start_R = state.position
    rows = state.token.shape[0]
    places, ranks = (steps, rows), (steps, rows, min(top, config.vocab_size))
    empty = Decoded(
        jnp.zeros(places, jnp.int32),
        jnp.zeros(places, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(ranks, jnp.int32),
        jnp.zeros(ranks, jnp.float32),
    )
    head_DV = head_matrix(params).astype(config.dtype)

    def going(carry):
        step, _, state, _ = carry
        return (step < steps) & (state.remaining > 0).any()

    def body(carry):
        step, chunks, state, out = carry
        active = state.remaining > 0
        attend = attention.decode(start_R, step)
        layers = list(zip(still, chunks, strict=True))
        hidden, chunks = Decoder(config).apply(
            {"params": params}, state.token[:, None], state.position[:, None], attend, layers
        )
        logits = jnp.einsum("rd,dv->rv", hidden[:, 0], head_DV, preferred_element_type=jnp.float32)
        token, logprob, *ranked = ranked_sample(logits, state, top)
        stopped = (token[:, None] == jnp.array(stop_tokens)).any(-1)
        remaining = jnp.where(active & ~stopped, state.remaining - 1, 0)
        out = Decoded(
            out.tokens_CR.at[step].set(token),
            out.logprobs_CR.at[step].set(logprob),
            out.count_R + active,
            out.top_tokens_CRK.at[step].set(ranked[0]),
            out.top_logprobs_CRK.at[step].set(ranked[1]),
        )
        state = state._replace(
            token=jnp.where(active, token, state.token),
            position=jnp.where(active, state.position + 1, state.position),
            remaining=remaining,
        )
        return step + 1, chunks, state, out

    _, chunks, _, out = jax.lax.while_loop(going, body, (jnp.int32(0), list(chunks), state, empty))
    written = zip(caches, chunks, strict=True)
    return [attention.end(layer, rows_R, start_R, out.count_R, chunk, steps) for layer, chunk in written], out


class Programs:
    """The compiled programs of one (model, attention, stop tokens); counts the shapes that it compiled."""

    def __init__(self, config: ModelConfig, stop_tokens: tuple[int, ...], attention: RowAttention):
        self._config = config
        self._attention = attention
        self._stop = tuple(stop_tokens)
        self._prefill = jax.jit(prefill, static_argnums=(0, 1, 2), donate_argnums=(4,))
        self._decode = jax.jit(decode, static_argnums=(0, 1, 2, 3, 4, 5), donate_argnums=(7,))
        self.store = jax.jit(store, donate_argnums=(0,))
        self.load = jax.jit(load, donate_argnums=(0,))
        self.pick = jax.jit(pick)
        self.place = jax.jit(place, donate_argnums=(0,))

    def prefill(self, read: int, params, caches, rows_R, tokens_RT, start_R, count_R):
        return self._prefill(self._config, self._attention, read, params, caches, rows_R, tokens_RT, start_R, count_R)

    def decode(self, steps: int, read: int, top: int, params, caches, rows_R, state: RowState):
        fixed = (self._config, self._attention, steps, read, self._stop, top)
        return self._decode(*fixed, params, caches, rows_R, state)

    @property
    def compiled(self) -> int:
        """Number of programs compiled so far."""
        programs = (self._prefill, self._decode, self.store, self.load, self.pick, self.place)
        return sum(program._cache_size() for program in programs)

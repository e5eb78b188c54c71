"""Small temperatures: near-greedy, with logprobs that are the distribution's own and never above 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venusrl.learner.logprobs import token_logprobs
from venusrl.rollout.engine.checks import device_temperature
from venusrl.rollout.engine.programs import RowState, sample

from . import tiny
from .tiny import ask

SMALL = [1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-12, 1e-20, 1e-30, 1e-38, 1e-40, 1e-45, 1e-300, 5e-324]

_sample = jax.jit(sample)


def exact(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Logprobs in float64."""
    below = (logits.astype(np.float64) - logits.max(-1, keepdims=True)) / np.float64(temperature)
    return below - np.log(np.exp(below).sum(-1, keepdims=True))


def drawn(logits: np.ndarray, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    rows = len(logits)
    ints = jnp.arange(rows, dtype=jnp.int32)
    heat = jnp.full(rows, device_temperature(temperature), jnp.float32)
    token, logprob = _sample(jnp.asarray(logits), RowState(ints, ints, ints, heat, ints))
    return np.asarray(token), np.asarray(logprob)


@pytest.mark.parametrize("temperature", [*SMALL, 0.7, 1.0, 50.0, 1e30, 3e38])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 3000.0])
def test_the_logprob_is_exact_and_at_most_0_at_any_temperature(temperature, scale):
    logits = (np.random.default_rng(0).normal(size=(64, 300)) * scale).astype(np.float32)
    token, logprob = drawn(logits, temperature)
    expected = exact(logits, device_temperature(temperature))[np.arange(64), token]
    assert np.isfinite(logprob).all() and logprob.max() <= 0
    np.testing.assert_allclose(logprob, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("temperature", [t for t in SMALL if t <= 1e-6])
def test_a_very_small_temperature_is_near_greedy(temperature):
    logits = np.random.default_rng(1).normal(size=(64, 300)).astype(np.float32)
    token, logprob = drawn(logits, temperature)
    np.testing.assert_array_equal(token, logits.argmax(-1))
    np.testing.assert_allclose(logprob, 0.0, atol=1e-6)


def test_equal_logits_share_the_probability_at_the_smallest_temperature():
    logits = np.zeros((400, 4), np.float32)
    logits[:, 2:] = -1.0
    token, logprob = drawn(logits, 5e-324)
    assert set(token.tolist()) == {0, 1}
    np.testing.assert_allclose(logprob, np.log(0.5), rtol=1e-6)


@pytest.mark.parametrize("temperature", SMALL)
def test_a_request_at_a_very_small_temperature_gives_greedy_tokens_with_logprobs(weights, temperature):
    context = tiny.tokens(0, 4)
    done = tiny.run(tiny.engine(weights), [ask("t", context, 12, temperature=temperature, seed=3)])["t"]
    assert done.stop == "length" and len(done.tokens) == 12
    assert all(np.isfinite(done.logprobs)) and max(done.logprobs) <= 0
    if temperature <= 1e-6:
        assert done.tokens == tiny.greedy(weights, context, 12)


def test_engine_and_learner_agree_at_a_temperature_of_a_thousandth(weights):
    """What differs is the rounding of the logits, a thousandfold."""
    context = tiny.tokens(1, 5)
    done = tiny.run(tiny.engine(weights), [ask("t", context, 30, temperature=1e-3, seed=1)])["t"]
    whole = context + done.tokens
    expected = tiny.score(weights, whole, 1e-3)[5 : 5 + 30]
    np.testing.assert_allclose(done.logprobs, expected, atol=5e-3)


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1.2e-38])
def test_the_learners_logprobs_entropies_and_gradients_are_numbers_at_any_temperature(temperature):
    rng = np.random.default_rng(2)
    hidden = jnp.asarray(rng.normal(size=(2, 9, 8)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, 32, (2, 9)))
    logprobs, entropies = jax.jit(lambda h: token_logprobs(h, head, tokens, temperature, 4))(hidden)
    expected = exact(np.asarray(hidden[:, :-1] @ head), temperature)
    expected = np.take_along_axis(expected, np.asarray(tokens)[:, 1:, None], -1)[..., 0]
    assert np.isfinite(logprobs).all() and np.isfinite(entropies).all() and logprobs.max() <= 0
    np.testing.assert_allclose(logprobs[:, 1:], np.maximum(expected, -1e30), rtol=2e-3)
    if temperature >= 1e-12:
        grads = jax.grad(lambda h: token_logprobs(h, head, tokens, temperature, 4)[0].sum())(hidden)
        assert np.isfinite(grads).all()

"""Chunked logprobs and entropies against the whole log-softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venusrl.learner.logprobs import token_logprobs

BATCH, TIME, WIDTH, VOCAB, TEMPERATURE = 2, 17, 8, 40, 0.7


def whole(hidden, head, tokens, temperature, chunk):
    logp = jax.nn.log_softmax(hidden[:, :-1] @ head / temperature)
    chosen = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    return tuple(jnp.pad(x, ((0, 0), (1, 0))) for x in (chosen, entropy))


def value_and_gradients(function, chunk):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(BATCH, TIME, WIDTH)).astype(np.float32)
    head = rng.normal(size=(WIDTH, VOCAB)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, (BATCH, TIME))
    weights = rng.normal(size=(2, BATCH, TIME)).astype(np.float32)

    def scalar(hidden, head):
        logprobs, entropies = function(hidden, head, tokens, TEMPERATURE, chunk)
        return (weights[0] * logprobs + weights[1] * entropies).sum(), (logprobs, entropies)

    grads, values = jax.jit(jax.grad(scalar, argnums=(0, 1), has_aux=True))(hidden, head)
    return *values, *grads


@pytest.fixture(scope="module")
def expected():
    return value_and_gradients(whole, 0)


@pytest.mark.parametrize("chunk", [1, 7, TIME - 1, TIME, 512])
def test_chunks_equal_the_whole(expected, chunk):
    for ours, theirs in zip(value_and_gradients(token_logprobs, chunk), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_one_token_has_no_logprob():
    logprobs, entropies = token_logprobs(jnp.ones((2, 1, 4)), jnp.ones((4, 8)), jnp.zeros((2, 1), int), 1.0, 4)
    np.testing.assert_array_equal(logprobs, np.zeros((2, 1)))
    np.testing.assert_array_equal(entropies, np.zeros((2, 1)))


def test_uniform():
    logprobs, entropies = token_logprobs(jnp.zeros((1, 5, 4)), jnp.ones((4, 8)), jnp.zeros((1, 5), int), 1.0, 2)
    np.testing.assert_allclose(logprobs[0, 1:], -np.log(8), rtol=1e-6)
    np.testing.assert_allclose(entropies[0, 1:], np.log(8), rtol=1e-6)


def test_head_gradient_is_summed_in_float32():
    """bfloat16 hidden states, a float32 head: the sum over chunks stays near the float32 one."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 257, 8)), jnp.bfloat16)
    head = rng.normal(size=(8, 16)).astype(np.float32)
    tokens = rng.integers(0, 16, (1, 257))

    def gradient(hidden, chunk):
        return jax.jit(jax.grad(lambda head: token_logprobs(hidden, head, tokens, 1.0, chunk)[0].sum()))(head)

    ours, exact = gradient(hidden, 1), gradient(hidden.astype(jnp.float32), 512)
    assert ours.dtype == jnp.float32
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.01

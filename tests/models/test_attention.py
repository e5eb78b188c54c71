"""Blocked segment attention against a full mask, in numpy."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.models.attention import segment_attention


def full_mask(q_BTNH, k_BTKH, v_BTKH, segments_BT):
    _, length, heads, width = q_BTNH.shape
    group = heads // k_BTKH.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k_BTKH, v_BTKH))
    scores = np.einsum("btnh,bsnh->bnts", q_BTNH, k) / np.sqrt(width)
    same = segments_BT[:, :, None] == segments_BT[:, None, :]
    scores = np.where((same & np.tri(length, dtype=bool))[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def random_segments(rng, batch, length):
    """Rows of consecutive segments 1, 2, ... and padding 0 at the end, some rows all padding or all one segment."""
    rows = np.zeros((batch, length), np.int32)
    for row in rows:
        cuts = np.sort(rng.integers(0, length + 1, rng.integers(1, 5)))
        for i, (begin, end) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True)):
            row[begin:end] = i + 1
    return rows


# Each (length, block) compiles once; lengths of one block, less than one, a multiple and not a multiple.
SHAPES = [(1, 4), (3, 8), (8, 4), (11, 4), (13, 13), (10, 3)]


@pytest.fixture(scope="module")
def compiled():
    def run(q, k, v, segments, block):
        return segment_attention(segments, block)(q, k, v, None)[0]

    return jax.jit(run, static_argnums=4)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from(SHAPES))
def test_blocked_equals_full_mask(compiled, seed, shape):
    length, block = shape
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(3, length, 4, 8)).astype(np.float32)
    k, v = (rng.normal(size=(3, length, 2, 8)).astype(np.float32) for _ in range(2))
    segments = random_segments(rng, 3, length)
    ours = np.asarray(compiled(q, k, v, segments, block))
    np.testing.assert_allclose(ours, full_mask(q, k, v, segments), rtol=1e-4, atol=1e-5)


def test_a_segment_never_sees_another(compiled):
    """Values of every other segment may be anything, huge included."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 11, 2, 8)).astype(np.float32) for _ in range(3))
    segments = np.array([[1] * 4 + [2] * 5 + [0] * 2], np.int32)
    before = np.asarray(compiled(q, k, v, segments, 4))
    k[0, :4], v[0, :4], k[0, 9:], v[0, 9:] = 50.0, 1e6, -50.0, 1e6
    after = np.asarray(compiled(q, k, v, segments, 4))
    np.testing.assert_array_equal(before[0, 4:9], after[0, 4:9])
    assert np.isfinite(after).all()

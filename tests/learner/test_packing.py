"""Packing places every token once and keeps trajectories apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.core.errors import ConfigError
from venusrl.core.trajectory import Trajectory
from venusrl.learner.packing import pack

from . import tiny

FIELDS = ("tokens", "segments", "positions", "loss_mask", "behaviour", "proximal", "advantages")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), extra=st.integers(0, 20))
def test_every_token_is_placed_once(seed, count, extra):
    rng = np.random.default_rng(seed)
    given_ = [tiny.trajectory(rng) for _ in range(count)]
    advantages = rng.normal(size=count).astype(np.float32)
    width = max(len(t) for t in given_) + extra
    packing = pack(given_, advantages, width)
    rows = packing.rows
    taken = np.zeros((len(rows), width), bool)
    for t, advantage, (row, begin) in zip(given_, advantages, packing.places, strict=True):
        span = slice(begin, begin + len(t))
        assert not taken[row, span].any() and taken[row, span].size == len(t)
        taken[row, span] = True
        np.testing.assert_array_equal(rows.tokens[row, span], t.tokens)
        np.testing.assert_array_equal(rows.loss_mask[row, span], t.loss_mask)
        np.testing.assert_allclose(rows.behaviour[row, span], t.logprobs, rtol=1e-6)
        np.testing.assert_array_equal(rows.positions[row, span], np.arange(len(t)))
        np.testing.assert_array_equal(rows.advantages[row, span], advantage)
        segment = rows.segments[row, begin]
        assert segment > 0
        # Contiguous, and nobody else's: the segment's columns are exactly this span.
        np.testing.assert_array_equal(np.flatnonzero(rows.segments[row] == segment), np.arange(width)[span])
    assert not any(getattr(rows, name)[~taken].any() for name in FIELDS)
    assert len(rows) <= count
    if len(rows) > 1:  # first fit: no two rows could have been one
        filled = sorted(taken.sum(axis=1))
        assert filled[0] + filled[1] > width


def test_too_long_is_refused():
    with pytest.raises(ConfigError, match=r"learner\.row_length=9 .* 10"):
        pack(tiny.trajectories(0, 1, length=10), [0.0], 9)


def test_exact_fit():
    assert len(pack(tiny.trajectories(0, 4, length=12), [0.0] * 4, 24).rows) == 2


def test_take_fills_up_with_empty_rows():
    rows = pack(tiny.trajectories(0, 3, length=10), [1.0] * 3, 10).rows
    part = rows.take(2, 6)
    assert len(part) == 4
    for name in FIELDS:
        value = getattr(part, name)
        np.testing.assert_array_equal(value[0], getattr(rows, name)[2])
        assert value.dtype == getattr(rows, name).dtype and not value[1:].any()


def test_nothing_packs_to_one_empty_row():
    assert not pack([], [], 8).rows.loss_mask.any()


def test_advantages_must_match():
    with pytest.raises(ValueError):
        pack([Trajectory("a", "g", 0, tokens=[1])], [], 8)

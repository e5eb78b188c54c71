"""Group-relative advantages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from venusrl.learner.advantages import group_normalised

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=16)


@given(rewards=REWARDS)
def test_finite_centred_and_ordered(rewards):
    a = group_normalised(rewards)
    assert a.dtype == np.float32 and a.shape == (len(rewards),) and np.isfinite(a).all()
    assert a.sum() == pytest.approx(0, abs=1e-3)
    assert (np.diff(a[np.argsort(rewards, kind="stable")]) >= 0).all()


def test_formula():
    np.testing.assert_allclose(group_normalised([1, 0, 0, 1, 0]), np.array([3, -2, -2, 3, -2]) / 6**0.5, rtol=1e-5)


@pytest.mark.parametrize("rewards", [[0.7], [1.0] * 8, [0.1] * 3, [1e6] * 5])
def test_groups_that_say_nothing_get_zeros(rewards):
    assert not group_normalised(rewards).any()

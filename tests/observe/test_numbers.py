"""Metrics that reduce themselves, and intervals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.observe.intervals import wilson
from venusrl.observe.metric import Metric

KINDS = {
    "mean": Metric.mean,
    "max": Metric.max,
    "sum": lambda values, mask: Metric.sum((values * mask).sum()),
}


@settings(max_examples=30, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_merging_parts_equals_the_whole(kind, data):
    n = data.draw(st.integers(2, 10))
    values = np.array(data.draw(st.lists(st.integers(-50, 50), min_size=n, max_size=n)), np.float32)
    mask = np.array(data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), np.float32)
    cut = data.draw(st.integers(0, n - 1)) or 1
    whole = KINDS[kind](values, mask)
    merged = KINDS[kind](values[:cut], mask[:cut]).merge(KINDS[kind](values[cut:], mask[cut:]))
    assert merged.result() == pytest.approx(whole.result(), rel=1e-6)
    chosen = values[mask > 0]
    plain = {"mean": np.mean, "max": np.max, "sum": np.sum}[kind]
    if len(chosen):
        assert whole.result() == pytest.approx(plain(chosen), rel=1e-5, abs=1e-6)


def test_a_mean_of_unequal_parts_is_weighted():
    """rllm PR#508, SkyRL PR#354: what is masked counts neither above nor below the line."""
    one = Metric.mean(jnp.array([4.0, 100.0, 100.0]), jnp.array([1, 0, 0]))
    three = Metric.mean(jnp.array([0.0, 0.0, 0.0]), jnp.array([1, 1, 1]))
    assert one.merge(three).result() == 1.0


def test_a_mean_over_nothing_is_zero():
    assert Metric.mean(jnp.array([3.0]), jnp.array([0])).result() == 0.0


def test_a_maximum_over_nothing_loses_to_anything():
    nothing = Metric.max(jnp.array([3.0]), jnp.array([0]))
    assert nothing.result() == 0.0  # no number, for the log
    assert nothing.merge(Metric.max(jnp.array([-7.0]), jnp.array([1]))).result() == -7.0


def test_kinds_do_not_mix():
    with pytest.raises(ValueError, match="cannot merge a mean with a sum"):
        Metric.mean(jnp.ones(1), jnp.ones(1)).merge(Metric.sum(1.0))


def test_the_reduction_travels_through_jit():
    metric = jax.jit(lambda x: Metric.mean(x, jnp.ones_like(x)))(jnp.array([1.0, 2.0]))
    assert (metric.reduction, metric.result()) == ("mean", 1.5)


# Published values: R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_gives_the_published_values(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_of_nothing_is_everything():
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 1000), st.data())
def test_wilson_holds_the_rate_and_mirrors(trials, data):
    successes = data.draw(st.integers(0, trials))
    low, high = wilson(successes, trials)
    assert 0.0 <= low <= successes / trials + 1e-12 and successes / trials - 1e-12 <= high <= 1.0
    assert high - low < 1.0
    assert wilson(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=1e-12)

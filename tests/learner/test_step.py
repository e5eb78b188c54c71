"""The train step: packed equals unpacked, parts equal the whole, padding is nothing, bad steps change nothing."""

import chex
import jax
import numpy as np
import pytest

from venusrl.learner.objectives.grpo import Grpo
from venusrl.learner.packing import Rows, pack
from venusrl.learner.sharding import make_mesh
from venusrl.learner.state import new_state
from venusrl.learner.step import StepOptions, TrainStep

from . import tiny

ADVANTAGES = np.linspace(-1, 1.5, 8).astype(np.float32)


@pytest.fixture(scope="module")
def step():
    objective = Grpo(entropy_coef=0.01)
    return TrainStep(tiny.CONFIG, objective, tiny.adam(), make_mesh((1, 1, 1)), StepOptions(0.9, logprob_chunk=7))


@pytest.fixture(scope="module")
def params():
    return jax.device_put(tiny.params())


def fresh(params):
    """A state of its own, for `apply` to donate."""
    return new_state(jax.tree.map(lambda x: jax.numpy.array(x, copy=True), params), tiny.adam())


def one_a_row(trajectories, advantages) -> Rows:
    rows = [pack([t], [a], tiny.ROW).rows for t, a in zip(trajectories, advantages, strict=True)]
    return jax.tree.map(lambda *x: np.concatenate(x), *rows)


def assert_same_sums(ours, theirs):
    chex.assert_trees_all_close(ours.grads, theirs.grads, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    assert float(ours.denominator) == float(theirs.denominator)
    for name, metric in ours.metrics.items():
        assert metric.result() == pytest.approx(theirs.metrics[name].result(), rel=1e-4, abs=1e-5), name


def accumulated(step, params, rows, size):
    sums = step.begin(params, None, rows.take(0, size))
    for begin in range(size, len(rows), size):
        sums = step.accumulate(sums, params, None, rows.take(begin, begin + size))
    return sums


def test_packed_equals_unpacked(step, params):
    given = tiny.trajectories(0, 8)
    packed = pack(given, ADVANTAGES, tiny.ROW).rows
    assert len(packed) < 8  # several in a row, or this shows nothing
    ours = step.begin(params, None, packed.take(0, 8))
    assert_same_sums(ours, step.begin(params, None, one_a_row(given, ADVANTAGES)))


def test_parts_equal_the_whole(step, params):
    """Unequal numbers of trained tokens a part: a mean of means would differ."""
    rows = one_a_row(tiny.trajectories(1, 8), ADVANTAGES)
    counts = rows.loss_mask.reshape(4, 2, -1).sum((1, 2))
    assert len(set(counts)) > 1
    whole, parts = step.begin(params, None, rows), accumulated(step, params, rows, 2)
    assert_same_sums(parts, whole)
    (one, a), (other, b) = step.apply(fresh(params), whole), step.apply(fresh(params), parts)
    assert float(a["loss"]) == pytest.approx(float(b["loss"]), abs=1e-6)
    assert float(a["grad_norm"]) == pytest.approx(float(b["grad_norm"]), rel=1e-5)
    chex.assert_trees_all_close(one.params, other.params, rtol=0, atol=1e-6)
    assert max(np.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (one.params, params)), strict=True)) > 1e-4


def test_padding_rows_change_nothing(step, params):
    rows = one_a_row(tiny.trajectories(2, 3), ADVANTAGES[:3])
    exact = accumulated(step, params, rows.take(0, 4), 2)
    padded = step.begin(params, None, rows.take(0, 8))
    more = accumulated(step, params, rows.take(0, 8), 2)  # two parts of padding only
    assert_same_sums(padded, exact)
    assert_same_sums(more, exact)


def test_tokens_of_padding_change_nothing(step, params):
    rows = one_a_row(tiny.trajectories(2, 8), ADVANTAGES)
    noisy = jax.tree.map(np.copy, rows)
    noisy.tokens[rows.segments == 0] = 63
    assert (rows.tokens != noisy.tokens).any()
    assert_same_sums(step.begin(params, None, noisy), step.begin(params, None, rows))


def test_loss_equals_scoring_alone(step, params):
    """The whole chain in numpy: score each trajectory alone, then GRPO's formula with current = proximal."""
    given = tiny.trajectories(3, 8)
    sums = step.begin(params, None, pack(given, ADVANTAGES, tiny.ROW).rows.take(0, 8))
    surrogate = count = 0.0
    for t, advantage in zip(given, ADVANTAGES, strict=True):
        mask = np.array(t.loss_mask)
        weight = np.minimum(np.exp(tiny.score_alone(params, t, 0.9) - np.array(t.logprobs)), 2.0)
        surrogate -= (weight * advantage * mask).sum()
        count += mask.sum()
    entropy = sums.metrics["entropy"].result()
    assert float(sums.denominator) == count
    np.testing.assert_allclose(float(sums.loss), surrogate - 0.01 * entropy * count, rtol=1e-4)


def unchanged(state, params, skipped):
    before = fresh(params)
    chex.assert_trees_all_equal(state.params, before.params)
    chex.assert_trees_all_equal(state.opt_state, before.opt_state)
    assert (int(state.step), int(state.skipped)) == (1, skipped)


def test_nothing_to_train_on_leaves_parameters_bit_for_bit(step, params):
    """Weight decay and moments would move them, were the update applied."""
    rows = one_a_row(tiny.trajectories(4, 2), [1.0, -1.0])
    rows = rows.replace(loss_mask=np.zeros_like(rows.loss_mask))
    state, outcome = step.apply(fresh(params), step.begin(params, None, rows))
    assert float(outcome["loss"]) == float(outcome["grad_norm"]) == 0
    unchanged(state, params, skipped=0)


def test_an_entropy_term_is_something_to_learn_from_without_advantages(step, params):
    sums = step.begin(params, None, one_a_row(tiny.trajectories(4, 2), [0.0, 0.0]))
    state, outcome = step.apply(fresh(params), sums)
    assert float(outcome["grad_norm"]) > 0 and bool(outcome["learnt"])
    assert np.abs(np.asarray(state.params["embedding"]) - params["embedding"]).max() > 1e-4


def test_zero_gradient_still_decays(step, params):
    """The twin of the test above: with tokens to train on, weight decay does act."""
    sums = step.begin(params, None, one_a_row(tiny.trajectories(4, 2), [1.0, -1.0]))
    sums = sums._replace(grads=jax.tree.map(np.zeros_like, sums.grads))
    state, _ = step.apply(fresh(params), sums)
    decayed = np.asarray(params["embedding"]) * (1 - 1e-2 * 0.1)
    np.testing.assert_allclose(state.params["embedding"], decayed, rtol=1e-5)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_steps_change_nothing_and_are_counted(step, params, where, value):
    sums = step.begin(params, None, one_a_row(tiny.trajectories(4, 2), [1.0, -1.0]))
    if where == "loss":
        sums = sums._replace(loss=np.float32(value))
    else:
        grads = jax.tree.map(np.array, sums.grads)
        grads["layer_0"]["attn"]["q"][0, 0, 0] = value
        sums = sums._replace(grads=grads)
    state, outcome = step.apply(fresh(params), sums)
    assert not np.isfinite([outcome["grad_norm"], outcome["loss"]]).all()
    unchanged(state, params, skipped=1)

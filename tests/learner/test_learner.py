"""The learner over whole updates."""

import math

import chex
import jax
import numpy as np
import optax
import pytest

from venusrl.core.errors import ConfigError, NonFiniteError
from venusrl.learner.objectives.grpo import Grpo
from venusrl.learner.objectives.sft import Sft
from venusrl.learner.publish import publish
from venusrl.learner.state import make_optimizer

from . import tiny

REWARDS = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.5], [0.0, 1.0, 0.25]]


@pytest.fixture(scope="module")
def shared():
    """Compiled once; each test starts it from the same parameters."""
    return tiny.learner(Grpo(), max_skipped=2)


@pytest.fixture
def learner(shared):
    shared.start_from(tiny.params())
    return shared


def copy(tree):
    return jax.tree.map(np.array, tree)


def poisoned(batch):
    """Past the trajectory's own checks, as a faulty worker's memory might."""
    t = batch.groups[0].trajectories[0]
    t.logprobs[t.turns[0].begin] = float("nan")
    return batch


def test_score_equals_each_trajectory_alone(learner):
    given = tiny.trajectories(0, 7)
    for t, ours in zip(given, learner.score(given), strict=True):
        assert ours[0] == 0 and len(ours) == len(t)
        np.testing.assert_allclose(ours, tiny.score_alone(learner.state.params, t), atol=1e-4)


def test_update_reports_and_moves(learner):
    before, batch = copy(learner.state.params), tiny.batch(0, REWARDS)
    metrics = learner.update(batch)
    trajectories = batch.trajectories
    assert metrics["zero_variance_groups"] == 1
    assert metrics["tokens"] == sum(len(t) for t in trajectories)
    assert metrics["generated_tokens"] == sum(t.num_generated for t in trajectories)
    assert metrics["length_mean"] == pytest.approx(metrics["tokens"] / 9)
    assert metrics["turns_mean"] == pytest.approx(np.mean([len(t.turns) for t in trajectories]))
    assert metrics["skipped_in_a_row"] == 0 and metrics["grad_norm"] > 0 and metrics["train_s"] > 0
    assert metrics["rows"] > 2  # several parts, the last one filled up
    assert metrics["ratio_max"] == 1.0  # one optimizer step: current is proximal
    assert int(learner.state.step) == 1
    assert np.abs(before["embedding"] - np.asarray(learner.state.params["embedding"])).max() > 1e-4


def test_advantages_stay_inside_their_group(learner):
    """Adding a constant to one group's rewards changes nothing."""
    shifted = [[r + 10 * i for r in group] for i, group in enumerate(REWARDS)]
    results = []
    for rewards in (REWARDS, shifted):
        learner.start_from(tiny.params())
        learner.update(tiny.batch(0, rewards))
        results.append(copy(learner.state.params))
    chex.assert_trees_all_close(*results, atol=1e-6)


def test_training_raises_the_rewarded_logprobs(learner):
    batch = tiny.batch(1, [[1.0, 0.0, 0.0, 0.0]])
    good = batch.trajectories[0]
    mask = np.array(good.loss_mask)
    before = (learner.score([good])[0] * mask).sum()
    for _ in range(5):
        learner.update(batch)
    assert (learner.score([good])[0] * mask).sum() > before + 0.1


def test_giving_up_leaves_the_state(learner):
    before, state = copy(learner.state), learner.state
    asked = []

    def stop():
        asked.append(1)
        return len(asked) == 2  # after the first part has been summed

    assert learner.update(tiny.batch(0, REWARDS), stop) is None
    assert len(asked) == 2 and learner.state is state
    chex.assert_trees_all_equal(copy(learner.state), before)
    assert learner.update(tiny.batch(0, REWARDS))["loss"] is not None  # nothing of it was donated


def test_all_masked_batch(learner):
    given = tiny.trajectories(0, 3)
    for t in given:
        t.loss_mask = [0] * len(t)
    before = copy(learner.state)
    metrics = learner.train(given, [1.0, -1.0, 0.5])
    assert metrics["loss"] == metrics["grad_norm"] == metrics["skipped_in_a_row"] == 0
    chex.assert_trees_all_equal(copy(learner.state.params), before.params)
    chex.assert_trees_all_equal(copy(learner.state.opt_state), before.opt_state)


def test_nan_logprobs_are_skipped_counted_and_at_last_raised(learner):
    before, bad = copy(learner.state), poisoned(tiny.batch(0, REWARDS))
    assert [learner.update(bad)["skipped_in_a_row"] for _ in range(2)] == [1, 2]
    chex.assert_trees_all_equal(copy(learner.state.params), before.params)
    chex.assert_trees_all_equal(copy(learner.state.opt_state), before.opt_state)
    assert learner.update(tiny.batch(0, REWARDS))["skipped_in_a_row"] == 0  # only consecutive ones count
    after = copy(learner.state.params)
    for _ in range(2):
        learner.update(bad)
    with pytest.raises(NonFiniteError, match=r"learner\.max_skipped=2"):
        learner.update(bad)
    chex.assert_trees_all_equal(copy(learner.state.params), after)


def test_nan_parameters_are_not_spread(learner):
    params = tiny.params()
    params["layer_0"]["mlp"]["up"][3, 3] = np.nan
    learner.start_from(params)
    assert learner.update(tiny.batch(0, REWARDS))["skipped_in_a_row"] == 1
    chex.assert_trees_all_equal(copy(learner.state.params), params)


def test_published_weights_survive_a_donated_step(learner):
    before = copy(learner.state.params)
    published = publish(learner.state.params, "float32")
    half = publish(learner.state.params, "bfloat16")
    placed = jax.device_put(learner.state.params, learner.shardings.params)
    learner.update(tiny.batch(0, REWARDS))
    chex.assert_trees_all_equal(copy(published), before)
    assert {x.dtype.name for x in jax.tree.leaves(half)} == {"bfloat16"}
    np.testing.assert_allclose(np.asarray(half["embedding"], np.float32), before["embedding"], rtol=1e-2)
    with pytest.raises(RuntimeError, match="deleted"):  # what publish is there to prevent
        np.asarray(placed["embedding"])


def test_start_from_keeps_the_given_parameters_usable(learner):
    mine = jax.device_put(tiny.params(), learner.shardings.params)
    learner.start_from(mine)
    learner.update(tiny.batch(0, REWARDS))
    np.testing.assert_array_equal(mine["embedding"], tiny.params()["embedding"])


@pytest.mark.parametrize("change", ["shape", "missing", "extra"])
def test_start_from_another_model_is_refused(learner, change):
    params = tiny.params()
    if change == "shape":
        params["embedding"] = params["embedding"][:, :-1]
    elif change == "missing":
        del params["embedding"]
    else:
        params["head"] = params["embedding"].T
    with pytest.raises(ConfigError, match="head" if change == "extra" else "embedding"):
        learner.start_from(params)


def test_init_is_seeded_and_abstract_state_describes_it(shared):
    shared.init(jax.random.key(3))
    first = copy(shared.state)
    described = shared.abstract_state()
    chex.assert_trees_all_equal_shapes_and_dtypes(first, described)
    assert all(x.sharding is not None for x in jax.tree.leaves(described))
    shared.init(jax.random.key(3))
    chex.assert_trees_all_equal(copy(shared.state), first)


@pytest.fixture(scope="module")
def with_kl():
    return tiny.learner(Grpo(kl_coef=0.2))


def test_kl_reference_stays_while_parameters_move(with_kl):
    learner = with_kl
    learner.start_from(tiny.params())
    batch = tiny.batch(0, REWARDS)
    old = np.concatenate(learner.score(batch.trajectories))
    mask = np.concatenate([t.loss_mask for t in batch.trajectories]) > 0
    seen = []
    for _ in range(3):
        new = np.concatenate(learner.score(batch.trajectories))
        seen.append(learner.update(batch)["kl"])
        gap = (old - new)[mask]
        assert seen[-1] == pytest.approx((np.exp(gap) - gap - 1).mean(), rel=1e-2, abs=1e-6)
    assert abs(seen[0]) < 1e-6 and min(seen[1:]) > 1e-5
    # A resumed run is given the reference of its start, not the parameters of its checkpoint.
    learner.restore(learner.state, reference=tiny.params())
    new = np.concatenate(learner.score(batch.trajectories))
    gap = (old - new)[mask]
    assert learner.update(batch)["kl"] == pytest.approx((np.exp(gap) - gap - 1).mean(), rel=1e-2)


def test_minibatches_use_the_logprobs_of_the_start(shared):
    """Two optimizer steps: in the second the policy has moved away from the proximal one."""
    given = tiny.trajectories(5, 4, length=tiny.ROW)  # one a row, in order
    advantages = [1.0, -1.0, 0.5, -0.5]
    both = tiny.learner(Grpo(), minibatches=2)
    both.start_from(tiny.params())
    metrics = both.train(given, advantages)
    assert int(both.state.step) == 2
    order = np.random.default_rng(0).permutation(4)  # of step 0
    first, second = [given[i] for i in order[:2]], [given[i] for i in order[2:]]
    shared.start_from(tiny.params())  # the same first step, alone
    start = shared.score(second)
    shared.train(first, [advantages[i] for i in order[:2]])
    moved = [np.exp(new - old) for new, old in zip(shared.score(second), start, strict=True)]
    ratios = np.concatenate([r[np.array(t.loss_mask) > 0] for r, t in zip(moved, second, strict=True)])
    assert ratios.max() - 1 > 1e-2
    assert metrics["ratio_max"] == pytest.approx(ratios.max(), rel=1e-3)  # of both steps: 1 in the first


def test_sft_learns_a_sequence():
    learner = tiny.learner(Sft(), optimizer=make_optimizer(1e-2, warmup_steps=2, total_steps=40))
    learner.start_from(tiny.params())
    given = tiny.trajectories(0, 2)
    losses = [learner.train(given, [0.0, 0.0])["loss"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_rows_must_split_evenly_is_said_at_once():
    class Wide:
        shape = {"data": 4, "fsdp": 1}  # noqa: RUF012

    with pytest.raises(ConfigError, match=r"learner\.rows_per_part=2 is not a multiple of data x fsdp=4"):
        tiny.learner(Grpo(), mesh=Wide())


def test_learning_rate_schedule():
    """Read from the size of Adam's first steps on a constant gradient: each is the learning rate."""
    optimizer = make_optimizer(0.1, warmup_steps=2, total_steps=6, final_fraction=0.5, clip_norm=0.0001)
    state = optimizer.init(np.zeros(1, np.float32))
    rates = []
    for _ in range(8):
        update, state = optimizer.update(np.ones(1, np.float32), state, np.zeros(1, np.float32))
        rates.append(-float(update[0]))
    cosine = [0.05 + 0.05 * (1 + np.cos(np.pi * i / 4)) / 2 for i in range(5)]
    np.testing.assert_allclose(rates, [0.0, 0.05, *cosine, 0.05], rtol=1e-2, atol=1e-6)


def test_gradients_are_clipped():
    """Adam's step hides the size of the gradient; its first moment, with b1 = 0, shows it."""
    optimizer = make_optimizer(1.0, b1=0.0, b2=0.0, clip_norm=1.0)
    nothing = np.zeros(2, np.float32)
    _, state = optimizer.update(np.array([3.0, 4.0], np.float32), optimizer.init(nothing), nothing)
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "mu"), [0.6, 0.8], rtol=1e-6)


def test_an_update_whose_advantages_are_all_0_moves_nothing_and_says_so(learner):
    """Neither momentum of the update before nor weight decay; metrics are numbers, and the next update learns."""
    learner.update(tiny.batch(0, REWARDS))
    before, moments = copy(learner.state.params), copy(learner.state.opt_state)
    for minibatch_rewards in ([[1.0, 1.0], [0.0, 0.0, 0.0], [2.0]], [[0.0]]):
        metrics = learner.update(tiny.batch(1, minibatch_rewards))
        assert metrics["nothing_to_learn"] == 1.0 and metrics["skipped_in_a_row"] == 0
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["entropy"] > 0  # what was seen is still told
    chex.assert_trees_all_equal(copy(learner.state.params), before)
    chex.assert_trees_all_equal(copy(learner.state.opt_state), moments)
    assert int(learner.state.step) == 3  # the run goes on
    metrics = learner.update(tiny.batch(2, REWARDS))
    assert metrics["nothing_to_learn"] == 0.0
    assert np.abs(before["embedding"] - np.asarray(learner.state.params["embedding"])).max() > 1e-5


def test_a_kl_term_is_something_to_learn_from_without_advantages(with_kl):
    learner = with_kl
    learner.start_from(tiny.params())
    learner.update(tiny.batch(0, REWARDS))  # away from the reference
    before = copy(learner.state.params)
    metrics = learner.update(tiny.batch(1, [[1.0, 1.0], [0.0, 0.0]]))
    assert metrics["nothing_to_learn"] == 0.0 and metrics["grad_norm"] > 0
    assert np.abs(before["embedding"] - np.asarray(learner.state.params["embedding"])).max() > 1e-6


def test_only_the_minibatches_without_advantages_are_left_out():
    learner = tiny.learner(Grpo(), minibatches=4)
    learner.start_from(tiny.params())
    metrics = learner.update(tiny.batch(0, [[1.0, 0.0]] + [[1.0, 1.0]] * 12))
    assert 0 < metrics["nothing_to_learn"] < 1
    assert all(math.isfinite(value) for value in metrics.values()), metrics


def test_no_metric_is_infinite_or_nan_where_every_step_was_not_finite(learner):
    bad = tiny.batch(0, REWARDS)
    learner.state = learner.state.replace(params=jax.tree.map(lambda x: x * np.nan, learner.state.params))
    metrics = learner.update(bad)
    assert metrics["nonfinite_steps"] == 1.0 and metrics["nothing_to_learn"] == 0.0
    assert metrics["skipped_in_a_row"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values()), metrics

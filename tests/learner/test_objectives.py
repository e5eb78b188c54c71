"""Objectives against loops over tokens in numpy, term by term."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.core.errors import ConfigError
from venusrl.learner.objectives import OBJECTIVES, TokenStats, make_objective
from venusrl.learner.objectives.grpo import Grpo
from venusrl.learner.objectives.sft import Sft


def stats(seed, shape=(3, 7), spread=0.5):
    rng = np.random.default_rng(seed)
    current, proximal, behaviour, reference = (-2 + spread * rng.normal(size=(4, *shape))).astype(np.float32)
    entropy = rng.random(shape).astype(np.float32)
    advantages = rng.normal(size=shape).astype(np.float32)
    mask = (rng.random(shape) < 0.6).astype(np.float32)
    return TokenStats(current, proximal, behaviour, reference, entropy, advantages, mask)


def naive_grpo(o: Grpo, s: TokenStats):
    """(total, denominator, metrics, d total / d current), a token at a time."""
    total, grads = 0.0, np.zeros(s.current.shape)
    seen = {name: [] for name in ("entropy", "ratio", "clipped", "weight", "capped", "mismatch", "kl")}
    for i in zip(*np.nonzero(s.mask), strict=True):
        current, proximal, behaviour, reference, entropy, advantage, _ = (float(x[i]) for x in s)
        ratio = math.exp(current - proximal)
        low, high = 1 - o.clip_low, 1 + o.clip_high
        # Clip-higher by cases: a gain is bounded above, a loss is bounded below, each only where it would go on.
        stops = ratio > high if advantage > 0 else ratio < low
        bounded = (high if advantage > 0 else low) if stops else ratio
        importance = math.exp(proximal - behaviour)
        weight = 1.0 if o.tis_cap == 0 else min(importance, o.tis_cap)
        kl = math.exp(reference - current) - (reference - current) - 1
        total += -weight * bounded * advantage + o.kl_coef * kl - o.entropy_coef * entropy
        grads[i] = (0 if stops else -weight * ratio * advantage) + o.kl_coef * (1 - math.exp(reference - current))
        values = (
            entropy,
            ratio,
            ratio < low or ratio > high,
            weight,
            importance > weight,
            importance - (proximal - behaviour) - 1,
            kl,
        )
        for name, value in zip(seen, values, strict=True):
            seen[name].append(value)
    metrics = {name: np.mean(values) if values else 0.0 for name, values in seen.items()}
    metrics["ratio"] = max(seen["ratio"], default=-math.inf)
    return total, s.mask.sum(), metrics, grads


METRICS = {
    "entropy": "entropy",
    "ratio_max": "ratio",
    "clip_fraction": "clipped",
    "tis_weight": "weight",
    "mismatch_kl": "mismatch",
    "kl": "kl",
}


def compare(o, s):
    grads, loss = jax.grad(lambda c: (lambda out: (out.total, out))(o(s._replace(current=c))), has_aux=True)(s.current)
    total, denominator, metrics, expected = naive_grpo(o, s)
    np.testing.assert_allclose(loss.total, total, rtol=1e-4, atol=1e-4)
    assert float(loss.denominator) == denominator
    np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-4)
    assert set(loss.metrics) == {*METRICS, "tis_capped_fraction"}
    for ours, theirs in METRICS.items():
        assert loss.metrics[ours].result() == pytest.approx(metrics[theirs], rel=1e-3, abs=1e-4), ours
    if o.tis_cap:
        assert loss.metrics["tis_capped_fraction"].result() == pytest.approx(metrics["capped"], abs=1e-6)
    return loss


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    clip_low=st.sampled_from([0.0, 0.2, 0.9]),
    clip_high=st.sampled_from([0.0, 0.28, 3.0]),
    tis_cap=st.sampled_from([0.0, 0.5, 2.0]),
    kl_coef=st.sampled_from([0.0, 0.3]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
)
def test_grpo_equals_numpy(seed, clip_low, clip_high, tis_cap, kl_coef, entropy_coef):
    compare(Grpo(clip_low, clip_high, tis_cap, kl_coef, entropy_coef), stats(seed))


def one(current=0.0, proximal=0.0, behaviour=0.0, reference=0.0, entropy=0.0, advantage=1.0):
    values = (current, proximal, behaviour, reference, entropy, advantage, 1.0)
    return TokenStats(*(jnp.full((1, 1), x, jnp.float32) for x in values))


@pytest.mark.parametrize(
    "ratio, advantage, total, flat",
    [
        (1.5, 1.0, -1.28, True),  # a gain, bounded above by 1 + clip_high
        (1.2, 1.0, -1.2, False),
        (0.5, 1.0, -0.5, False),  # a gain that shrank is never bounded
        (0.5, -1.0, 0.8, True),  # a loss, bounded below by 1 - clip_low
        (0.9, -1.0, 0.9, False),
        (1.5, -1.0, 1.5, False),  # a loss that grew is never bounded
    ],
)
def test_clipping_with_both_signs(ratio, advantage, total, flat):
    s = one(current=math.log(ratio), advantage=advantage)
    value, grad = jax.value_and_grad(lambda c: Grpo(tis_cap=0)(s._replace(current=c)).total)(s.current)
    assert float(value) == pytest.approx(total, rel=1e-5)
    assert (float(grad[0, 0]) == 0) is flat


def test_importance_weight_caps_and_switches_off():
    s = one(behaviour=-math.log(3.0))  # the proximal policy finds the token 3 times likelier
    assert float(Grpo(tis_cap=2.0)(s).total) == pytest.approx(-2.0, rel=1e-5)
    assert float(Grpo(tis_cap=5.0)(s).total) == pytest.approx(-3.0, rel=1e-5)
    assert float(Grpo(tis_cap=0.0)(s).total) == pytest.approx(-1.0, rel=1e-5)


def test_kl_is_k3_and_the_entropy_bonus_lowers_the_loss():
    s = one(reference=0.5, entropy=2.0, advantage=0.0)
    assert float(Grpo(kl_coef=0.1)(s).total) == pytest.approx(0.1 * (math.exp(0.5) - 1.5), rel=1e-5)
    assert float(Grpo(entropy_coef=0.01)(s).total) == pytest.approx(-0.02, rel=1e-5)
    assert Grpo(kl_coef=0.1).needs_reference and not Grpo().needs_reference


def test_far_apart_logprobs_stay_finite():
    s = one(current=-1.0, proximal=-500.0, behaviour=-900.0, reference=-900.0)
    value, grad = jax.value_and_grad(lambda c: Grpo(kl_coef=1.0)(s._replace(current=c)).total)(s.current)
    assert np.isfinite(float(value)) and np.isfinite(grad).all()


def test_masked_tokens_count_for_nothing():
    s = stats(0)
    noisy = TokenStats(*(np.where(s.mask > 0, x, x - 3) for x in s[:-1]), s.mask)
    o = Grpo(kl_coef=0.1, entropy_coef=0.1)
    ours, theirs = o(s), o(noisy)
    np.testing.assert_array_equal(ours.total, theirs.total)
    for name, metric in ours.metrics.items():
        assert metric.result() == theirs.metrics[name].result(), name


def test_nothing_to_train_on_gives_zeros():
    s = stats(0)._replace(mask=np.zeros((3, 7), np.float32))
    for o in (Grpo(kl_coef=0.1), Sft()):
        loss = o(s)
        assert float(loss.total) == float(loss.denominator) == loss.metrics["entropy"].result() == 0


def test_sft_equals_numpy():
    s = stats(3)
    loss = Sft()(s)
    np.testing.assert_allclose(loss.total, -sum(s.current[s.mask > 0]), rtol=1e-5)
    assert float(loss.denominator) == s.mask.sum()
    assert loss.metrics["entropy"].result() == pytest.approx(s.entropy[s.mask > 0].mean(), rel=1e-5)
    assert not Sft().needs_reference


def test_make_objective():
    assert make_objective("grpo", {"kl_coef": 0.5}) == Grpo(kl_coef=0.5)
    assert make_objective("sft", {}) == Sft()
    assert set(OBJECTIVES) == {"grpo", "sft"}


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("ppo", {}, "'ppo' is unknown; one of grpo, sft"),
        ("grpo", {"clip": 0.2}, "clip"),
        ("sft", {"needs_reference": True}, "needs_reference"),
        ("grpo", {"tis_cap": -1.0}, r"learner\.tis_cap=-1\.0"),
    ],
)
def test_wrong_objectives_are_refused(name, options, says):
    with pytest.raises(ConfigError, match=says):
        make_objective(name, options)

"""The decoder against a naive numpy forward, and what each parameter declares."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest

from venusrl.core.errors import ConfigError
from venusrl.models.attention import segment_attention
from venusrl.models.config import SIZES, ModelConfig, model_config
from venusrl.models.decoder import Decoder, head_matrix, init_params, rope
from venusrl.models.rope import rope_frequencies

from . import naive

LOGICAL_AXES = {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "norm"}
TOKENS = np.random.default_rng(1).integers(0, 64, 13)


def boxed(config):
    return jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))


def params_of(config, seed=0):
    return naive.random_params(nn.meta.unbox(boxed(config)), seed)


def logits(params, config, tokens=TOKENS):
    """[T, V] through the decoder."""

    def run(params, tokens_BT):
        positions = np.arange(tokens_BT.shape[1])[None]
        attend = segment_attention(np.ones_like(positions), block=5)
        hidden, caches = Decoder(config).apply({"params": params}, tokens_BT, positions, attend)
        assert caches == [None] * config.layers
        return hidden @ head_matrix(params)

    return np.asarray(jax.jit(run)(params, np.asarray(tokens)[None])[0])


@pytest.mark.parametrize(
    "overrides",
    [
        dict(qk_norm=True, tied=True),
        dict(qk_norm=False, tied=False, kv_heads=4),
        dict(qk_norm=True, tied=False, kv_heads=1, rope_theta=1e6, norm_eps=1e-2),
        dict(qk_norm=False, tied=True, remat=True),
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
def test_forward_equals_numpy(config, overrides):
    config = dataclasses.replace(config, **overrides)
    params = params_of(config)
    np.testing.assert_allclose(logits(params, config), naive.forward(params, config, TOKENS), rtol=2e-4, atol=2e-4)


def test_theta_comes_from_the_config(config):
    """A fixed theta in the code would pass every test that uses one theta only."""
    other = dataclasses.replace(config, rope_theta=100.0)
    params = params_of(config)
    ours = logits(params, other)
    np.testing.assert_allclose(ours, naive.forward(params, other, TOKENS), rtol=2e-4, atol=2e-4)
    assert np.abs(ours - naive.forward(params, config, TOKENS)).max() > 0.1


def test_tokens_see_only_earlier_ones(config):
    params = params_of(config)
    changed = TOKENS.copy()
    changed[8] = (changed[8] + 1) % 64
    before, after = logits(params, config), logits(params, config, changed)
    np.testing.assert_array_equal(before[:8], after[:8])
    assert (np.abs(before[8:] - after[8:]).max(axis=1) > 1e-4).all()


def test_rope_keeps_large_positions_apart_in_bfloat16():
    x = np.ones((1, 2, 1, 8), np.float32)
    for dtype, tolerance in (("float32", 1e-4), ("bfloat16", 1e-2)):
        turned = rope(jax.numpy.asarray(x, dtype), np.array([[256, 257]]), rope_frequencies(8, 1e4))
        assert turned.dtype == dtype
        expected = naive.rotate(np.ones((258, 8)), 1e4)[256:]
        np.testing.assert_allclose(np.asarray(turned[0, :, 0], np.float32), expected, atol=tolerance)


def test_bfloat16_computes_in_bfloat16_with_float32_parameters(config):
    config = dataclasses.replace(config, dtype="bfloat16")
    params = params_of(config)
    hidden = jax.eval_shape(
        lambda p: Decoder(config).apply({"params": p}, TOKENS[None], TOKENS[None], lambda q, k, v, c: (q, c))[0], params
    )
    assert hidden.dtype == "bfloat16"
    assert {x.dtype.name for x in jax.tree.leaves(nn.meta.unbox(boxed(config)))} == {"float32"}
    assert head_matrix(params).dtype == "float32"


@pytest.mark.parametrize(
    "overrides", [{}, dict(tied=False), dict(qk_norm=False, attention_bias="qkv"), dict(attention_bias="qkvo")]
)
def test_every_parameter_names_its_axes_and_is_counted(config, overrides):
    tree = boxed(dataclasses.replace(config, **overrides))
    specs = jax.tree_util.tree_leaves_with_path(
        nn.get_partition_spec(tree), is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
    )
    shapes = dict(jax.tree_util.tree_leaves_with_path(nn.meta.unbox(tree)))
    assert len(specs) == len(shapes)
    assert sum(x.size for x in shapes.values()) == dataclasses.replace(config, **overrides).num_params
    for path, spec in specs:
        assert len(spec) == len(shapes[path].shape), path
        assert set(spec) <= LOGICAL_AXES, path


PUBLISHED = {  # billions of parameters, from the model cards
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "smollm2-135m": 0.1345,
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_parameter_counts(name):
    config = dataclasses.replace(SIZES[name], layers=2)  # layers are alike: tracing 64 of them proves nothing more
    counted = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(nn.meta.unbox(boxed(config))))
    assert counted == config.num_params
    if name in PUBLISHED:
        assert SIZES[name].num_params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_flops_count_the_head_once():
    tied = ModelConfig(100, 8, 1, 2, 2, 4, 16)
    untied = dataclasses.replace(tied, tied=False)
    assert tied.train_flops_per_token(10) == untied.train_flops_per_token(10)
    assert tied.train_flops_per_token(20) - tied.train_flops_per_token(10) == 6 * 2 * 4 * 10


@pytest.mark.parametrize(
    "bad, says",
    [
        (dict(kv_heads=3), "kv_heads"),
        (dict(head_dim=7), "head_dim"),
        (dict(dtype="float16"), "dtype"),
        (dict(layers=0), "layers=0"),
        (dict(rope_theta=float("nan")), "rope_theta=nan"),
        (dict(rope_theta=1.0), r"rope_theta=1\.0"),
        (dict(norm_eps=-1e-6), "norm_eps"),
        (dict(attention_bias="q"), "attention_bias='q'"),
        (dict(qk_norm=True, attention_bias="qkv"), "attention_bias='qkv' with model.qk_norm"),
    ],
)
def test_impossible_configs_are_refused(config, bad, says):
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(config, **bad)


def test_unknown_size_is_refused():
    with pytest.raises(ConfigError, match=r"qwen3-0\.6b"):
        model_config("qwen9")

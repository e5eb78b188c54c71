"""Hugging Face folders: round trips, and every way in which one can be wrong."""

import dataclasses
import json
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venusrl.core.errors import CheckpointError
from venusrl.models import hf
from venusrl.models.decoder import init_params
from venusrl.models.rope import Llama3Rope, rope_frequencies

from . import naive


def params_of(config):
    shapes = nn.meta.unbox(jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0)))
    return naive.random_params(shapes)


@pytest.mark.parametrize(
    "overrides",
    [{}, dict(tied=False), dict(qk_norm=False), dict(qk_norm=False, attention_bias="qkv"), dict(attention_bias="qkvo")],
)
def test_round_trip_is_exact(tmp_path, config, overrides):
    config = dataclasses.replace(config, **overrides)
    params = params_of(config)
    hf.save(tmp_path, params, config)
    chex.assert_trees_all_equal(hf.load(tmp_path, config), params)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == config.rope_theta and written["tie_word_embeddings"] == config.tied
    kinds = {(True, ""): "qwen3", (True, "qkvo"): "qwen3", (False, ""): "llama", (False, "qkv"): "qwen2"}
    assert written["model_type"] == kinds[config.qk_norm, config.attention_bias]


def test_bfloat16_round_trip(tmp_path, config):
    params = params_of(config)
    hf.save(tmp_path, params, config, dtype="bfloat16")
    loaded = hf.load(tmp_path, config)
    chex.assert_trees_all_equal(loaded, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16).astype("float32"), params))
    assert {x.dtype.name for x in jax.tree.leaves(loaded)} == {"float32"}


def test_layouts_are_those_of_transformers(config):
    """y = W x with W [out, in], heads side by side in `out`: checked by applying both to a vector."""
    params = params_of(config)
    tensors = {name: np.asarray(x) for name, x in hf.to_hf(params, config).items()}
    x = np.random.default_rng(0).normal(size=config.embed).astype(np.float32)
    attn = params["layer_1"]["attn"]
    for name in "qkv":
        theirs = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"] @ x).reshape(-1, config.head_dim)
        np.testing.assert_allclose(theirs, np.einsum("d,dnh->nh", x, attn[name]), rtol=1e-4, atol=1e-5)
    heads = np.random.default_rng(1).normal(size=(config.heads, config.head_dim)).astype(np.float32)
    theirs = tensors["model.layers.1.self_attn.o_proj.weight"] @ heads.reshape(-1)
    np.testing.assert_allclose(theirs, np.einsum("nh,nhd->d", heads, attn["o"]), rtol=1e-4, atol=1e-5)
    theirs = tensors["model.layers.0.mlp.down_proj.weight"] @ np.ones(config.mlp, np.float32)
    np.testing.assert_allclose(theirs, params["layer_0"]["mlp"]["down"].sum(0), rtol=1e-4, atol=1e-4)


@pytest.fixture
def tensors(config):
    return {name: np.asarray(x) for name, x in hf.to_hf(params_of(config), config).items()}


NAME = "model.layers.0.mlp.up_proj.weight"


def said(tensors, config) -> str:
    with pytest.raises(CheckpointError) as caught:
        hf.from_hf(tensors, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_that_is_missing_and_too_much_is_listed_within_bounds(config, tensors):
    del tensors[NAME]
    tensors["model.layers.0.mlp.other.weight"] = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    message = said(tensors, config)
    assert f"1 of {len(hf.names(config))} tensors are missing: {NAME}" in message
    assert "1 have no place in this model: model.layers.0.mlp.other.weight" in message
    assert "1 of another shape: model.norm.weight has shape (31,), the model needs (32,)" in message
    many = {f"model.layers.{i}.x": np.zeros(1) for i in range(1000)}
    message = said(many, config)
    assert f"{len(hf.names(config))} of {len(hf.names(config))} tensors are missing" in message
    assert "1000 have no place" in message and "and 992 more" in message and len(message) < 1500


def test_wrong_shape(config, tensors):
    tensors[NAME] = tensors[NAME].T
    assert "(32, 48), the model needs (48, 32)" in said(tensors, config)


def _renamed(before, after):
    def change(tensors):
        for name in list(tensors):
            if before in name:
                tensors[name.replace(before, after)] = tensors.pop(name)

    return change


def _without(part):
    def change(tensors):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def _with(*names):
    return lambda tensors: tensors.update({name: np.zeros(4, np.float32) for name in names})


CAUSES = {
    "a shard is missing": (_without("layers.1."), "The file is incomplete"),
    "more layers": (_with("model.layers.2.mlp.up_proj.weight"), "more layers than the 2 of this shape"),
    "another size": (
        lambda t: t.update({n: x[..., :-1] for n, x in t.items()}),
        "of another size than config.json or model.name say",
    ),
    "LoRA": (_with("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"), "an adapter's .*merge it"),
    "quantised": (_renamed("proj.weight", "proj.qweight"), "the weights are quantised"),
    "experts": (_renamed("mlp.up_proj", "mlp.experts.0.up_proj"), "a mixture of experts"),
    "text and images": (_renamed("model.", "model.language_model."), "a model of text and images"),
    "another family": (_renamed("model.layers", "transformer.h"), "a model of another family"),
    "Phi": (_renamed("q_proj", "qkv_proj"), "stores projections together"),
    "a reward model": (_with("score.weight"), "a reward or classification model"),
    "saved without its head": (_renamed("model.", ""), "saved without its head"),
    "biases": (_with("model.layers.0.self_attn.q_proj.bias"), "The file has biases and this shape has none"),
    "no qk-norm": (_without("q_norm"), "This shape has norms of queries and the file has none"),
}


def _prefixed(prefix, at=""):
    """`prefix` before the rest of every name that has `at` in it."""
    return lambda tensors: [
        tensors.update({name.replace(at, at + prefix, 1): tensors.pop(name)}) for name in list(tensors) if at in name
    ]


def _both(*changes):
    return lambda tensors: [change(tensors) for change in changes]


PREFIXES = [
    *("module.", "_orig_mod.", "_orig_mod.module.", "base_model.model.", "model.", "policy.", "actor_module."),
    *("language_model.", "_fsdp_wrapped_module.", "student.transformer.h."),
]
CAUSES |= {
    f"prefix {prefix}": (_prefixed(prefix), f"Every name has '{re.escape(prefix)}' in front") for prefix in PREFIXES
}
CAUSES |= {
    "a prefix, and no head": (
        _both(_renamed("model.", ""), _prefixed("module.")),
        "Every name has 'module.' in front.*lacks 'model.'.*without its head",
    ),
    "a prefix, and a tied head": (
        _both(_with("lm_head.weight"), _prefixed("module.")),
        "Every name has 'module.' in front",
    ),
    "wrapped layers": (_prefixed("_orig_mod.", "layers.1."), "Names have '_orig_mod.' in them"),
    "wrappers of both kinds": (
        _both(_prefixed("_checkpoint_wrapped_module.", "layers.0."), _prefixed("_fsdp_wrapped_module.", "layers.1.")),
        "Names have '_checkpoint_wrapped_module.' and '_fsdp_wrapped_module.' in them",
    ),
    "LoRA in PEFT's wrapper": (
        _both(_prefixed("base_model.model."), _renamed("q_proj.weight", "q_proj.base_layer.weight"),
              _with("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")),
        "an adapter's .*merge it",
    ),
    "a language model beside a vision tower": (
        _both(_prefixed("language_model."), _with("vision_tower.patch.weight")),
        "a model of text and images",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_that_is_told_is_the_right_one(config, tensors, name):
    change, cause = CAUSES[name]
    change(tensors)
    assert re.search(cause, said(tensors, config)), said(tensors, config)


def test_an_untied_shape_for_a_tied_model_is_told(config, tensors):
    untied = dataclasses.replace(config, tied=False)
    message = said(tensors, untied)
    assert "lm_head.weight" in message and "the model is tied; set tie_word_embeddings" in message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scaling", [None, Llama3Rope(8.0, 1.0, 4.0, 16)], ids=["plain", "llama3"])
def test_rotary_buffers_are_left_out_where_they_say_the_same(config, tensors, scaling, dtype):
    config = dataclasses.replace(config, rope_scaling=scaling)
    buffer = jnp.asarray(rope_frequencies(config.head_dim, config.rope_theta, scaling), dtype)
    names = ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"]
    params = hf.from_hf(tensors | dict.fromkeys(names, buffer), config)
    chex.assert_trees_all_equal(params, hf.from_hf(tensors, config))
    for wrong in (buffer * 1.1, buffer[:-1]):
        message = said(tensors | {names[0]: wrong}, config)
        assert names[0] in message and "rope_theta=10000.0" in message


def test_a_tensor_that_is_not_finite_is_named(config, tensors):
    tensors[NAME] = tensors[NAME].copy()
    tensors[NAME][3, 3] = np.nan
    assert f"tensor {NAME} has 1 values that are not finite" in said(tensors, config)


def test_biases_travel_to_a_worker(config):
    config = dataclasses.replace(config, attention_bias="qkvo")
    params = params_of(config)
    assert params["layer_0"]["attn"]["q_bias"].shape == (config.heads, config.head_dim)
    chex.assert_trees_all_equal(hf.from_bytes(hf.to_bytes(params, config), config), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tied_model_with_an_equal_head(config, tensors, dtype):
    tensors = {name: jnp.asarray(x, dtype) for name, x in tensors.items()}
    params = hf.from_hf(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, config)
    assert "head" not in params


def test_tied_model_with_another_head(config, tensors):
    head = tensors["model.embed_tokens.weight"].copy()
    head[3, 5] += 1e-3
    with pytest.raises(CheckpointError, match="tied"):
        hf.from_hf(tensors | {"lm_head.weight": head}, config)

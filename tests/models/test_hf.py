"""Hugging Face folders: round trips, and every way in which one can be wrong."""

import dataclasses
import json

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from venusrl.core.errors import CheckpointError
from venusrl.models import hf, hf_config
from venusrl.models.decoder import init_params

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


def test_missing_tensor(config, tensors):
    del tensors[NAME]
    with pytest.raises(CheckpointError, match=NAME):
        hf.from_hf(tensors, config)


def test_unknown_tensor(config, tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors[NAME]
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp"):
        hf.from_hf(tensors, config)


def test_wrong_shape(config, tensors):
    tensors[NAME] = tensors[NAME].T
    with pytest.raises(CheckpointError, match=r"\(32, 48\).*\(48, 32\)"):
        hf.from_hf(tensors, config)


@pytest.fixture
def described(tmp_path, config):
    """A folder with the config.json of `config` and no weights yet."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config.describe(config, "float32")))
    return tmp_path


def test_tensor_in_two_files(described, tmp_path, config, tensors):
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file({NAME: tensors[NAME]}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=f"{NAME} is there twice"):
        hf.load(tmp_path, config)


def test_shards(described, tmp_path, config, tensors):
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]}, tmp_path / "model-1.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, tmp_path / "model-2.safetensors")
    chex.assert_trees_all_equal(hf.load(tmp_path, config), params_of(config))


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


@pytest.mark.parametrize("left", [0, 5, 200, -10], ids=["empty", "in-length", "in-header", "in-data"])
def test_truncated_file_is_named(described, tmp_path, config, tensors, left):
    save_file(tensors, tmp_path / "model-1.safetensors")
    whole = (tmp_path / "model-1.safetensors").read_bytes()
    (tmp_path / "model-1.safetensors").write_bytes(whole[:left])
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors"):
        hf.load(tmp_path, config)


def test_no_files(tmp_path, config):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        hf.load(tmp_path / "nowhere", config)

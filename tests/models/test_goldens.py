"""Logits of tiny models as transformers computed them (make_goldens.py), from the folders that it saved."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venusrl.core.errors import CheckpointError
from venusrl.models import hf, hf_config
from venusrl.models.attention import segment_attention
from venusrl.models.decoder import Decoder, head_matrix
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.worker import Request

from . import make_goldens

GOLDENS = Path(__file__).parent / "goldens"
TOKENS = make_goldens.tokens()


def logits(config, params) -> np.ndarray:
    """[T, V] of TOKENS."""
    positions = jnp.arange(len(TOKENS))[None]

    def run(params):
        attend = segment_attention(jnp.ones_like(positions))
        hidden, _ = Decoder(config).apply({"params": params}, TOKENS[None], positions, attend)
        return (hidden @ head_matrix(params))[0]

    return np.asarray(jax.jit(run)(params))


def load(folder):
    config, _ = hf_config.read_config(Path(folder))
    return config, hf.load(folder, config)


@pytest.mark.parametrize("name", sorted(make_goldens.KINDS))
def test_logits_equal_those_of_transformers(name):
    config, params = load(GOLDENS / name)
    expected = np.load(GOLDENS / name / "logits.npy")
    np.testing.assert_allclose(logits(config, params), expected, atol=2e-4, rtol=2e-4)
    assert np.abs(expected).max() > 1  # else equality would say little


@pytest.mark.parametrize("name", sorted(make_goldens.KINDS))
def test_the_config_of_transformers_4_says_the_same_as_that_of_5(name):
    theirs = json.loads((GOLDENS / name / "config.json").read_text())
    rope = dict(theirs.pop("rope_parameters"))
    theirs["rope_theta"] = rope.pop("rope_theta")
    theirs["rope_scaling"] = None
    if rope["rope_type"] != "default":
        theirs["rope_scaling"] = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    theirs["torch_dtype"] = theirs.pop("dtype")
    theirs.pop("layer_types", None)
    config, _ = hf_config.read_config(GOLDENS / name)
    fields = hf_config.Fields(theirs)
    assert hf_config._shape(fields) == {key: getattr(config, key) for key in hf_config._shape(fields)}
    assert fields.problems == []


@pytest.mark.parametrize("name", sorted(make_goldens.KINDS))
def test_a_folder_that_we_write_is_the_same_model(tmp_path, name):
    config, params = load(GOLDENS / name)
    hf.save(tmp_path, params, config, dtype="bfloat16", shard_bytes=6000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again, copied = load(tmp_path)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, params, copied)


def test_the_engine_computes_the_logprobs_of_transformers():
    """Prefill in parts, decode from the cache: scaled rotary embeddings and biases are in all of them."""
    folder = GOLDENS / "qwen3_bias_yarn"
    config, params = load(folder)
    assert config.attention_bias and config.rope_scaling
    expected = np.load(folder / "logits.npy").astype(np.float64)
    options = EngineOptions(
        slots=1, lanes=1, max_length=64, decode_steps=2, prefill_rows=(1,), prefill_tokens=(32,), read_lengths=()
    )
    engine = Engine(config, params, 0, (), options)
    engine.submit(Request("t", TOKENS.tolist(), 1, 0.0, 0))
    [(_, chunk)] = [made for _ in range(8) for made in engine.step() if made[1].tokens]
    last = expected[-1] - expected[-1].max()
    assert chunk.tokens == [int(last.argmax())]
    assert chunk.logprobs[0] == pytest.approx(-np.log(np.exp(last).sum()), abs=1e-4)


@pytest.mark.parametrize("name", ["llama3", "qwen3_yarn", "qwen2"])
def test_another_rope_or_no_bias_gives_other_logits(tmp_path, name):
    """What the goldens would miss, they would not test."""
    shutil.copytree(GOLDENS / name, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    if name == "qwen2":
        described |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    else:
        described["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": described["rope_parameters"]["rope_theta"],
        }
    path.write_text(json.dumps(described))
    if name == "qwen2":
        with pytest.raises(CheckpointError, match=r"6 have no place .*q_proj\.bias.*The file has biases"):
            load(tmp_path)
        return
    config, params = load(tmp_path)
    assert np.abs(logits(config, params) - np.load(GOLDENS / name / "logits.npy")).max() > 0.1

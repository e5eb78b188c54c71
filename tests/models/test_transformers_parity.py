"""Folders that we write, as transformers reads them; rotary frequencies and tokens, as transformers computes them.

Passes with transformers 5.24.0 and 4.57.3.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from venusrl.models import folder, hf_config
from venusrl.models.attention import segment_attention
from venusrl.models.chat import ChatFormat
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import Decoder, head_matrix, init_params
from venusrl.models.rope import LinearRope, Llama3Rope, YarnRope, rope_frequencies, yarn_attention_factor
from venusrl.models.tokenizer import Tokenizer
from venusrl.models.tokenizer_files import TokenizerFiles

from . import naive
from .conftest import TEXTS

pytestmark = [pytest.mark.parity, pytest.mark.timeout(600)]
torch = pytest.importorskip("torch", reason="needs torch: pip install -r requirements-parity.txt")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -r requirements-parity.txt")

BASE = ModelConfig(448, 32, 2, 4, 2, 16, 48, rope_theta=1e4, norm_eps=1e-5, max_length=64)
LLAMA3 = Llama3Rope(8.0, 1.0, 4.0, 16)
YARN = YarnRope(4.0, 16, yarn_attention_factor(4.0))
SHAPES = {
    "qwen3": {},
    "qwen3, untied, YaRN": dict(tied=False, rope_scaling=YARN),
    "qwen3, YaRN of its own": dict(rope_scaling=YarnRope(4.0, 16, 0.7, 8.0, 2.0, truncate=False)),
    "qwen3, biases": dict(attention_bias="qkvo"),
    "llama, untied": dict(qk_norm=False, tied=False),
    "llama 3": dict(qk_norm=False, rope_scaling=LLAMA3, rope_theta=500.0),
    "llama, linear": dict(qk_norm=False, rope_scaling=LinearRope(3.0)),
    "llama, biases": dict(qk_norm=False, attention_bias="qkvo"),
    "qwen2": dict(qk_norm=False, attention_bias="qkv"),
    "qwen2, untied, wide heads": dict(qk_norm=False, attention_bias="qkv", tied=False, head_dim=24),
}
HARD = [
    *TEXTS,
    "e\u0301 is two code points, \u00e9 one",
    "  two spaces, 3.14159 and 1,000,000\r\n\ttab \u65e5\u672c\u8a9e \U0001f469\u200d\U0001f680",
    "it's I'LL we'd\n\n\n<|im_end|>",
]


def random_params(config: ModelConfig) -> dict:
    return naive.random_params(
        nn.meta.unbox(jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))), seed=5
    )


def our_logits(config, params, tokens) -> np.ndarray:
    positions = jnp.arange(len(tokens))[None]
    attend = segment_attention(jnp.ones_like(positions))
    hidden, _ = Decoder(config).apply({"params": params}, tokens[None], positions, attend)
    return np.asarray((hidden @ head_matrix(params))[0])


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, 400)


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000], ids=["whole", "sharded"])
@pytest.mark.parametrize("name", SHAPES)
def test_an_exported_folder_has_our_logits_in_transformers(tmp_path, tokenizer, name, shard_bytes):
    config = dataclasses.replace(BASE, **SHAPES[name])
    params = random_params(config)
    stop = (tokenizer.im_end, tokenizer.end_of_text)
    folder.write_folder(
        tmp_path / "out", params, config, tokenizer, TokenizerFiles(), stop, "float32", shard_bytes=shard_bytes
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert model.dtype == torch.float32
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 60)
    with torch.no_grad():
        theirs = model.eval()(torch.tensor(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(our_logits(config, params, tokens), theirs, atol=1e-3, rtol=1e-3)
    assert set(model.generation_config.eos_token_id) == set(stop)
    again = folder.open_folder(tmp_path / "out")
    assert again.config == config and set(again.files.stop_tokens) == set(stop)


def test_a_bfloat16_export_is_bfloat16_in_transformers(tmp_path, tokenizer):
    folder.write_folder(tmp_path / "out", random_params(BASE), BASE, tokenizer, TokenizerFiles(), (2,), "bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["qwen3", "llama, untied", "qwen2"])
def test_an_exported_tokenizer_makes_the_same_tokens_and_prompts(tmp_path, tokenizer, name):
    stop = (tokenizer.im_end, tokenizer.end_of_text)
    config = dataclasses.replace(BASE, **SHAPES[name])
    folder.write_folder(tmp_path / "out", random_params(config), config, tokenizer, TokenizerFiles(), stop)
    # AutoTokenizer of version 5 splits text of a qwen2 as Qwen does, whatever the folder says; ours is no Qwen's.
    reader = transformers.PreTrainedTokenizerFast if name == "qwen2" else transformers.AutoTokenizer
    theirs = reader.from_pretrained(tmp_path / "out")
    for text in HARD:
        plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert tokenizer.encode(text) == plain, text
        assert tokenizer.decode(plain) == theirs.decode(plain), text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.im_end, tokenizer.end_of_text)
    messages = [{"role": "system", "content": "S s"}, {"role": "user", "content": "U\nu"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ChatFormat(tokenizer).prompt(messages) == list(rendered)


@pytest.mark.parametrize("name", ["qwen3, untied, YaRN", "llama 3", "qwen2", "llama, biases"])
def test_a_folder_that_transformers_saves_is_read_as_the_same_model(tmp_path, tokenizer, name):
    config = dataclasses.replace(BASE, **SHAPES[name])
    params = random_params(config)
    stop = (tokenizer.im_end, tokenizer.end_of_text)
    folder.write_folder(tmp_path / "ours", params, config, tokenizer, TokenizerFiles(), stop)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(
        tmp_path / "theirs", max_shard_size="20KB"
    )
    transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    again = folder.open_folder(tmp_path / "theirs")
    assert again.config == config
    assert set(again.files.stop_tokens) == set(stop)
    assert again.files.chat_template
    jax.tree.map(np.testing.assert_array_equal, again.params(), params)
    assert [again.tokenizer.encode(text) for text in HARD] == [tokenizer.encode(text) for text in HARD]


@pytest.mark.parametrize("seed", range(20))
def test_rotary_frequencies_equal_those_of_transformers(seed):
    """Random parameters of every kind, read from a config.json as transformers writes it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rng = np.random.default_rng(seed)
    head_dim, theta = int(rng.choice([16, 64, 128])), float(rng.choice([1e4, 5e5, 1e6]))
    original, factor = int(rng.choice([64, 2048, 8192, 32768])), float(rng.uniform(1, 40))
    scaled = {"factor": factor, "original_max_position_embeddings": original}
    groups = [
        {"rope_type": "linear", "factor": factor},
        {
            "rope_type": "llama3",
            "low_freq_factor": rng.uniform(0.5, 2),
            "high_freq_factor": rng.uniform(2.5, 8),
            **scaled,
        },
        {"rope_type": "yarn", **scaled},
        {"rope_type": "yarn", "beta_fast": rng.uniform(8, 40), "beta_slow": rng.uniform(0.5, 4), **scaled},
        {"rope_type": "yarn", "attention_factor": rng.uniform(0.5, 2), "truncate": False, **scaled},
        {"rope_type": "yarn", "mscale": rng.uniform(0.5, 2), "mscale_all_dim": rng.uniform(0.5, 2), **scaled},
    ]
    for group in groups:
        described = hf_config.describe(dataclasses.replace(BASE, head_dim=head_dim, rope_theta=theta), "float32")
        described["rope_scaling"] = group
        fields = hf_config.Fields(described)
        shape = hf_config._shape(fields)
        assert not fields.problems
        theirs = transformers.Qwen3Config(**described)
        expected, attention = ROPE_INIT_FUNCTIONS[group["rope_type"]](theirs, "cpu")
        ours = rope_frequencies(head_dim, theta, shape["rope_scaling"])
        np.testing.assert_allclose(ours, expected.numpy(), rtol=2e-4, err_msg=str(group))
        assert shape["rope_scaling"].attention_factor == pytest.approx(attention)

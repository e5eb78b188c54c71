"""`config.model`: an empty name takes the shape of the files; a name is compared with them, all of it."""

import json

import flax.linen as nn
import jax
import numpy as np
import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from configs import base
from launchers import system
from launchers.configuration import check_config
from tests.models import naive
from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.models import hf
from venusrl.models.config import SIZES, ModelConfig
from venusrl.models.decoder import init_params
from venusrl.models.rope import YarnRope
from venusrl.models.tokenizer import Tokenizer

QWEN2 = ModelConfig(
    320, 32, 2, 4, 2, 8, 48, qk_norm=False, attention_bias="qkv", rope_scaling=YarnRope(2.0, 64, 1.07), max_length=128
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a tiny text <|im_end|>"] * 3, 300)


@pytest.fixture
def folder(tmp_path, tokenizer):
    """A Qwen2.5 that no name stands for, with the files of the hub."""
    shapes = jax.eval_shape(lambda key: init_params(QWEN2, key), jax.random.key(0))
    params = naive.random_params(nn.meta.unbox(shapes))
    hf.save(tmp_path, params, QWEN2, ids={"eos_token_id": tokenizer.end_of_text})
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.im_end, tokenizer.im_start], "top_k": 20})
    )
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


def config_for(folder, name="", **changes):
    config = base.get_config()
    config.model.name, config.model.checkpoint = name, str(folder)
    for field, value in changes.items():
        config.model[field] = value
    check_config(config)
    return config


def test_an_empty_name_takes_the_shape_of_the_folder(folder, tokenizer):
    config = config_for(folder, dtype="bfloat16", remat=True)
    system.check(config)
    model = system.load_model(config)
    assert (model.config.dtype, model.config.remat) == ("bfloat16", True)
    again = system.load_model(config_for(folder))
    assert again.config == QWEN2
    jax.tree.map(np.testing.assert_array_equal, again.params, hf.load(folder, QWEN2))
    system.make_learner(config_for(folder), QWEN2).abstract_state()  # the sharding rules know every parameter


def test_ends_of_the_model_are_stop_tokens(folder, tokenizer):
    model = system.load_model(config_for(folder))
    assert set(model.chat.stop_tokens) == {tokenizer.im_end, tokenizer.end_of_text, tokenizer.im_start}
    assert model.files.stop_tokens == (tokenizer.im_end, tokenizer.im_start, tokenizer.end_of_text)
    assert model.files.chat_template == "{{ messages }}"


def test_a_begin_of_sequence_that_is_left_out_is_told(folder, caplog):
    settings = {"bos_token": "<|endoftext|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = system.load_model(config_for(folder))
    assert model.files.prefix == (model.tokenizer.end_of_text,)
    assert "its sequences begin with ['<|endoftext|>']" in caplog.text


def test_a_name_is_compared_with_all_of_the_folder(folder):
    with pytest.raises(CheckpointError) as caught:
        system.load_model(config_for(folder, "tiny"))
    for field in (
        "vocab_size",
        "embed",
        "layers",
        "head_dim",
        "mlp",
        "rope_theta",
        "rope_scaling",
        "qk_norm",
        "max_length",
    ):
        assert f"model.{field}=" in str(caught.value)
    assert "--config.model.name=" in str(caught.value)


def test_a_folder_of_another_tokenizer_is_refused(folder):
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"vocab_size": 200}))
    with pytest.raises(CheckpointError, match="the embedding 200 rows"):
        system.load_model(config_for(folder))


def test_unknown_keys_are_refused_until_they_are_ignored(folder):
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"some_switch": 4}))
    with pytest.raises(CheckpointError, match=r"some_switch=4.*--config\.model\.ignore"):
        system.load_model(config_for(folder))
    assert system.load_model(config_for(folder, ignore=("some_switch",))).config == QWEN2


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json in"):
        system.load_model(config_for(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no tokenizer at"):
        system.load_model(config_for(tmp_path / "nowhere", "tiny"))
    with pytest.raises(ConfigError, match="'tinny' is unknown"):
        system.check(config_for(tmp_path, "tinny"))


def test_a_llama_without_chatml_loads_as_a_model(folder):
    """Its chat format is another matter: that is refused in one line, or the model's own template is used."""
    backend = Backend(models.BPE())
    backend.add_special_tokens([AddedToken("<|eot_id|>", special=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"eos_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    found = system.describe_model(config_for(folder))
    assert found.files.stop_tokens == (0,)
    assert set(found.read()) >= {"embedding", "layer_0"}


def test_a_gguf_file_gives_its_shape_too(tmp_path):
    pytest.importorskip("gguf")
    from tests.models import test_gguf

    path = test_gguf.write(tmp_path / "m.gguf", test_gguf.LLAMA, test_gguf.make_tensors(test_gguf.LLAMA))
    found = system.describe_model(config_for(path, source="gguf"))
    assert found.config == test_gguf.LLAMA
    with pytest.raises(CheckpointError, match=r"model\.vocab_size=768, but m\.gguf has 272"):
        system.describe_model(config_for(path, "tiny", source="gguf"))
    assert SIZES["tiny"].vocab_size == 768

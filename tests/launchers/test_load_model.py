"""`config.model`: an empty name takes the shape of the files; a name is compared with them, all of it."""

import json

import flax.linen as nn
import jax
import numpy as np
import pytest
from tokenizers import AddedToken
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


def test_without_a_template_sequences_begin_as_the_files_say(folder, tokenizer):
    (folder / "chat_template.jinja").unlink()
    hello = [{"role": "user", "content": "a"}]
    plain = system.load_model(config_for(folder)).chat.prompt(hello)
    settings = {"bos_token": "<|endoftext|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = system.load_model(config_for(folder))
    assert model.files.prefix == (model.tokenizer.end_of_text,)
    assert model.chat.prompt(hello) == [tokenizer.end_of_text, *plain]
    assert model.chat.observation("o", tokenizer.im_end)[0] != tokenizer.end_of_text  # at the beginning alone


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


LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)


def test_a_llama_without_chatml_is_rendered_by_its_own_template_or_refused_in_one_line(folder, tokenizer):
    special = ["<|begin|>", "<|start|>", "<|end|>", "<|eot_id|>"]
    backend = Backend.from_str(tokenizer._backend.to_str().replace("|im_", "|no_").replace("<|endoftext|>", "<|none|>"))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.save(str(folder / "tokenizer.json"))
    end = backend.token_to_id("<|eot_id|>")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"eos_token_id": end}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>"}))
    (folder / "chat_template.jinja").write_text(LLAMA)
    model = system.load_model(config_for(folder))
    assert model.chat.stop_tokens == (end,) and model.chat.note is None and not model.chat.reads_calls
    ids = model.chat.prompt([{"role": "user", "content": " a <|eot_id|> "}])
    assert ids.count(end) == 1 and ids[0] == backend.token_to_id("<|begin|>")
    ids += [*model.tokenizer.encode("text"), end]
    ids += model.chat.observation("o", end)
    text = "<|start|>user<|end|>\n\na <|eot_id|><|eot_id|><|start|>assistant<|end|>\n\ntext<|eot_id|>"
    text = f"<|begin|>{text}<|start|>user<|end|>\n\no<|eot_id|><|start|>assistant<|end|>\n\n"
    assert model.tokenizer.decode(ids, keep_control=True) == text
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="which ChatML needs"):
        system.load_model(config_for(folder))
    assert set(system.describe_model(config_for(folder)).read()) >= {"embedding", "layer_0"}


def test_a_gguf_file_gives_its_shape_too(tmp_path):
    pytest.importorskip("gguf")
    from tests.models import test_gguf

    path = test_gguf.write(tmp_path / "m.gguf", test_gguf.LLAMA, test_gguf.make_tensors(test_gguf.LLAMA))
    found = system.describe_model(config_for(path, source="gguf"))
    assert found.config == test_gguf.LLAMA
    with pytest.raises(CheckpointError, match=r"model\.vocab_size=768, but m\.gguf has 272"):
        system.describe_model(config_for(path, "tiny", source="gguf"))
    assert SIZES["tiny"].vocab_size == 768

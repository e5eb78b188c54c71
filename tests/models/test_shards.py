"""Which files of a folder are the model: the index, numbered parts, strays, damaged and quantised files."""

import json
import logging
import os
import re
import socket

import chex
import numpy as np
import pytest
from safetensors.numpy import save_file

from venusrl.core.errors import CheckpointError
from venusrl.models import hf, hf_config, shards

from .test_hf import params_of

NAME = "model.layers.0.mlp.up_proj.weight"
PARTS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


@pytest.fixture
def tensors(config):
    return {name: np.asarray(x) for name, x in hf.to_hf(params_of(config), config).items()}


@pytest.fixture
def folder(tmp_path, config):
    """A folder with the config.json of `config` and no weights yet."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config.describe(config, "float32")))
    return tmp_path


@pytest.fixture
def indexed(folder, tensors):
    """Two files with their index."""
    names = sorted(tensors)
    places = {}
    for file, part in zip(PARTS, (names[::2], names[1::2]), strict=True):
        save_file({n: tensors[n] for n in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / shards.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def refused(folder, config) -> str:
    with pytest.raises(CheckpointError) as caught:
        hf.load(folder, config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_of_an_index_are_one_model(indexed, config):
    chex.assert_trees_all_equal(hf.load(indexed, config), params_of(config))


def test_numbered_files_without_an_index_are_one_model(indexed, config):
    (indexed / shards.INDEX).unlink()
    chex.assert_trees_all_equal(hf.load(indexed, config), params_of(config))


def test_a_file_that_the_index_names_and_is_missing_is_named(indexed, config):
    (indexed / PARTS[1]).unlink()
    assert f"1 of 2 files of the model are missing: {PARTS[1]}" in refused(indexed, config)
    (indexed / shards.INDEX).unlink()
    assert "parts [2] of 2 of the model are missing" in refused(indexed, config)


def test_an_index_of_another_model_is_refused(indexed, config):
    index = json.loads((indexed / shards.INDEX).read_text())
    del index["weight_map"][NAME]
    (indexed / shards.INDEX).write_text(json.dumps(index))
    assert f"1 tensors are not in the index, as {NAME}" in refused(indexed, config)
    index["weight_map"] |= {"model.more": PARTS[0], NAME: PARTS[0]}
    (indexed / shards.INDEX).write_text(json.dumps(index))
    assert "are not in their file, as model.more" in refused(indexed, config)


@pytest.mark.parametrize("places", [[], {}, {"a": 1}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}])
def test_an_index_that_names_no_files_of_its_folder_is_refused(indexed, config, places):
    (indexed / shards.INDEX).write_text(json.dumps({"weight_map": places}))
    assert shards.INDEX in refused(indexed, config)


def test_two_models_in_a_folder_are_refused(indexed, config, tensors):
    save_file(tensors, indexed / "model.safetensors")
    assert "two models, model.safetensors and the files of model.safetensors.index.json" in refused(indexed, config)
    (indexed / shards.INDEX).unlink()
    assert f"two models, model.safetensors and {PARTS[0]}" in refused(indexed, config)
    (indexed / "model.safetensors").unlink()
    save_file(tensors, indexed / "model-00001-of-00003.safetensors")
    assert "parts of several models, of [2, 3] files each" in refused(indexed, config)


@pytest.mark.parametrize("with_index", [True, False])
def test_other_files_of_weights_are_told_and_not_merged(indexed, config, tensors, with_index, caplog):
    if not with_index:
        for file in (*PARTS, shards.INDEX):
            (indexed / file).unlink()
        save_file(tensors, indexed / "model.safetensors")
    save_file({"other": np.zeros(3), NAME: np.zeros((1, 1))}, indexed / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        chex.assert_trees_all_equal(hf.load(indexed, config), params_of(config))
    assert "consolidated.safetensors not read" in caplog.text


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_is_refused(folder, config, tensors, name):
    save_file(tensors, folder / "model.safetensors")
    save_file({"x": np.zeros(3)}, folder / name)
    assert f"holds an adapter ({name}" in refused(folder, config)


def test_tensor_in_two_files(folder, config, tensors):
    save_file(tensors, folder / "model-1.safetensors")
    save_file({NAME: tensors[NAME]}, folder / "model-2.safetensors")
    assert f"{NAME} is there twice" in refused(folder, config)


@pytest.mark.parametrize("left", [0, 5, 200, -10], ids=["empty", "in-length", "in-header", "in-data"])
def test_truncated_file_is_named(folder, config, tensors, left):
    save_file(tensors, folder / "model-1.safetensors")
    whole = (folder / "model-1.safetensors").read_bytes()
    (folder / "model-1.safetensors").write_bytes(whole[:left])
    assert "model-1.safetensors is damaged" in refused(folder, config)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float64", "float8_e4m3fn"])
def test_numbers_of_another_type_are_refused_by_its_name(folder, config, tensors, dtype):
    import ml_dtypes

    wanted = ml_dtypes.float8_e4m3fn if dtype.startswith("float8") else dtype
    save_file(tensors | {NAME: tensors[NAME].astype(wanted)}, folder / "model.safetensors")
    name = {"int8": "I8", "uint8": "U8", "float64": "F64", "float8_e4m3fn": "F8_E4M3"}[dtype]
    assert f"as {NAME}, which is {name}" in refused(folder, config)


def test_half_precision_is_read(folder, config, tensors):
    save_file({name: x.astype(np.float16) for name, x in tensors.items()}, folder / "model.safetensors")
    expected = {name: x.astype(np.float16).astype(np.float32) for name, x in tensors.items()}
    chex.assert_trees_all_equal(hf.load(folder, config), hf.from_hf(expected, config))


def test_no_files_and_other_formats_are_named(tmp_path, config):
    assert "no *.safetensors of a model in" in refused(tmp_path / "nowhere", config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "there are pytorch_model.bin" in refused(tmp_path, config)


def test_nothing_is_read_before_all_names_and_shapes_fit(folder, config, tensors, monkeypatch):
    del tensors[NAME]
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr(shards, "tensors", lambda files: pytest.fail("read"))
    assert NAME in refused(folder, config)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model-00001-of-99999999999.safetensors", r"parts \[2, 3, 4, 5, 6, 7, 8, 9\] of 99999999999 .* missing"),
        ("model-00000-of-00001.safetensors", r"parts \[0\] of 1 cannot be"),
        ("model-00003-of-00001.safetensors", r"parts \[3\] of 1 cannot be"),
    ],
)
def test_the_number_in_a_name_is_not_counted_up_to(folder, config, tensors, name, said):
    save_file(tensors, folder / name)
    assert re.search(said, refused(folder, config))


def not_a_file(path, kind):
    """Puts what would be waited for, or read without an end, at `path`."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's address is at most 108 bytes
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path.name)
        finally:
            os.chdir(here)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket", "device"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", shards.INDEX])
def test_what_is_no_file_is_not_waited_for(folder, config, tensors, name, kind):
    save_file(tensors, folder / "model.safetensors")
    (folder / name).unlink(missing_ok=True)
    not_a_file(folder / name, kind)
    assert f"{name} is no file" in refused(folder, config)


def test_names_come_in_the_order_of_the_layers_each_time(config, tensors):
    strange = {f"model.layers.{i}.strange": np.zeros(1, np.float32) for i in (10, 9, 2, 0)}
    said = {}
    for order in (list(strange), list(reversed(strange))):
        with pytest.raises(CheckpointError) as caught:
            hf.from_hf(tensors | {name: strange[name] for name in order}, config)
        said[str(caught.value)] = None
    [only] = said
    assert only.index("layers.0.s") < only.index("layers.2.s") < only.index("layers.9.s") < only.index("layers.10.s")

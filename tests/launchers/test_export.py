"""A run's newest checkpoint as a folder of the hub: what is written, and that it is the same model."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from configs import quickstart
from launchers import finished, system
from launchers.configuration import save_config
from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.learner.checkpoint import Checkpointer
from venusrl.models.folder import open_folder

from . import programs

STEP = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory, checkpoint):
    """(folder of a run whose checkpoint differs from its start, those parameters)."""
    workdir = tmp_path_factory.mktemp("run")
    config = quickstart.get_config("smoke")
    config.model.checkpoint = str(checkpoint)
    model = system.describe_model(config)
    learner = system.make_learner(config, model.config)
    params = jax.tree.map(lambda x: x + 0.5, model.read())
    learner.start_from(params)
    save_config(config, workdir)
    checkpoints = Checkpointer(workdir / "checkpoints")
    checkpoints.save(STEP, learner.state, {})
    checkpoints.close()
    return workdir, params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_loads_back_as_the_model_that_was_trained(tmp_path, run, dtype, checkpoint):
    workdir, params = run
    assert finished.export(str(workdir), str(tmp_path / "out"), dtype) == STEP
    config = quickstart.get_config("smoke")
    config.model.name, config.model.checkpoint = "", str(tmp_path / "out")
    again = system.load_model(config)
    rounded = jax.tree.map(lambda x: np.asarray(jax.numpy.asarray(x, dtype).astype("float32")), params)
    jax.tree.map(np.testing.assert_array_equal, again.params, rounded)
    config.model.name, config.model.checkpoint = "tiny", str(checkpoint)
    before = system.describe_model(config)
    assert again.config == before.config
    text = "def f(x):\n    return x  # <|im_end|> é 123\n"
    assert again.tokenizer.encode(text) == before.tokenizer.encode(text)


def test_an_export_says_what_transformers_needs(tmp_path, run):
    workdir, _ = run
    out = tmp_path / "out"
    finished.export(str(workdir), str(out), "bfloat16")
    config, generation, tokenizer = (
        json.loads((out / f"{name}.json").read_text()) for name in ("config", "generation_config", "tokenizer_config")
    )
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["rope_theta"] == 1e4
    stop = system.load_model(json_config(out)).chat.stop_tokens
    assert set(config["eos_token_id"]) == set(generation["eos_token_id"]) == set(stop)
    assert tokenizer["eos_token"] == "<|im_end|>" and "<|im_start|>" in tokenizer["chat_template"]
    assert not [path for path in tmp_path.iterdir() if path.name != "out"]  # nothing is left beside it
    assert {oct(path.stat().st_mode & 0o777) for path in out.iterdir()} == {"0o644"}


def json_config(folder):
    config = quickstart.get_config("smoke")
    config.model.name, config.model.checkpoint = "", str(folder)
    return config


def test_weights_are_cut_into_files_with_an_index(tmp_path, run):
    workdir, params = run
    out = tmp_path / "out"
    finished.export(str(workdir), str(out), "float32", shard_bytes=10**6)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert max(file.stat().st_size for file in files) < 10**6 + 10_000
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == 4 * sum(x.size for x in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, open_folder(out).params(), params)


def test_nothing_is_written_over(tmp_path, run):
    workdir, _ = run
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(CheckpointError, match="is there and not empty"):
        finished.export(str(workdir), str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "file").write_text("kept")
    with pytest.raises(CheckpointError, match="is there and not empty"):
        finished.export(str(workdir), str(tmp_path / "file"))
    finished.export(str(workdir), str(tmp_path / "file.d"))  # and one that does not exist is made


def test_an_export_that_dies_leaves_no_folder_and_the_next_one_takes_its_place(tmp_path, run, monkeypatch):
    workdir, _ = run
    out = tmp_path / "deep" / "out"

    class Killed(BaseException):
        """As SIGKILL: no handler of errors sees it."""

    def die(*args, **kwargs):
        raise Killed

    monkeypatch.setattr("venusrl.models.hf.hf_config.describe", die)  # after the weights
    with pytest.raises(Killed):
        finished.export(str(workdir), str(out))
    assert not out.exists()
    with pytest.raises((CheckpointError, ConfigError)):
        open_folder(out.with_name(".out.partial"))
    monkeypatch.undo()
    finished.export(str(workdir), str(out))
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    open_folder(out).params()


def test_what_is_missing_is_named(tmp_path, run):
    workdir, _ = run
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        finished.export(str(tmp_path / "nowhere"), str(tmp_path / "out"))
    shutil.copy(workdir / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoints in"):
        finished.export(str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        finished.export(str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        finished.export(str(workdir), str(tmp_path / "file" / "out"))
    with pytest.raises(ConfigError, match="--out=''"):
        finished.export(str(workdir), "")


def test_the_program_exports_in_one_line_and_fails_in_one(tmp_path, run, forked):
    workdir, _ = run
    program = [sys.executable, "-m", "launchers.export", f"--workdir={workdir}", f"--out={tmp_path / 'out'}"]
    done = subprocess.run(program, cwd=programs.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"step {STEP} of {workdir} is in {tmp_path / 'out'}\n"
    [(code, output)] = forked.run_all([("launchers.export", program[3:])], processes=1)
    assert code == 1 and "is there and not empty" in output and output.count("\n") == 1, output

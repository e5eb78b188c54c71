"""The newest checkpoint of a run as a folder that transformers loads, and what reads such folders.

    python -m launchers.export --workdir=runs/quickstart --out=exported
    python -m launchers.export --workdir=runs/quickstart --out=exported --dtype=bfloat16 --shard_gb=2

Writes config.json, generation_config.json, the tokenizer's files (those of the model that was trained, as they are;
what it lacks is made) and safetensors. The folder appears whole or not at all. It loads here again with
--config.model.name= --config.model.checkpoint=exported.
"""

from pathlib import Path

from absl import flags

from launchers import program, system
from launchers.configuration import load_config
from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.learner.checkpoint import Checkpointer
from venusrl.models.folder import check_free, write_folder

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder to write; it must not exist, or be empty.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_SHARD_GB = flags.DEFINE_float("shard_gb", 5.0, "Largest file of weights, in GB (10^9 bytes).", lower_bound=1e-6)


def export(workdir: str, out: str, dtype: str = "bfloat16", shard_bytes: int = 5 * 10**9) -> int:
    """Writes the newest checkpoint of the run in `workdir` to `out`.

    Returns:
      the step that was written.

    Raises:
      ConfigError: `workdir` is no run, or an argument is empty.
      CheckpointError: it has no checkpoint that can be read, or `out` is not empty or cannot be written.
    """
    if not workdir or not out:
        raise ConfigError(f"--workdir={workdir!r} --out={out!r}; both must be folders")
    check_free(out)  # before minutes of reading
    config = load_config(workdir)
    folder = Path(workdir) / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoints in {workdir}; train first, or fix --workdir")
    model = system.describe_model(config)
    checkpoints = Checkpointer(folder, config.checkpoint.keep)
    try:
        restored = checkpoints.restore(system.make_learner(config, model.config).abstract_state())
    finally:
        checkpoints.close()
    if restored is None:
        raise CheckpointError(f"no checkpoint in {folder}; train first, or fix --workdir")
    step, state, _ = restored
    stop_tokens = system.stop_tokens(model)
    write_folder(out, state.params, model.config, model.tokenizer, model.files, stop_tokens, dtype, shard_bytes)
    return step


def main(argv) -> None:
    del argv
    step = export(_WORKDIR.value, _OUT.value, _DTYPE.value, int(_SHARD_GB.value * 1e9))
    print(f"step {step} of {_WORKDIR.value} is in {_OUT.value}")


if __name__ == "__main__":
    program.run(main)

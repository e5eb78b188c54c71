"""What a run has left in its folder, for programs that use it: the newest checkpoint, as it is or as a model."""

from pathlib import Path

from ml_collections import config_dict

from launchers import system
from launchers.configuration import load_config
from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.learner.checkpoint import Checkpointer
from venusrl.learner.state import TrainState
from venusrl.models.config import ModelConfig
from venusrl.models.folder import check_free, write_folder


def newest(config: config_dict.ConfigDict, shape: ModelConfig, workdir: str) -> tuple[int, TrainState]:
    """(step, state) of the newest checkpoint that can be read.

    Raises:
      CheckpointError: there is none.
    """
    folder = Path(workdir) / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoints in {workdir}; train first, or fix --workdir")
    checkpoints = Checkpointer(folder, config.checkpoint.keep)
    try:
        restored = checkpoints.restore(system.make_learner(config, shape).abstract_state())
    finally:
        checkpoints.close()
    if restored is None:
        raise CheckpointError(f"no checkpoint in {folder}; train first, or fix --workdir")
    return restored[:2]


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
    model = system.describe_model(config)
    step, state = newest(config, model.config, workdir)
    stop_tokens = system.stop_tokens(model)
    write_folder(out, state.params, model.config, model.tokenizer, model.files, stop_tokens, dtype, shard_bytes)
    return step

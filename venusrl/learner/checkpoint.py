"""Checkpoints: the TrainState and what the coordinator holds, together, atomically, in the background."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from venusrl.core.errors import CheckpointError
from venusrl.learner.state import TrainState


class Checkpointer:
    """Steps under one folder; a step appears only when it is whole.

    Attributes:
      latest: the step that was restored or saved last; None before either, or where saving it failed.

    Saving runs in the background. What goes wrong there is raised by the next `save`, by `wait` or by `close`, as
    CheckpointError; earlier checkpoints stay.
    """

    def __init__(self, folder: str | Path, keep: int = 2):
        self._folder = Path(folder).resolve()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)
        self.latest: int | None = None

    @property
    def steps(self) -> list[int]:
        """Steps that can be restored, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, extra: Mapping[str, Any]) -> None:
        """Starts to write `state` and the JSON-able `extra` as `step`. The state may be donated afterwards.

        Raises:
          CheckpointError: this save could not start, or the one before it failed.
        """
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(dict(extra)))
        try:
            self._set_aside([newer for newer in self.steps if newer >= step])
            if not self._manager.save(step, args=args):
                raise RuntimeError(f"step {step} was refused")
            self.latest = step
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Returns once the last save is on disk.

        Raises:
          CheckpointError: it failed.
        """
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Waits for the last save; see `wait`."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def restore(self, shape: TrainState) -> tuple[int, TrainState, dict[str, Any]] | None:
        """The newest checkpoint that can be read; a damaged one is passed over with a warning.

        Args:
          shape: a TrainState of jax.ShapeDtypeStruct with the shardings to restore to; the mesh may differ from
            the one that saved.

        Returns:
          (step, state, extra), or None where the folder has no checkpoint.

        Raises:
          CheckpointError: there are checkpoints and none of them can be read.
        """
        failures = []
        for step in reversed(self.steps):
            args = ocp.args.Composite(state=ocp.args.StandardRestore(shape), extra=ocp.args.JsonRestore())
            try:
                restored = self._manager.restore(step, args=args)
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                failures.append(f"step {step}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
                logging.warning("checkpoint %s/%d cannot be read (%s); trying an older one", self._folder, step, error)
                continue
            self.latest = step
            return step, restored["state"], restored["extra"]
        if failures:
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be read ({'; '.join(failures)}). The model's shape may have "
                "changed: start with another --workdir, or restore the configuration that made it"
            )
        return None

    def _set_aside(self, steps: list[int]) -> None:
        """Renames checkpoints that training did not go on from: they could not be read, and would block new ones."""
        for step in steps:
            aside = self._folder.with_name(f"{self._folder.name}-damaged-{step}")
            while aside.exists():  # the same step was damaged before
                aside = aside.with_name(aside.name + "+")
            (self._folder / str(step)).rename(aside)
            logging.warning("checkpoint %s/%d is kept as %s", self._folder, step, aside)
        if steps:
            self._manager.reload()

    def _failed(self, error: Exception) -> CheckpointError:
        self.latest = None
        return CheckpointError(f"saving to {self._folder} failed ({error}); earlier checkpoints are kept: {self.steps}")

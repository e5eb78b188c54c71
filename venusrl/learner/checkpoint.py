"""Checkpoints: the TrainState and what the coordinator holds, together, atomically, in the background."""

import contextlib
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.learner.state import TrainState

_FAILURES = (OSError, ValueError, RuntimeError)  # of orbax and TensorStore, where a file cannot be written
_BESIDE_BYTES = 1 << 20  # of a checkpoint, beside the arrays: descriptions, and blocks that are not full
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of what orbax is writing
_REMOVED = "removed-"  # before the step, in the name of what is being removed: no checkpoint any more


class Checkpointer:
    """Steps under one folder; a step appears only when it is whole.

    Attributes:
      latest: the step that was restored or saved last; None before either, or where saving it failed.
      failures: saves that failed so far.

    Saving runs in the background. What goes wrong there is said and counted by the next `save`, and raised by `wait`
    and by `close`, as CheckpointError; earlier checkpoints stay. Those beyond the newest `keep` are removed there too,
    once a newer one is known to be whole; where one cannot be, that is warned of, and makes no save a failed one.
    """

    def __init__(self, folder: str | Path, keep: int = 2):
        """Args:
          keep: the newest ones that stay; 0 keeps every one.

        Raises:
          ConfigError: `keep` is negative.
          OSError: the folder cannot be made, or a checkpoint whose description is damaged cannot be renamed.
        """
        if keep < 0:
            raise ConfigError(f"checkpoint.keep={keep} is negative; give how many of the newest stay, 0 for all")
        self._folder = Path(folder).resolve()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._saving = False  # since this object has begun to save, it removes what is old
        self._warned: set[Path] = set()  # of them, because they cannot be removed
        self._manager = self._open()
        self.latest: int | None = None
        self.failures = 0

    @property
    def steps(self) -> list[int]:
        """Steps that can be restored, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, extra: Mapping[str, Any]) -> None:
        """Starts to write `state` and the JSON-able `extra` as `step`. The state may be donated afterwards.

        A save before it that failed is said, and keeps this one from nothing. A folder that was removed is made again.

        Raises:
          CheckpointError: this save could not start.
        """
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(dict(extra)))
        try:
            self.wait()
        except CheckpointError as error:
            logging.warning("%s", error)
        try:
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True)
                self._manager.reload()
            self._clean()
            self._check_room(state)
            self._set_aside([newer for newer in self.steps if newer >= step])
            if not self._manager.save(step, args=args):
                raise RuntimeError(f"step {step} was refused")
            self.latest, self._saving = step, True
        except _FAILURES as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Returns once the last save is on disk.

        Raises:
          CheckpointError: it failed.
        """
        try:
            self._manager.wait_until_finished()
        except _FAILURES as error:
            raise self._failed(error) from error
        if self._saving and self._keep:
            self._remove_old()

    def close(self) -> None:
        """Waits for the last save; see `wait`."""
        failure = None
        try:
            self.wait()
        except CheckpointError as error:
            failure = error
        try:
            self._manager.close()
        except _FAILURES as error:  # it would wait for the same save
            failure = failure or self._failed(error)
            with contextlib.suppress(*_FAILURES):
                self._manager.close()
        self._clean()
        if failure is not None:
            raise failure

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
            # Orbax takes what its JSON files say as it is: a damaged one raises anything (AttributeError, IndexError).
            except Exception as error:  # noqa: BLE001 - whatever it is, an older checkpoint may be whole
                said = _one_line(error)
                failures.append(f"step {step}: {said}")
                logging.warning("checkpoint %s/%d cannot be read (%s); trying an older one", self._folder, step, said)
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
            self._rename(step)
        if steps:
            self._manager.reload()

    def _set_unreadable_aside(self) -> None:
        """Renames checkpoints whose own description is damaged: orbax reads all of them before it opens the folder."""
        for found in ocp.path.step.standard_name_format().find_all(self._folder):
            try:
                found.commit_timestamp  # noqa: B018 - what the manager reads of each
            except Exception as error:  # noqa: BLE001 - whatever damaged JSON raises in orbax
                logging.warning(
                    "checkpoint %s/%d cannot be read (%s); trying an older one",
                    self._folder,
                    found.step,
                    _one_line(error),
                )
                self._rename(found.step)

    def _rename(self, step: int) -> None:
        aside = _free_name(self._folder.with_name(f"{self._folder.name}-damaged-{step}"))
        (self._folder / str(step)).rename(aside)
        logging.warning("checkpoint %s/%d is kept as %s", self._folder, step, aside)

    def _remove_old(self) -> None:
        """Leaves the newest `keep`, and what cannot be removed. orbax would stop at the first of those, and fail."""
        old = self.steps[: -self._keep]
        for step in old:
            path = self._folder / str(step)
            going = _free_name(self._folder / f"{_REMOVED}{step}")
            try:  # first its name, so that nobody takes what is half removed for a checkpoint
                path.rename(going)
            except OSError as error:
                self._warn(path, error)
        for going in self._folder.glob(f"{_REMOVED}*"):  # those of before as well: what is open over NFS goes later
            try:
                shutil.rmtree(going)
            except OSError as error:
                shutil.rmtree(going, ignore_errors=True)  # the others of its files
                self._warn(going, error)
        if old:
            with contextlib.suppress(OSError):  # the folder itself is gone: the next save makes it again
                self._manager.reload()

    def _warn(self, path: Path, error: OSError) -> None:
        if path not in self._warned:
            self._warned.add(path)
            logging.warning("the old checkpoint %s cannot be removed (%s); the run goes on", path, _one_line(error))

    def _clean(self) -> None:
        """Removes what failed saves have left, or still leave: other threads of theirs end later."""
        if self.failures:
            for part in self._folder.glob(f"*{_UNFINISHED}*"):
                shutil.rmtree(part, ignore_errors=True)

    def _open(self) -> ocp.CheckpointManager:
        self._set_unreadable_aside()
        options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=True)
        return ocp.CheckpointManager(self._folder, options=options)

    def _check_room(self, state: TrainState) -> None:
        """Refuses to begin what the disk has no room for; what stands there already says how far it can be compressed.

        Raises:
          OSError: how much is missing.
        """
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        if self.steps:
            newest = self._folder / str(self.steps[-1])
            needed = min(needed, 2 * sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()))
        needed += _BESIDE_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(f"no room: a checkpoint takes up to {needed >> 20} MB, and the disk has {free >> 20} MB left")

    def _failed(self, error: Exception) -> CheckpointError:
        self.latest = None
        self.failures += 1
        self._clean()
        with contextlib.suppress(*_FAILURES):  # a manager raises what failed again and again
            self._manager.close()
        with contextlib.suppress(*_FAILURES):  # the folder itself is gone: the next save tries again
            self._manager = self._open()
        return CheckpointError(
            f"saving to {self._folder} failed ({_one_line(error)}); earlier checkpoints are kept: {self.steps}"
        )


def _free_name(path: Path) -> Path:
    """`path`, with a + for each that is there already: the same step, before."""
    while path.exists():
        path = path.with_name(path.name + "+")
    return path


def _one_line(error: Exception) -> str:
    said = " ".join(str(error).split())
    return said[:300] or type(error).__name__

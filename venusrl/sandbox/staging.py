"""Folders that are being made: theirs alone who make them, gone with them, or whole under another name."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from venusrl.core.errors import SandboxError

_PREFIX = ".staged-"


class Staging:
    """New folders in one folder, which processes may share.

    A new one is locked; what a process that has died leaves is removed by the next that stages.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._locks: dict[Path, int] = {}

    def stage(self) -> Path:
        """An empty folder. One may have been swept away before it was locked; then it is another.

        Raises:
          SandboxError: others could put something else in its place.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = self.folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & stat.S_IWOTH:
            raise SandboxError(f"{self.folder} is not a directory of this user's alone: give another, or chmod o-w it")
        self._sweep()
        while True:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.folder))
            try:
                lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink > 0 and folder.exists():
                self._locks[folder] = lock
                return folder
            os.close(lock)

    @contextlib.asynccontextmanager
    async def folder_of(self, make: Callable[[], Path] | None = None) -> AsyncIterator[Path]:
        """A folder that is staged, or that `make` stages, in a thread; discarded afterwards unless it was published.

        A caller who gives up meanwhile leaves nothing either.
        """
        making = asyncio.ensure_future(asyncio.to_thread(make or self.stage))
        try:
            folder = await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(self._discard_made)
            raise
        try:
            yield folder
        finally:
            await asyncio.to_thread(self.discard, folder)

    def _discard_made(self, making: asyncio.Future[Path]) -> None:
        if not making.cancelled() and making.exception() is None:
            self.discard(making.result())

    def publish(self, staged: Path, name: str) -> Path:
        """It has its name from now on. OSError where another has it; then it is still staged."""
        target = self.folder / name
        os.rename(staged, target)
        os.close(self._locks.pop(staged))
        return target

    def discard(self, staged: Path) -> None:
        """Removes what was staged, unless it was published. Idempotent."""
        lock = self._locks.pop(staged, None)
        if lock is not None:
            shutil.rmtree(staged, ignore_errors=True)
            os.close(lock)

    def _sweep(self) -> None:
        for folder in self.folder.glob(f"{_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                except BlockingIOError:
                    continue
                finally:
                    os.close(lock)

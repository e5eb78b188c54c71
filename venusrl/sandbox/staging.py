"""Folders that are being made: theirs alone who make them, gone with them, or whole under another name."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class Staging:
    """New folders in one folder, which processes may share.

    A new one is called .NAME, and locked; what a process that has died leaves is removed by the next that stages.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._locks: dict[Path, int] = {}

    def stage(self) -> Path:
        """An empty folder. One may have been swept away before it was locked; then it is another."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep()
        while True:
            folder = Path(tempfile.mkdtemp(prefix=".", dir=self.folder))
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink > 0 and folder.exists():
                self._locks[folder] = lock
                return folder
            os.close(lock)

    def publish(self, staged: Path, name: str) -> Path:
        """It has its name from now on. OSError where another has it; then it is still staged."""
        target = self.folder / name
        os.rename(staged, target)
        os.close(self._locks.pop(staged))
        return target

    def discard(self, staged: Path) -> None:
        """Removes what was staged. Idempotent."""
        shutil.rmtree(staged, ignore_errors=True)
        lock = self._locks.pop(staged, None)
        if lock is not None:
            os.close(lock)

    def _sweep(self) -> None:
        for folder in self.folder.glob(".*"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                except BlockingIOError:
                    continue
                finally:
                    os.close(lock)

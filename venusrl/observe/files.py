"""Files of a run on a disk that may be full or gone: whole records or none of them, whole files or the old ones."""

import collections
import contextlib
import logging
import os
from pathlib import Path

_WAITING_BYTES = 16 << 20


def replace_file(path: str | os.PathLike, data: bytes) -> None:
    """Writes `data` as `path`; whoever reads it, also after a crash, finds the old content or the new one.

    Raises:
      OSError: naming the file, which is as it was.
    """
    path = Path(path)
    fresh = path.with_name(f"{path.name}.tmp")
    try:
        with open(fresh, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise named(error, path) from error


def named(error: OSError, path: str | os.PathLike) -> OSError:
    """The same error with the file in it; the system names it for `open`, not for `write`."""
    return type(error)(error.errno, error.strerror or str(error), os.fspath(path))


class AppendFile:
    """An append-only file of whole records, each in the file as soon as `append` returns.

    A record that cannot be written leaves no part of itself behind; it waits, and is written before the next one. A
    file that somebody has removed is made again with what comes from then on.

    Attributes:
      failures: attempts to write that failed.
      lost: records that are not in the file and wait no longer.
    """

    def __init__(self, path: str | os.PathLike, header: bytes = b"", waiting_bytes: int = _WAITING_BYTES):
        """Args:
          header: what the file begins with where it is new.
          waiting_bytes: of records that may wait; above it the oldest are lost. 0: none waits.

        Raises:
          OSError: naming the file, which cannot be opened or begun.
        """
        self.path = Path(path)
        self.failures = 0
        self.lost = 0
        self._header = header
        self._most = waiting_bytes
        self._waiting: collections.deque[bytes] = collections.deque()
        self._fd = -1
        self._failing = False
        self._open()

    @property
    def waiting(self) -> int:
        """Records that could not be written yet."""
        return len(self._waiting)

    def append(self, record: bytes) -> bool:
        """Writes what waits and `record`; whether all of it is in the file."""
        self._waiting.append(record)
        return self.flush()

    def flush(self) -> bool:
        """Writes what waits; whether all of it is in the file."""
        try:
            if os.fstat(self._fd).st_nlink == 0:  # removed
                self._reopen()
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            self._failed(error)
            return False
        if self._failing:
            logging.warning("%s can be written again", self.path)
        self._failing = False
        return True

    def close(self) -> None:
        """Tries once more to write what waits; says what is lost."""
        if self._fd < 0:
            return
        self.flush()
        self.lost += len(self._waiting)
        self._waiting.clear()
        os.close(self._fd)
        self._fd = -1
        if self.lost and self._most:
            logging.warning("%d records are missing in %s: they could not be written", self.lost, self.path)

    def _failed(self, error: OSError) -> None:
        self.failures += 1
        if not self._failing:  # once, not for every record
            logging.warning("%s cannot be written (%s); the run goes on", self.path, error.strerror or error)
        self._failing = True
        while sum(map(len, self._waiting)) > self._most:
            self._waiting.popleft()
            self.lost += 1

    def _open(self) -> None:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise named(error, self.path) from error
        self._fd, self._size = fd, os.fstat(fd).st_size
        if self._size == 0 and self._header:
            try:
                self._write(self._header)
            except OSError as error:
                os.close(fd)
                self._fd = -1
                raise named(error, self.path) from error

    def _reopen(self) -> None:
        logging.warning("%s was removed; it is made again, with what comes from now on", self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        gone = self._fd
        try:
            self._open()
        finally:
            if self._fd != gone:
                os.close(gone)

    def _write(self, record: bytes) -> None:
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, self._size)  # a part that could not be taken back before
        left = memoryview(record)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with contextlib.suppress(OSError):  # the next attempt takes it back
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(record)

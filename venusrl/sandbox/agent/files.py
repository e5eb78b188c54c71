"""File requests, served by the agent: as the sandbox's user, inside the sandbox's own mounts.

Links therefore lead only to what the sandbox itself could open. Only regular files are read or written: a FIFO or a
device made by a command must not hold up the agent.
"""

import errno
import os
import stat

from venusrl.sandbox.agent.wire import patiently

WORKSPACE = "/workspace"
CHUNK_BYTES = 4 << 20
_MAX_ENTRIES = 100_000


def serve(op: str, header: dict, body: bytes) -> tuple[dict, bytes]:
    """(answer, body) of one request: read, write, stat or list. OSError with the reason."""
    path = os.path.join(WORKSPACE, header["path"])  # an absolute path stays as it is
    if "\0" in path:
        raise OSError(errno.EINVAL, "NUL in path")
    if op == "read":
        return _read(path, header["offset"], header["max_bytes"])
    if op == "write":
        return _write(path, header["offset"], header["mode"], body)
    if op == "list":
        return _list(path)
    if op == "stat":
        return {"entry": _entry(os.path.basename(path.rstrip("/")) or "/", os.lstat(path))}, b""
    raise OSError(errno.ENOSYS, op)


def _regular(fd: int) -> os.stat_result:
    info = os.fstat(fd)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory")
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return info


def _read(path: str, offset: int, max_bytes: int) -> tuple[dict, bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if _regular(fd).st_size > max_bytes:
            raise OSError(errno.EFBIG, "larger than max_bytes")
        data, part = bytearray(), None
        # What is read at once may be less than there is: of /proc, or where a page for it lacks.
        while part != b"" and len(data) < CHUNK_BYTES:
            part = patiently(os.pread, fd, CHUNK_BYTES - len(data), offset + len(data), want=(errno.EFAULT,))
            data += part
        return {}, bytes(data)
    finally:
        os.close(fd)


def _write(path: str, offset: int, mode: int | None, data: bytes) -> tuple[dict, bytes]:
    """Mode None: as it is, or what is usual for a new one."""
    parent = os.path.dirname(path)
    if offset == 0:
        try:
            os.makedirs(parent, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    fd = os.open(path, flags, 0o644 if mode is None else 0o600)  # the agent's umask takes nothing of that
    try:
        _regular(fd)
        if offset == 0:
            os.ftruncate(fd, 0)
            if mode is not None:
                os.fchmod(fd, mode)
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(fd)
    return {}, b""


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "dir"
    return "link" if stat.S_ISLNK(mode) else "other"


def _entry(name: str, info: os.stat_result) -> list:
    return [name, _kind(info.st_mode), info.st_size, stat.S_IMODE(info.st_mode), info.st_mtime]


def _list(path: str) -> tuple[dict, bytes]:
    entries = []
    with os.scandir(path) as found:
        for entry in found:
            if len(entries) == _MAX_ENTRIES:
                raise OSError(errno.EFBIG, "too many entries")
            try:
                entries.append(_entry(entry.name, entry.stat(follow_symlinks=False)))
            except FileNotFoundError:
                continue
    return {"entries": sorted(entries, key=lambda entry: os.fsencode(entry[0]))}, b""

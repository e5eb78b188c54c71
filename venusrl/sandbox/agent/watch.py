"""Changes of files, told by inotify(7). For the agent; a directory's own entries are watched, not those below them."""

import ctypes
import errno
import os
import struct

from venusrl.sandbox.agent.wire import patiently

_LIBC = ctypes.CDLL(None, use_errno=True)
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_EVENT = struct.Struct("iIII")
_OVERFLOW, _IGNORED = 0x4000, 0x8000
# What an event is called; a mask has one of these.
_KINDS = {0x002: "write", 0x004: "chmod", 0x040: "move_from", 0x080: "move_to", 0x100: "create", 0x200: "remove"}
_KINDS |= {0x400: "remove", 0x800: "move_from"}
_MASK = sum(_KINDS)


class Watcher:
    """Attributes: fd: readable when something has changed; paths: what is watched, by who asked."""

    def __init__(self):
        self.fd = _LIBC.inotify_init1(_NONBLOCK | _CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self.paths: dict[int, str] = {}
        self._watches: dict[int, list[int]] = {}  # those who asked, by the kernel's number of the inode

    def add(self, watch: int, path: str) -> None:
        """Events of `path` go to `watch` from now on. OSError with the reason."""
        number = _LIBC.inotify_add_watch(self.fd, os.fsencode(path), _MASK)
        if number < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        self._watches.setdefault(number, []).append(watch)
        self.paths[watch] = path

    def remove(self, watch: int) -> None:
        """Nothing happens where there is none."""
        self.paths.pop(watch, None)
        for number, watches in list(self._watches.items()):
            if watch in watches:
                watches.remove(watch)
                if not watches:
                    del self._watches[number]
                    _LIBC.inotify_rm_watch(self.fd, number)

    def close(self) -> None:
        """Nothing is told any more."""
        os.close(self.fd)

    def read(self) -> dict[int, list[list[str]]]:
        """[kind, name] by watch; kind "lost" where events came faster than they were read, or the path is gone."""
        try:
            data = patiently(os.read, self.fd, 65536)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            return {}
        found: dict[int, list[list[str]]] = {}
        at = 0
        while at < len(data):
            number, mask, _, length = _EVENT.unpack_from(data, at)
            name = os.fsdecode(data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0"))
            at += _EVENT.size + length
            lost = mask & (_OVERFLOW | _IGNORED)
            kind = "lost" if lost else next((kind for bit, kind in _KINDS.items() if mask & bit), None)
            everyone = [watch for watches in self._watches.values() for watch in watches]
            for watch in (everyone if mask & _OVERFLOW else self._watches.get(number, [])) if kind else ():
                found.setdefault(watch, []).append([kind, name])
            if mask & _IGNORED:
                self._watches.pop(number, None)
        return found

"""A process that has every page of a layer in memory, in a cgroup of its own, as long as a pool uses the layer.

The kernel charges a file's page to the cgroup that touches it first. As that is the holder's, a sandbox is charged what
is its own, and nothing of what it shares.
"""

import ctypes
import os
import select
import socket
import stat

from venusrl.sandbox.wire import pack

_PROT_READ, _MAP_SHARED, _MAP_LOCKED, _MAP_POPULATE = 1, 1, 0x2000, 0x8000
_FAILED = ctypes.c_void_p(-1).value


def walk(tree: str):
    """(path relative to the tree, lstat) of every entry, in order; links are not followed."""
    for parent, folders, files in os.walk(tree):
        folders.sort()
        for name in sorted([*files, *folders]):
            path = os.path.join(parent, name)
            try:
                info = os.lstat(path)
            except FileNotFoundError:
                continue  # it is being made, and has gone again
            yield os.path.relpath(path, tree), info


def hold(tree: str, control: socket.socket, life_fd: int) -> None:
    """Maps every file, says how many bytes that are, and returns when the owner or the spawner is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    held = 0
    for path, info in walk(tree):
        if stat.S_ISREG(info.st_mode) and info.st_size:
            fd = os.open(os.path.join(tree, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            # Locked where this process may lock so much; else only read, and the kernel may drop it.
            for flag in (_MAP_LOCKED, _MAP_POPULATE):
                size, offset = ctypes.c_size_t(info.st_size), ctypes.c_long(0)
                if libc.mmap(None, size, _PROT_READ, _MAP_SHARED | flag, fd, offset) != _FAILED:
                    held += info.st_size
                    break
            else:  # a process may map some 65,000 files: the rest are read at least
                while data := os.read(fd, 1 << 20):
                    held += len(data)
            os.close(fd)
    control.sendall(pack({"held": held}))
    waiting = select.poll()
    for fd in (control.fileno(), life_fd):
        waiting.register(fd, select.POLLIN)
    waiting.poll()

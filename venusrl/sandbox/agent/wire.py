"""The agent's side of the wire, which is patient: see native/wire.c and native/memory.c."""

import errno
import json
import mmap
import time
from collections.abc import Callable
from contextlib import suppress

from venusrl.sandbox.wire import LENGTHS, WireError, check_lengths, pack

_ROOM = 64 * 1024  # bytes: about what the kernel takes for a call
_WAIT_S = 0.001
_WANT = (errno.ENOBUFS, errno.ENOMEM, errno.ENFILE, errno.EFAULT)


def patiently(call: Callable, *arguments, want: tuple[int, ...] = _WANT):
    """What a call of the kernel's returns once there is memory for it. OSError where something else is wrong.

    Args:
      want: errors by which the kernel says that there is none.

    Where a sandbox stands still for want of memory (Template.oom="hold"), who touches a page waits for it, while calls
    fail.
    """
    while True:
        try:
            return call(*arguments)
        except MemoryError:
            pass
        except OSError as error:
            if error.errno not in want:
                raise
        with suppress(OSError), mmap.mmap(-1, _ROOM, mmap.MAP_PRIVATE) as room:
            for at in range(0, _ROOM, mmap.PAGESIZE):
                room[at] = 1
        time.sleep(_WAIT_S)


def send(sock, header: dict, body: bytes = b"") -> None:
    """One frame, over a blocking socket."""
    left = memoryview(pack(header, body))
    while left:
        left = left[patiently(sock.send, left) :]


def receive(sock) -> tuple[dict, bytes]:
    """Next frame from a blocking socket; WireError at end of stream."""
    head, body = check_lengths(_exactly(sock, LENGTHS.size))
    return json.loads(_exactly(sock, head)), _exactly(sock, body)


def _exactly(sock, count: int) -> bytes:
    buffer = patiently(bytearray, count)
    view, done = memoryview(buffer), 0
    while done < count:
        got = patiently(sock.recv_into, view[done:])
        if got == 0:
            raise WireError("peer closed")
        done += got
    return bytes(buffer)

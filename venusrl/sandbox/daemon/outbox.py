"""What a client of a daemon has not taken yet: bounded, whatever it asks for and however slowly it reads."""

import asyncio
import errno
from collections import deque

from venusrl.sandbox.wire import FrameTooLong, pack

MOST_BYTES = 64 << 20  # that wait for one client, of all kinds
WATCH_BYTES = 1 << 20  # of changes of files among them, as many as of a command's output
_FRAME_BYTES = 512  # that a frame counts for, besides what is in it


class Outbox:
    """Frames for one client, in order. For one event loop.

    Changes of files beyond WATCH_BYTES are not kept; the client is told that it has lost some. What is beyond
    MOST_BYTES ends the connection: `is_over`.
    """

    def __init__(self):
        self._frames: deque[tuple[bytes, int]] = deque()  # with the watched bytes of each
        self._more = asyncio.Event()
        self._bytes = self._watched = 0
        self._lost: set[int] = set()  # watches whose changes are not kept
        self._ended = False
        self.is_over = False

    def put(self, header: dict, body: bytes = b"") -> None:
        """Queues what an agent or the hub says."""
        if self._ended:
            return
        watch = header.get("watch") if "events" in header else None
        if watch is not None and watch in self._lost:
            return
        frame = _frame(header, body)
        if watch is not None and self._watched + len(frame) > WATCH_BYTES:
            self._lost.add(watch)
            frame = pack({"watch": watch, "events": [["lost", ""]]})
        size = len(frame) + _FRAME_BYTES
        self._frames.append((frame, size if watch is not None else 0))
        self._bytes += size
        self._watched += size if watch is not None else 0
        if self._bytes > MOST_BYTES:
            self.is_over = True
            self.end()
        self._more.set()

    def end(self) -> None:
        """After what is queued there is nothing more."""
        self._ended = True
        self._more.set()

    async def take(self) -> bytes | None:
        """The next frame; None after the last, and at once where there were too many."""
        while not self._frames or self.is_over:
            if self._ended:
                return None
            self._more.clear()
            await self._more.wait()
        frame, watched = self._frames.popleft()
        self._bytes -= len(frame) + _FRAME_BYTES
        self._watched -= watched
        if not self._watched:
            self._lost.clear()
        return frame


def _frame(header: dict, body: bytes) -> bytes:
    """Of what an agent said, whose frames write text more shortly than those to clients."""
    try:
        return pack(header, body)
    except FrameTooLong:
        if "watch" in header:
            return pack({**header, "events": [["lost", ""]]})
        return pack({"id": header["id"], "errno": errno.EFBIG})

"""Keeps the head and the tail of a stream of unknown length in bounded memory."""


class Capture:
    """Keeps `limit` bytes: all, if no more come, else the first half and the last half."""

    def __init__(self, limit: int):
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        """Appends what was read. Costs copies of at most twice the data."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + 65536:
            del self._tail[: -self._tail_limit]

    def result(self) -> bytes:
        """The bytes, with a line in the middle saying how many were elided, if any."""
        tail = self._tail[-self._tail_limit :]
        elided = self.total - len(self._head) - len(tail)
        if elided == 0:
            return bytes(self._head + tail)
        return bytes(self._head) + b"\n[... %d bytes elided ...]\n" % elided + bytes(tail)

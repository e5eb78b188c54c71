"""Keeps the head and the tail of a stream of unknown length in bounded memory."""


class Capture:
    """Keeps `limit` bytes: all, if no more come, else the first half and the last half, without half characters."""

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
        head, tail = bytes(self._head), bytes(self._tail[-self._tail_limit :])
        if self.total == len(head) + len(tail):
            return head + tail
        head, tail = head[: whole_end(head)], tail[whole_start(tail) :]
        return head + b"\n[... %d bytes elided ...]\n" % (self.total - len(head) - len(tail)) + tail


def beginning(data: bytes, most: int) -> bytes:
    """All of it, or its first bytes, at most so many, without half a character, and "..."."""
    return data if len(data) <= most else data[: whole_end(data[:most])] + b"..."


def whole_end(data: bytes) -> int:
    """Bytes of it without the beginning of a UTF-8 character at its end."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            promised = 2 if 0xC2 <= byte < 0xE0 else 3 if 0xE0 <= byte < 0xF0 else 4 if 0xF0 <= byte < 0xF5 else 1
            return len(data) - back if promised > back else len(data)
    return len(data)


def whole_start(data: bytes) -> int:
    """Bytes at its beginning that are the end of a UTF-8 character, at most 3."""
    return next((at for at in range(min(3, len(data))) if data[at] & 0xC0 != 0x80), min(3, len(data)))

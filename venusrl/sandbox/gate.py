"""Who gets the next free place: first come, first served."""

import asyncio
from collections import deque


class Gate:
    """`places` places handed out in order of arrival. For one event loop."""

    def __init__(self, places: int):
        self._free = places
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Callers in the queue."""
        return len(self._queue)

    async def enter(self, wait_s: float) -> None:
        """Takes a place; TimeoutError after `wait_s` seconds in the queue. A late comer never passes a waiting one."""
        if self._free > 0 and not self._queue:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            done, _ = await asyncio.wait({turn}, timeout=wait_s)
        except asyncio.CancelledError:
            self._withdraw(turn)
            raise
        if not done:
            self._withdraw(turn)
            raise TimeoutError(f"no free place within {wait_s} s")
        turn.result()

    def leave(self) -> None:
        """Gives a place back, to the first in the queue if there is one."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def refuse_all(self, error: Exception) -> None:
        """Fails every waiting caller."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _withdraw(self, turn: asyncio.Future) -> None:
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            self.leave()  # the place came in the same moment
        elif turn in self._queue:
            self._queue.remove(turn)

"""Time is passed in: live drivers hold a WallClock, the simulator and tests a VirtualClock."""

import asyncio
import heapq
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary origin, never going back."""

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class WallClock:
    """Monotonic time of this machine."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class VirtualClock:
    """Time that moves only when `advance` is called; sleepers wake in order of their deadlines."""

    def __init__(self, start: float = 0.0):
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Future]] = []
        self._ticket = 0

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"sleep: seconds={seconds} is negative; pass 0 or more")
        future = asyncio.get_running_loop().create_future()
        self._ticket += 1
        heapq.heappush(self._sleepers, (self._now + seconds, self._ticket, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Moves time on by `seconds`, waking each sleeper at its own deadline and letting it run."""
        target = self._now + seconds
        await asyncio.sleep(0)
        while self._sleepers and self._sleepers[0][0] <= target:
            self._now, _, future = heapq.heappop(self._sleepers)
            if not future.done():
                future.set_result(None)
            for _ in range(3):  # future -> its task -> what that task awaits next
                await asyncio.sleep(0)
        self._now = target

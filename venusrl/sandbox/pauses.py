"""When a sandbox stands still, and for how long it has."""

import asyncio
import time


class Pauses:
    """Attributes:
    asked: its users asked last for a pause, not to go on; also while it is saved, when it stands still anyway.
    seconds: of all pauses that are over.
    """

    def __init__(self, paused: bool):
        self.asked = False
        self.seconds = 0.0
        self._since: float | None = None
        self._over = asyncio.Event()
        self._over.set()
        self.note(paused)

    @property
    def now(self) -> bool:
        return self._since is not None

    def note(self, paused: bool) -> None:
        """As it was asked for here, or as the sandbox says that another did."""
        if paused and self._since is None:
            self._since = time.monotonic()
            self._over.clear()
        elif not paused and self._since is not None:
            self.seconds += time.monotonic() - self._since
            self._since = None
            self._over.set()

    async def over(self) -> None:
        """Returns when it does not stand still, or will never go on again."""
        await self._over.wait()

    def end(self) -> None:
        """It will never go on again."""
        self._over.set()

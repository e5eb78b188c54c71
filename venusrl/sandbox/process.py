"""The owner's side of one started command: its output as it comes, its input, its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from venusrl.core.errors import ConfigError
from venusrl.sandbox import bounds
from venusrl.sandbox.contract import ExecResult, Output
from venusrl.sandbox.wire import WireError

_MOST_KEPT = 8 << 20  # of a process, what its end brings among it
WINDOW_BYTES = 1 << 20  # of output on its way or not taken yet; what comes after waits in the command's pipe

# (header, body) -> the answer
Ask = Callable[[dict, bytes], Awaitable[tuple[dict, bytes]]]


class RemoteProcess:
    """See contract.Process.

    Args:
      number: of the command in its sandbox.
      ask: sends a request of the sandbox and waits for its answer.
      tell: sends one that is not answered.
      follow: its output comes, too.
    """

    def __init__(self, number: int, ask: Ask, tell: Callable[[dict], None], follow: bool):
        self.id = number
        self.pid = 0
        self._ask, self._tell = ask, tell
        self._follows = follow
        self._followed = False  # from when it has begun
        self._readers = self._waiters = 0
        self._output: deque[Output] = deque()
        self._taken = self._kept_bytes = 0
        self._more = asyncio.Event()
        self._end: asyncio.Future[ExecResult] = asyncio.get_running_loop().create_future()

    @property
    def result(self) -> ExecResult | None:
        """How it ended; None while it runs. Raises SandboxLost where its sandbox ended first."""
        return self._end.result() if self._end.done() else None

    async def __aiter__(self) -> AsyncIterator[Output]:
        self._readers += 1
        try:
            while self._output or not self._end.done():
                if not self._output:
                    self._more.clear()
                    await self._more.wait()
                    continue
                output = self._output.popleft()
                self._taken += len(output.data)
                self._kept_bytes -= len(output.data) if output.stream != "kept" else 0
                if self._taken >= WINDOW_BYTES // 4 and self._followed and not self._end.done():
                    self._tell({"op": "window", "job": self.id, "bytes": self._taken})
                    self._taken = 0
                yield output
            self._end.result()
        finally:
            self._readers -= 1
            self._settle()

    async def wait(self) -> ExecResult:
        self._waiters += 1
        try:
            self._settle()
            return await asyncio.shield(self._end)
        finally:
            self._waiters -= 1

    def _settle(self) -> None:
        """Output that nobody reads while somebody waits for the end must not hold the command up."""
        if self._followed and self._waiters and not self._readers and not self._end.done():
            self._followed = False
            self._tell({"op": "window", "job": self.id, "bytes": None})

    async def send(self, data: bytes) -> None:
        if data := bounds.data("send data", data):
            await self._ask({"op": "input", "job": self.id}, data)

    async def close_stdin(self) -> None:
        await self._ask({"op": "input", "job": self.id}, b"")

    async def signal(self, number: int) -> None:
        number = bounds.whole("signal number", "signal", number)
        await self._ask({"op": "signal", "job": self.id, "number": number}, b"")

    async def resize(self, rows: int, columns: int) -> None:
        rows, columns = check_size((rows, columns))
        await self._ask({"op": "resize", "job": self.id, "rows": rows, "columns": columns}, b"")

    async def kill(self) -> ExecResult:
        self._tell({"op": "cancel", "job": self.id})
        return await self.wait()

    # What the sandbox tells

    def began(self, pid: int, kept: bytes) -> None:
        """It runs, or has run: what is kept of its output comes first, then what is told from now on."""
        self.pid, self._followed = pid, self._follows
        if kept:
            self._output.append(Output("kept", kept))

    def came(self, stream: str, data: bytes) -> None:
        """Output has come. WireError where it is more than the window lets."""
        if self._followed:
            self._output.append(Output(stream, data))
            self._kept_bytes += len(data)
            if self._kept_bytes > _MOST_KEPT:
                raise WireError("more output than it was to send")
            self._more.set()

    def unfollow(self) -> None:
        """Another follows its output."""
        self._follows = self._followed = False

    def ended(self, result: ExecResult | BaseException) -> None:
        """It is over. The first end stands."""
        if not self._end.done():
            if isinstance(result, BaseException):
                self._end.set_exception(result)
                self._end.exception()  # seen: nobody may wait for it
            else:
                self._end.set_result(result)
        self._more.set()


def check_size(size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns; raises ConfigError unless a terminal can be of this size."""
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise ConfigError(f"terminal size {bounds.shown(size)}: give rows and columns")
    rows, columns = size
    return (bounds.whole("terminal size rows", "rows", rows), bounds.whole("terminal size columns", "columns", columns))

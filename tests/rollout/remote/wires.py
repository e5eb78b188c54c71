"""A worker without a model behind real HTTP, over a connection that a test can cut, freeze and refuse."""

import asyncio
import contextlib
import json

from tests.rollout.scripted import Script, ScriptedWorker
from venusrl.core.clock import WallClock
from venusrl.core.door import Door
from venusrl.core.listening import Server, listen
from venusrl.rollout.remote.client import RemoteWorker
from venusrl.rollout.remote.server import Codec, worker_app

SCRIPT = Script(lambda turn, seed: f"say {turn} {seed} and go on for a while")
PROMPT = SCRIPT.chat.prompt([{"role": "user", "content": ""}])
CODEC = Codec(json.loads, lambda prefix: json.dumps(prefix).encode(), bytes)


def write(params) -> bytes:
    return json.dumps(params).encode()


class Wire:
    """A TCP proxy. `mode`: "open", "frozen" (bytes wait), "refused" (nobody listens), or "once" (a connection is closed
    when a second request comes over it, as by a server whose patience ends at that moment)."""

    def __init__(self, port: int):
        self._to = port
        self.mode = "open"
        self.connections = 0
        self._thawed = asyncio.Event()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._tasks: set[asyncio.Task] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self._thawed.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.mode = "open"

    def freeze(self) -> None:
        self.mode = "frozen"
        self._thawed.clear()

    def thaw(self) -> None:
        self.mode = "open"
        self._thawed.set()

    async def refuse(self) -> None:
        self.mode = "refused"
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Every connection breaks, as when the other side is gone."""
        for pair in list(self._pairs):
            for writer in pair:
                writer.transport.abort()

    async def close(self) -> None:
        self._thawed.set()
        self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer) -> None:
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        pair = (writer, there_writer)
        self._pairs.add(pair)
        asked = [0]
        work = [self._pump(reader, there_writer, asked), self._pump(there_reader, writer, None)]
        tasks = [asyncio.ensure_future(w) for w in work]
        self._tasks.update(tasks)
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._tasks.difference_update(tasks)
            self._pairs.discard(pair)
            for w in pair:
                w.close()

    async def _pump(self, reader, writer, asked) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self._thawed.wait()
                if asked is not None and any(data.startswith(m) for m in (b"GET", b"POST", b"PUT", b"DELETE")):
                    asked[0] += 1
                    if self.mode == "once" and asked[0] > 1:
                        break
                writer.write(data)
                await writer.drain()
            writer.transport.abort() if self.mode == "once" else writer.close()


class Served:
    """A scripted worker, its server and the wire to it."""

    def __init__(self, name: str = "inner", clock=None, slots: int = 4):
        self.worker = ScriptedWorker(SCRIPT, name, slots=slots)
        self.given: list[tuple[list, int]] = []
        self._clock = clock or WallClock()
        update = self.worker.update_weights

        async def take(params, version):
            self.given.append((json.loads(params), version))
            await update(params, version)

        self.worker.update_weights = take

    async def start(self) -> None:
        self.wire = Wire(self._serve())
        await self.wire.open()

    def hold_after(self, chunks: int) -> None:
        """The gate closes once so many were made."""
        left = [chunks]

        def count(request):
            left[0] -= 1
            if left[0] == 0:
                self.worker.gate.clear()

        self.worker.fail = count

    def _serve(self) -> int:
        """As launchers.worker does; the port."""
        listener, _ = listen("127.0.0.1", 0)
        app = worker_app(self.worker, CODEC, self._clock, beat_s=0.1)
        self._server = Server(Door(app), listener, grace_s=1)
        self._task = asyncio.create_task(self._server.run())
        return listener.getsockname()[1]

    async def restart(self) -> None:
        """Another process on the same address."""
        await self._stop()
        self.given.clear()
        self.worker.running.clear()
        self.worker.version = 0
        self.wire._to = self._serve()

    async def _stop(self) -> None:
        self._server.stop()
        self.wire.cut()
        await self._task

    async def close(self) -> None:
        self.worker.gate.set()
        await self.wire.close()
        await self._stop()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.wire.port}"

    def client(self, run: str = "a run", **options) -> RemoteWorker:
        return RemoteWorker(self.address, write, run, **{"reconnect_s": 1.0, **options})


@contextlib.asynccontextmanager
async def serving(*args, **options):
    served = Served(*args, **options)
    await served.start()
    try:
        yield served
    finally:
        await served.close()


async def until(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)

"""A worker in another process, by its address."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from venusrl.core.errors import ContractError, VenusError, WorkerError
from venusrl.rollout.remote.server import error_of
from venusrl.rollout.worker import Chunk, Load, Request, again

CONNECT_S = 5.0
ANSWER_S = 600.0  # between two pieces of an answer; a request may wait long for its turn


class RemoteWorker:
    """See venusrl.rollout.worker.Worker. A connection that breaks means that the worker is lost."""

    def __init__(self, address: str, write_weights: Callable[[Any], bytes]):
        """Args:
        address: "http://HOST:PORT".
        write_weights: from parameters to the bytes of a safetensors file.
        """
        self.address = address
        self.name = address
        self.slots = self.max_length = self.kv_tokens = 0  # known after `start`
        self.failure: WorkerError | None = None
        self._write_weights = write_weights
        self._http: httpx.AsyncClient | None = None
        self._load = Load(0, 0, 0, 0, 0, 0.0)
        self._said: asyncio.Queue = asyncio.Queue()  # what `prioritise` has to tell, in order
        self._tasks: list[asyncio.Task] = []
        self._streaming: set[str] = set()

    async def start(self) -> None:
        """Raises:
        WorkerError: nobody answers there.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        self._http = httpx.AsyncClient(base_url=self.address, limits=limits, timeout=timeout)
        info = (await self._call("GET", "/info")).json()
        self.slots, self.max_length, self.kv_tokens = info["slots"], info["max_length"], info["kv_tokens"]
        self._tasks = [asyncio.create_task(self._tell()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Leaves the process as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        if request.trajectory in self._streaming:
            raise ContractError(f"trajectory {request.trajectory} already has a request on {self.name}")
        self._streaming.add(request.trajectory)
        ended = False
        try:
            async with contextlib.aclosing(self._stream(request)) as chunks:
                async for chunk in chunks:
                    ended = chunk.stop is not None
                    yield chunk
        except VenusError:
            ended = True
            raise
        finally:
            if not ended and self.failure is None and self._http is not None:
                with contextlib.suppress(VenusError):
                    await self._call("POST", "/cancel", json={"trajectory": request.trajectory})
            self._streaming.discard(request.trajectory)

    async def _stream(self, request: Request) -> AsyncIterator[Chunk]:
        await self._said.join()  # its priority is known there before it is
        with self._breaking():
            async with self._client.stream("POST", "/generate", json=dataclasses.asdict(request)) as answer:
                if answer.status_code != 200:
                    raise error_of(answer.status_code, (await answer.aread()).decode())
                stop = None
                async for line in answer.aiter_lines():
                    fields = json.loads(line)
                    if "error" in fields:
                        raise WorkerError(fields["error"])
                    chunk = Chunk(**fields)
                    stop = chunk.stop
                    yield chunk
                if stop is None:
                    raise self._lost("its answer ended before its time")

    async def preempt(self, trajectory: str) -> None:
        await self._call("POST", "/preempt", json={"trajectory": trajectory})

    def prioritise(self, trajectory: str, priority: int, resident: bool) -> None:
        if self._http is not None:
            self._said.put_nowait({"trajectory": trajectory, "priority": priority, "resident": resident})

    async def release(self, trajectory: str) -> None:
        await self._said.join()
        await self._call("POST", "/release", json={"trajectory": trajectory})

    async def export_kv(self, trajectory: str) -> bytes | None:
        answer = await self._call("GET", f"/kv/{trajectory}")
        return answer.content if answer.status_code == 200 else None

    async def import_kv(self, prefix: bytes | None) -> int:
        if prefix is None:
            return 0
        return (await self._call("PUT", "/kv", content=prefix)).json()["tokens"]

    async def update_weights(self, params: Any, version: int, restart: bool = False) -> None:
        data = await asyncio.to_thread(self._write_weights, params)
        await self._call("PUT", f"/weights/{version}" + ("?restart=1" if restart else ""), content=data)

    def load(self) -> Load:
        """As of a moment ago."""
        return self._load

    async def refresh(self) -> Load:
        """As of now."""
        self._load = Load(**(await self._call("GET", "/load")).json())
        return self._load

    @property
    def _client(self) -> httpx.AsyncClient:
        if self._http is None or self.failure is not None:
            raise again(self.failure) if self.failure else WorkerError(f"worker {self.name} is closed")
        return self._http

    async def _call(self, method: str, path: str, **options) -> httpx.Response:
        with self._breaking():
            answer = await self._client.request(method, path, **options)
        if answer.status_code >= 400:
            raise error_of(answer.status_code, answer.text)
        return answer

    @contextlib.contextmanager
    def _breaking(self):
        try:
            yield
        except httpx.HTTPError as error:
            if self._http is None:
                raise WorkerError(f"worker {self.name} is closed") from error
            raise self._lost(repr(error)) from error

    def _lost(self, why: str) -> WorkerError:
        self.failure = self.failure or WorkerError(f"worker {self.name} is lost: {why}")
        return again(self.failure)

    async def _tell(self) -> None:
        while True:
            fields = await self._said.get()
            try:
                await self._call("POST", "/prioritise", json=fields)
            except WorkerError:
                pass  # whoever generates there hears of it
            finally:
                self._said.task_done()

    async def _watch(self) -> None:
        while self.failure is None:
            try:
                await self.refresh()
            except WorkerError:
                return
            await asyncio.sleep(1.0)

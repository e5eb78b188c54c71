"""The engine as a worker: asyncio outside, one thread of JAX calls inside."""

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from venusrl.core.errors import ContractError, VenusError, WorkerError
from venusrl.rollout.engine.checks import check_standing, check_text
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.kv import Prefix
from venusrl.rollout.worker import Chunk, Load, Request, again


class JaxWorker:
    """See venusrl.rollout.worker.Worker.

    Only `_run` touches the engine, and only while no step is in flight; what callers ask for waits in `_asked` until
    then. The event loop stays free while the device works.

    Attributes:
      failure: what ended it, unless `close` did.
    """

    def __init__(self, name: str, engine: Engine):
        self.name = name
        self.slots = engine.options.slots
        self.max_length = engine.options.max_length
        self.kv_tokens = engine.options.pages * engine.options.page
        self._engine = engine
        self._streams: dict[str, tuple[Request, asyncio.Queue]] = {}
        self._asked: list[Callable[[], Awaitable | None]] = []
        self._updates: set[asyncio.Future] = set()
        self._draining: dict[asyncio.Future, int] = {}  # the number of the update that each waits for
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{name}")
        self._task: asyncio.Task | None = None
        self._closed = False
        self.failure: WorkerError | None = None

    @property
    def version(self) -> int:
        """Of the weights that it generates with."""
        return self._engine.version

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"worker-{self.name}")

    async def wait(self) -> None:
        """Returns once it has failed or was closed."""
        await asyncio.wait({self._task})

    async def close(self) -> None:
        self._closed = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task})
        self._thread.shutdown()
        if self.failure is not None:
            raise self.failure

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        check_text("trajectory", request.trajectory)  # the rest is looked at where it reaches the engine
        if request.trajectory in self._streams:
            raise ContractError(f"trajectory {request.trajectory} already has a request on {self.name}")
        request = copy.copy(request)  # what the engine answers is told apart by it, and a caller may ask the same again
        stream: asyncio.Queue = asyncio.Queue()
        self._ask(lambda: self._submit(request, stream))
        self._streams[request.trajectory] = (request, stream)
        finished = False
        try:
            while not finished:
                item = await stream.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.stop is not None
                if item.stop == "nan":
                    raise WorkerError(f"request of {request.trajectory} on {self.name}: its logits are not finite")
                yield item
        finally:
            del self._streams[request.trajectory]
            if not finished and not self._closed:  # leaving a closed worker is no error
                self._ask(lambda: self._cancel(request.trajectory))

    def _submit(self, request: Request, stream: asyncio.Queue) -> None:
        try:
            self._engine.submit(request)
        except ContractError as error:
            stream.put_nowait(error)
        except Exception as error:  # noqa: BLE001 - one request is not the worker: its reader is told, the others go on
            failure = WorkerError(f"request of {request.trajectory} on {self.name} could not be queued: {error!r}")
            failure.__cause__ = error
            stream.put_nowait(failure)

    async def preempt(self, trajectory: str) -> None:
        check_text("trajectory", trajectory)
        meant = self._streams.get(trajectory)

        def act():
            # Its reader may have left meanwhile, and another request come under the same id.
            if meant is not None and self._streams.get(trajectory) is meant and self._engine.cancel(trajectory):
                meant[1].put_nowait(Chunk([], [], self._engine.version, "preempted"))

        self._ask(act)

    def prioritise(self, trajectory: str, priority: int, resident: bool) -> None:
        check_standing(trajectory, priority, resident)
        if not self._closed:
            self._ask(lambda: self._engine.prioritise(trajectory, priority, resident))

    async def release(self, trajectory: str) -> None:
        check_text("trajectory", trajectory)
        self._ask(lambda: self._engine.release(trajectory))

    async def export_kv(self, trajectory: str) -> Prefix | None:
        check_text("trajectory", trajectory)
        return await self._call(lambda: self._engine.export(trajectory), reads=True)

    async def import_kv(self, prefix: Prefix | None) -> int:
        return await self._call(lambda: self._engine.bring(prefix)) if prefix is not None else 0

    async def reset(self) -> None:
        for request, stream in self._streams.values():
            stream.put_nowait(WorkerError(f"request of {request.trajectory}: the worker went to another run"))
        await self._call(self._engine.reset)
        self._tell_updated()

    async def _call(self, act: Callable[[], Any], reads: bool = False) -> Any:
        """What `act` gives or raises, between two steps.

        What it raises on purpose, a VenusError, leaves the engine as it was, and is its caller's alone. Anything else
        may have come in the midst of a change, and ends the worker: nobody is given tokens of KV that is half there.

        Args:
          reads: `act` changes nothing, so that its failure, of whatever kind, is its caller's alone.
        """
        done = asyncio.get_running_loop().create_future()

        def run():
            try:
                result = act()
            except Exception as error:  # looked at, and raised again where it is the worker's
                if not (reads or isinstance(error, VenusError)):
                    raise  # `done` hears of it with all who wait
                failure = error if isinstance(error, VenusError) else WorkerError(f"{self.name}: {error!r}")
                if not done.done():
                    done.set_exception(failure)
                return
            if not done.done():
                done.set_result(result)

        self._ask(run)
        self._updates.add(done)
        try:
            return await done
        finally:
            self._updates.discard(done)

    async def update_weights(self, params: Any, version: int) -> None:
        """Returns once these weights are in use, or newer ones that came meanwhile; see Engine.set_weights.

        Raises:
          ContractError: they are older than those that are here, or of another model; the worker goes on.
          WorkerError: the worker failed or was closed.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        async def act():
            try:
                await loop.run_in_executor(self._thread, self._engine.set_weights, params, version)
            except ContractError as error:
                if not done.done():
                    done.set_exception(error)
                return
            self._draining[done] = self._engine.updates_asked
            self._tell_updated()

        self._ask(act)
        self._updates.add(done)
        try:
            await done
        finally:
            self._updates.discard(done)

    def _tell_updated(self) -> None:
        for done in [d for d, number in self._draining.items() if number <= self._engine.updates_used]:
            del self._draining[done]
            if not done.done():
                done.set_result(None)

    def _cancel(self, trajectory: str) -> None:
        self._engine.cancel(trajectory)

    def load(self) -> Load:
        return self._engine.load()

    def _ask(self, act: Callable[[], Awaitable | None]) -> None:
        if self._closed or (self._task is not None and self._task.done()):
            raise again(self.failure) if self.failure else WorkerError(f"worker {self.name} is closed")
        self._asked.append(act)
        self._wake.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        failure = WorkerError(f"worker {self.name} was closed")
        try:
            while not self._closed:
                self._wake.clear()  # before: what is asked for while the rest is carried out wakes it again
                asked, self._asked = self._asked, []
                for act in asked:
                    waiting = act()
                    if waiting is not None:
                        await waiting
                if not self._engine.busy:
                    await self._wake.wait()
                    continue
                chunks = await loop.run_in_executor(self._thread, self._engine.step)
                self._tell_updated()
                for request, chunk in chunks:
                    reader, stream = self._streams.get(request.trajectory, (None, None))
                    if reader is request:  # it may have left meanwhile, and another come under the same id
                        stream.put_nowait(chunk)
        except Exception as error:  # noqa: BLE001 - told to everybody who waits, and to `close`
            failure = self.failure = WorkerError(f"worker {self.name} failed: {error!r}")
            failure.__cause__ = error
        finally:
            self._closed = True
            for _, stream in self._streams.values():
                stream.put_nowait(again(failure))
            self._asked.clear()
            for update in self._updates:
                if not update.done():
                    update.set_exception(again(failure))

"""HTTP around a worker.

- POST /lease: a run claims the worker, or says that it still wants it; answers with what the worker is and does. 409
  where it belongs to another run. DELETE /lease: the run needs it no more.
- POST /generate: a Request in JSON; answers with chunks, a line of JSON each. Hanging up cancels it.
- POST /cancel: ends an answer under way, and returns when its slot is free.
- POST /preempt
- POST /prioritise, /release: of many trajectories at once.
- GET /kv/ID: KV of a trajectory as one checksummed message; 204 where there is none.
- PUT /kv: takes such a message.
- PUT /weights/V: takes a safetensors file as version V.
- POST /reset: ends requests and forgets KV and version; weights of any version come next.
- GET /load, /info, /metrics: for everybody.

What changes or uses the worker's state names its session in the header `venus-session`. While a run holds the lease,
everybody else is refused with 409; without a lease, callers without a session are let in.
"""

import asyncio
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from venusrl.core.clock import Clock, WallClock
from venusrl.core.errors import ContractError, VenusError, WorkerError
from venusrl.core.http import Gone, body_of
from venusrl.observe.prometheus import exposition
from venusrl.rollout.remote.answers import answer, status_of
from venusrl.rollout.remote.lease import Held, Lease
from venusrl.rollout.remote.streams import Generate
from venusrl.rollout.remote.wire import (
    BEAT_S,
    SESSION_HEADER,
    Body,
    ClaimBody,
    PrioritiseBody,
    ReleaseBody,
    TrajectoryBody,
    parse,
)
from venusrl.rollout.worker import LOAD_DESCRIPTIONS, Worker, again

SMALL_BODY = 64 * 2**10  # bytes of a request that names one trajectory, or a run
ORDERS_BODY = 4 * 2**20  # bytes of one that has orders for many
LARGEST_BODY = 1 << 40  # bytes of KV or weights where `worker_app` is told no bound
NOBODY = ""  # the session of a caller without one
FIRST = "first"  # of the weights that the process began with; they are everybody's


@dataclasses.dataclass(frozen=True)
class Codec:
    """What the worker's kind of KV and weights is as bytes.

    Attributes:
      unpack_kv, pack_kv: from and to one message. `unpack_kv` refuses with ContractError what is none; what of a
        message the worker cannot take, its `import_kv` refuses.
      read_weights: from the bytes of a safetensors file to what `update_weights` takes.
      most_kv, most_weights: bytes that such a message has at most.
      model: what of the model no weights tell, by name: a run with another is refused.
    """

    unpack_kv: Callable[[bytes], Any]
    pack_kv: Callable[[Any], bytes]
    read_weights: Callable[[bytes], Any]
    most_kv: int = LARGEST_BODY
    most_weights: int = LARGEST_BODY
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def worker_app(worker: Worker, codec: Codec, clock: Clock | None = None, beat_s: float = BEAT_S) -> Starlette:
    """The application.

    Args:
      worker: started. `reset` before the weights of another session.
      clock: of the lease.
      beat_s: seconds between signs of life of a stream in which nothing happens.
    """
    return _Door(worker, codec, clock or WallClock(), beat_s).app()


class _Door:
    def __init__(self, worker: Worker, codec: Codec, clock: Clock, beat_s: float):
        self._worker, self._codec, self._clock = worker, codec, clock
        self._lease = Lease()
        self._instance = os.urandom(8).hex()
        self._weights_of: str | None = FIRST  # the session that gave them; None while they change hands
        self._updating = asyncio.Lock()
        self._generate = Generate(worker, self._check_weights, beat_s)

    def app(self) -> Starlette:
        routes = [
            Route("/lease", self._claim, methods=["POST"]),
            Route("/lease", self._leave, methods=["DELETE"]),
            Route("/generate", self._generate),
            Route("/cancel", self._cancel, methods=["POST"]),
            Route("/preempt", self._preempt, methods=["POST"]),
            Route("/prioritise", self._prioritise, methods=["POST"]),
            Route("/release", self._release, methods=["POST"]),
            Route("/kv/{trajectory:path}", self._export_kv),
            Route("/kv", self._import_kv, methods=["PUT"]),
            Route("/weights/{version}", self._update, methods=["PUT"]),
            Route("/reset", self._reset, methods=["POST"]),
            Route("/load", self._load),
            Route("/info", self._info),
            Route("/metrics", self._metrics),
        ]
        return Starlette(routes=routes, exception_handlers={VenusError: _failed, HTTPException: _no_such, Gone: _left})

    # Whose it is

    async def _claim(self, http: HttpRequest) -> Response:
        body = parse(ClaimBody, await body_of(http, SMALL_BODY))
        if self._worker.failure is not None:
            raise again(self._worker.failure)
        if self._lease.claim(self._clock.now(), body.run, body.process, body.session, body.start, body.first):
            await self._generate.cancel_all(Held(f"the worker was taken over by run {body.run}"))
        return JSONResponse({**self._description(), "weights_of": self._weights_of})

    async def _leave(self, http: HttpRequest) -> Response:
        self._lease.leave(_session(http))
        return JSONResponse({})

    def _check(self, http: HttpRequest) -> None:
        self._lease.check(self._clock.now(), _session(http))

    def _check_weights(self, http: HttpRequest) -> None:
        """Raises Held where the caller may not, or the weights are those of another session."""
        self._check(http)
        if self._weights_of not in (FIRST, _session(http)):
            raise Held("the worker has weights of another caller; give it yours first")

    # Requests

    async def _body(self, http: HttpRequest, kind: type[Body]) -> Any:
        self._check(http)
        data = await body_of(http, ORDERS_BODY if kind in (PrioritiseBody, ReleaseBody) else SMALL_BODY)
        body = await asyncio.to_thread(parse, kind, data) if len(data) > SMALL_BODY else parse(kind, data)
        self._check(http)  # the worker may have changed hands meanwhile
        return body

    async def _cancel(self, http: HttpRequest) -> Response:
        await self._generate.cancel((await self._body(http, TrajectoryBody)).trajectory)
        return JSONResponse({})

    async def _preempt(self, http: HttpRequest) -> Response:
        await self._worker.preempt((await self._body(http, TrajectoryBody)).trajectory)
        return JSONResponse({})

    async def _prioritise(self, http: HttpRequest) -> Response:
        for order in (await self._body(http, PrioritiseBody)).orders:
            self._worker.prioritise(order.trajectory, order.priority, order.resident)
        return JSONResponse({})

    async def _release(self, http: HttpRequest) -> Response:
        for trajectory in (await self._body(http, ReleaseBody)).trajectories:
            await self._worker.release(trajectory)
        return JSONResponse({})

    # KV and weights

    async def _export_kv(self, http: HttpRequest) -> Response:
        self._check_weights(http)
        prefix = await self._worker.export_kv(http.path_params["trajectory"])
        if prefix is None:
            return Response(status_code=204)
        data = await asyncio.to_thread(self._codec.pack_kv, prefix)
        return Response(data, media_type="application/octet-stream")

    async def _import_kv(self, http: HttpRequest) -> Response:
        self._check_weights(http)
        data = await body_of(http, self._codec.most_kv)
        prefix = await asyncio.to_thread(self._codec.unpack_kv, data)
        self._check_weights(http)  # the worker may have changed hands meanwhile
        return JSONResponse({"tokens": await self._worker.import_kv(prefix)})

    async def _update(self, http: HttpRequest) -> Response:
        self._check(http)
        said, session = http.path_params["version"], _session(http)
        if not (said.isascii() and said.isdigit() and len(said) <= 10 and int(said) < 2**31):
            raise ContractError(f"version {said[:20]!r} is no int32; give a whole number, 0 or more")
        version = int(said)
        params = await asyncio.to_thread(self._codec.read_weights, await body_of(http, self._codec.most_weights))
        async with self._updating:
            self._check(http)  # the worker may have changed hands meanwhile
            if self._weights_of == session and version == self._worker.version:
                return JSONResponse({"version": version})  # sent twice, for its connection broke
            first = self._weights_of == FIRST and version > self._worker.version
            if self._weights_of != session and not first:
                self._weights_of = None
                await self._generate.cancel_all(Held("the worker was given weights of another caller"))
                await self._worker.reset()  # versions of two runs cannot be compared, nor their KV mixed
            await self._worker.update_weights(params, version)
            self._weights_of = session
        return JSONResponse({"version": self._worker.version})

    async def _reset(self, http: HttpRequest) -> Response:
        async with self._updating:
            self._check(http)
            await self._generate.cancel_all(WorkerError("the worker was reset"))
            await self._worker.reset()
        return JSONResponse({"version": self._worker.version})

    # What it says of itself

    def _description(self) -> dict[str, Any]:
        worker, load = self._worker, dataclasses.asdict(self._worker.load())
        return {
            "name": worker.name,
            "model": dict(self._codec.model),
            "slots": worker.slots,
            "max_length": worker.max_length,
            "kv_tokens": worker.kv_tokens,
            "version": worker.version,
            "failure": None if worker.failure is None else str(worker.failure),
            "instance": self._instance,
            "run": self._lease.run,
            "lease_s": round(self._lease.left(self._clock.now()), 1),
            "load": load,
        }

    async def _info(self, http: HttpRequest) -> Response:
        return JSONResponse(self._description())

    async def _load(self, http: HttpRequest) -> Response:
        return JSONResponse(dataclasses.asdict(self._worker.load()))

    async def _metrics(self, http: HttpRequest) -> Response:
        worker = self._worker
        text = exposition(
            "venusrl_worker", dataclasses.asdict(worker.load()), {"worker": worker.name}, LOAD_DESCRIPTIONS
        )
        return PlainTextResponse(text)


def _session(http: HttpRequest) -> str:
    return http.headers.get(SESSION_HEADER, NOBODY)


async def _failed(http: HttpRequest, error: Exception) -> Response:
    return answer(status_of(error), error)


async def _no_such(http: HttpRequest, error: Exception) -> Response:
    """404, 405 and the like."""
    assert isinstance(error, HTTPException)
    return answer(error.status_code, error.detail)


async def _left(http: HttpRequest, error: Exception) -> Response:
    """Nobody is there to read it; 499 is what others log for such calls."""
    return Response(status_code=499)

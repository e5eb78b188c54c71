"""HTTP around a worker.

- POST /generate: a Request in JSON; answers with chunks, a line of JSON each. Hanging up cancels it.
- POST /cancel: ends an answer under way, and returns when its slot is free.
- POST /preempt, /prioritise, /release
- GET /kv/ID: KV of a trajectory as one checksummed message; 204 where there is none.
- PUT /kv: takes such a message.
- PUT /weights/V: takes a safetensors file as version V; ?restart=1 where another run begins, at a lower version maybe.
- GET /load, /info, /metrics
"""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from venusrl.core.errors import ContractError, VenusError, WorkerError
from venusrl.observe.prometheus import exposition
from venusrl.rollout.worker import LOAD_DESCRIPTIONS, Request, Worker

LONGEST_BODY = 16 * 2**20  # bytes of a request that is no KV and no weights


def worker_app(
    worker: Worker, unpack_kv: Callable[[bytes], Any], pack_kv: Callable[[Any], bytes], read_weights: Callable
) -> Starlette:
    """The application.

    Args:
      worker: started.
      unpack_kv, pack_kv: between KV of the worker's kind and bytes.
      read_weights: from the bytes of a safetensors file to what `update_weights` takes.
    """

    async def body(request: HttpRequest) -> dict:
        try:
            found = json.loads(await _read(request, LONGEST_BODY))
        except ValueError as error:
            raise ContractError(f"the body is no JSON ({error})") from error
        if not isinstance(found, dict):
            raise ContractError("the body must be a JSON object")
        return found

    async def preempt(request: HttpRequest) -> Response:
        await worker.preempt(_field(await body(request), "trajectory", str))
        return JSONResponse({})

    async def prioritise(request: HttpRequest) -> Response:
        fields = await body(request)
        worker.prioritise(
            _field(fields, "trajectory", str), _field(fields, "priority", int), _field(fields, "resident", bool)
        )
        return JSONResponse({})

    async def release(request: HttpRequest) -> Response:
        await worker.release(_field(await body(request), "trajectory", str))
        return JSONResponse({})

    async def export_kv(request: HttpRequest) -> Response:
        prefix = await worker.export_kv(request.path_params["trajectory"])
        if prefix is None:
            return Response(status_code=204)
        return Response(await asyncio.to_thread(pack_kv, prefix), media_type="application/octet-stream")

    async def import_kv(request: HttpRequest) -> Response:
        data = await _read(request, None)
        return JSONResponse({"tokens": await worker.import_kv(await asyncio.to_thread(unpack_kv, data))})

    async def weights(request: HttpRequest) -> Response:
        params = await asyncio.to_thread(read_weights, await _read(request, None))
        restart = request.query_params.get("restart") == "1"
        await worker.update_weights(params, request.path_params["version"], restart)
        return JSONResponse({})

    async def load(request: HttpRequest) -> Response:
        return JSONResponse(dataclasses.asdict(worker.load()))

    async def info(request: HttpRequest) -> Response:
        failure = None if worker.failure is None else str(worker.failure)
        return JSONResponse(
            {
                "name": worker.name,
                "slots": worker.slots,
                "max_length": worker.max_length,
                "kv_tokens": worker.kv_tokens,
                "failure": failure,
            }
        )

    async def metrics(request: HttpRequest) -> Response:
        text = exposition(
            "venusrl_worker", dataclasses.asdict(worker.load()), {"worker": worker.name}, LOAD_DESCRIPTIONS
        )
        return PlainTextResponse(text)

    async def failed(request: HttpRequest, error: Exception) -> Response:
        return _answer(400 if isinstance(error, ContractError) else 503, error)

    async def cancel(request: HttpRequest) -> Response:
        await generate.cancel(_field(await body(request), "trajectory", str))
        return JSONResponse({})

    generate = Generate(worker)
    routes = [
        Route("/generate", generate),
        Route("/cancel", cancel, methods=["POST"]),
        Route("/preempt", preempt, methods=["POST"]),
        Route("/prioritise", prioritise, methods=["POST"]),
        Route("/release", release, methods=["POST"]),
        Route("/kv/{trajectory:path}", export_kv),
        Route("/kv", import_kv, methods=["PUT"]),
        Route("/weights/{version:int}", weights, methods=["PUT"]),
        Route("/load", load),
        Route("/info", info),
        Route("/metrics", metrics),
    ]
    return Starlette(routes=routes, exception_handlers={VenusError: failed})


class Generate:
    """The endpoint that streams a turn. Plain ASGI: it has to notice at once when the caller hangs up."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._streams: dict[str, list[tuple[asyncio.Future, asyncio.Event]]] = {}

    async def cancel(self, trajectory: str) -> None:
        """Ends what streams for `trajectory`, and returns when it has ended."""
        streams = list(self._streams.get(trajectory, ()))
        for gone, _ in streams:
            gone.cancel()
        for _, ended in streams:
            await ended.wait()

    async def __call__(self, scope, receive, send) -> None:
        http = HttpRequest(scope, receive)
        if http.method != "POST":
            return await _answer(405, "use POST")(scope, receive, send)
        try:
            fields = json.loads(await _read(http, LONGEST_BODY))
            request = _request(fields)
        except ValueError as error:
            return await _answer(400, f"the body is no JSON ({error})")(scope, receive, send)
        except ContractError as error:
            return await _answer(400, error)(scope, receive, send)
        gone, ended = asyncio.ensure_future(_hang_up(receive)), asyncio.Event()
        streams = self._streams.setdefault(request.trajectory, [])
        streams.append((gone, ended))
        begun = False
        try:
            async with contextlib.aclosing(self._worker.generate(request)) as chunks:
                async for chunk in _until(gone, chunks):
                    if not begun:
                        headers = [(b"content-type", b"application/x-ndjson")]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        begun = True
                    await _line(send, dataclasses.asdict(chunk))
        except VenusError as error:
            if not begun:
                status = 400 if isinstance(error, ContractError) else 503
                return await _answer(status, error)(scope, receive, send)
            await _line(send, {"error": str(error)})
        finally:
            gone.cancel()
            ended.set()
            streams.remove((gone, ended))
            if not streams:
                self._streams.pop(request.trajectory, None)
        if begun:
            await send({"type": "http.response.body", "body": b""})


def _answer(status: int, error: object) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status_code=status)


async def _until(gone: asyncio.Future, chunks):
    """Items of `chunks` until they or the caller end."""
    while True:
        item = asyncio.ensure_future(anext(chunks))
        try:
            await asyncio.wait({item, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not item.done():
                item.cancel()
                await asyncio.wait({item})
        if item.cancelled():
            return
        try:
            yield item.result()
        except StopAsyncIteration:
            return


async def _hang_up(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _line(send, fields: dict) -> None:
    await send({"type": "http.response.body", "body": json.dumps(fields).encode() + b"\n", "more_body": True})


async def _read(request: HttpRequest, most: int | None) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if most is not None and size > most:
            raise ContractError(f"the body has more than {most} bytes")
        parts.append(part)
    return b"".join(parts)


def _request(fields: Any) -> Request:
    if not isinstance(fields, dict):
        raise ContractError("the body must be a JSON object")
    tokens = _field(fields, "tokens", list)
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ContractError("tokens must be token ids")
    return Request(
        _field(fields, "trajectory", str),
        tokens,
        _field(fields, "max_tokens", int),
        float(_field(fields, "temperature", (int, float), 1.0)),
        _field(fields, "seed", int, 0),
        _field(fields, "namespace", str, ""),
    )


def _field(fields: dict, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    value = fields.get(name, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ContractError(f"{name}={value!r}: give {getattr(kind, '__name__', 'a number')}")
    return value


def error_of(status: int, text: str) -> VenusError:
    """What a client raises for an answer that is no success."""
    try:
        text = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {status}: {text[:200]}"
    return ContractError(text) if status == 400 else WorkerError(text)

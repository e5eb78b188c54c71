"""The service: sandboxes of one node, over HTTP and web sockets.

POST /sandboxes {template or snapshot, lease_s}; GET /sandboxes; DELETE /sandboxes/ID?reason=; GET /health;
POST /sandboxes/ID/snapshot; POST /sandboxes/ID/fork {lease_s}; GET /snapshots; DELETE /snapshots/ID;
POST /sandboxes/ID/resize {memory_bytes}; POST /sandboxes/ID/migrate {node}, and what nodes say to one another of that:
/arrivals/ID and /templates/KEY (see arrivals.py). For clients that are not ours also POST /sandboxes/ID/exec, GET and
PUT /sandboxes/ID/files?path=, and GET /sandboxes/ID/list?path=. Ours speaks frames (sandbox/wire.py) over the web
socket /sandboxes/ID/agent.

A sandbox whose last client has gone ends when its lease does. Bytes in JSON are base64.
"""

import asyncio
import base64
import errno
import hmac
import logging
import re
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from venusrl.core.errors import ConfigError, SandboxCapacity, SandboxError, SandboxLost, SandboxUnsupported, VenusError
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.codec import from_json, to_json
from venusrl.sandbox.daemon.arrivals import KEY_HEADER, Arrivals
from venusrl.sandbox.daemon.hub import Hub
from venusrl.sandbox.saving import MOVED, Saving
from venusrl.sandbox.wire import FrameTooLong, pack, unpack

_KEY = re.compile(r"[0-9a-f]{64}")
_STATUS = {ConfigError: 400, SandboxLost: 410, SandboxUnsupported: 501, SandboxCapacity: 503}
_RETRY_S = 1
_HOLD_S = 2.0  # that clients may take to say that they hold on
_LOOK_S = 0.1
_RESCUE_S = 1.0  # until nodes are asked again to take one that is short of memory
_MAX_REASONS = 1000  # ends that are remembered
_GONE = 4410  # code of a web socket that is closed since its sandbox is gone; the reason is why


class _Moved(Exception):
    """The sandbox is at another node now."""

    def __init__(self, node: str):
        self.node = node


class _Held:
    """A sandbox, and who uses it."""

    def __init__(self, sandbox: ProcessSandbox, lease_s: float, state: dict | None = None):
        self.sandbox = sandbox
        self.hub = Hub(sandbox, state)
        self.moving = asyncio.Lock()
        self.lease_s = lease_s
        self.clients = 0
        self.expiry: asyncio.TimerHandle | None = None


class Daemon:
    """Args:
    pool: of this node; the daemon does not close it.
    lowers: directories of this host below which those of templates may be; whoever can connect can read them.
    peers: addresses of other daemons, which sandboxes that are short of memory may move to; see `pressed`.
    key: that other nodes have to show before this one takes a sandbox of theirs; empty: it takes none.
    """

    def __init__(self, pool: Saving, lowers: tuple[str, ...] = (), peers: tuple[str, ...] = (), key: str = ""):
        self._pool = pool
        self._key = key
        self._peers = peers
        self._lowers = [Path(folder).resolve() for folder in lowers]
        self._held: dict[str, _Held] = {}
        self._reasons: dict[str, str] = {}
        self._ending: set[asyncio.Task] = set()
        self._pressed: dict[str, bool] = {}  # those that are being moved for want of memory: they wanted it again
        self._moved: dict[str, str] = {}  # where those are that were here
        self._arrivals = Arrivals(pool, self._take_over)
        self.application = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/sandboxes", self._create, methods=["POST"]),
                Route("/sandboxes", self._list),
                Route("/sandboxes/{id}", self._end, methods=["DELETE"]),
                Route("/sandboxes/{id}/snapshot", self._snapshot, methods=["POST"]),
                Route("/sandboxes/{id}/fork", self._fork, methods=["POST"]),
                Route("/sandboxes/{id}/migrate", self._migrate, methods=["POST"]),
                Route("/sandboxes/{id}/resize", self._resize, methods=["POST"]),
                Route("/arrivals/{id}", self._arrive, methods=["POST"]),
                Route("/arrivals/{id}", self._refuse, methods=["DELETE"]),
                Route("/arrivals/{id}", self._arrival),
                Route("/arrivals/{id}/commit", self._commit, methods=["POST"]),
                Route("/templates/{key}", self._template),
                Route("/templates/{key}", self._take_template, methods=["POST"]),
                Route("/snapshots", self._snapshots),
                Route("/snapshots/{id}", self._delete_snapshot, methods=["DELETE"]),
                Route("/sandboxes/{id}/exec", self._exec, methods=["POST"]),
                Route("/sandboxes/{id}/files", self._read),
                Route("/sandboxes/{id}/files", self._write, methods=["PUT"]),
                Route("/sandboxes/{id}/list", self._entries),
                WebSocketRoute("/sandboxes/{id}/agent", self._agent),
            ],
            exception_handlers={VenusError: _say, OSError: _say, _Moved: _redirect},
        )

    def _get(self, sandbox_id: str) -> _Held:
        held = self._held.get(sandbox_id)
        if held is None and sandbox_id in self._moved:
            raise _Moved(self._moved[sandbox_id])
        if held is None or held.sandbox.lost is not None:
            reason = self._reasons.get(sandbox_id, "unknown") if held is None else held.sandbox.lost
            raise SandboxLost(sandbox_id, reason)
        return held

    async def _health(self, request: Request) -> Response:
        stats = self._pool.stats()
        return JSONResponse({"alive": stats.alive, "created": stats.created, "ended": stats.ended, **self._pool.host})

    async def _create(self, request: Request) -> Response:
        body = await _json(request)
        lease_s = _lease(body)
        if "snapshot" in body:
            return self._hold(await self._pool.restore(str(body["snapshot"])), lease_s)
        template = from_json(body.get("template", {}))
        for lower in template.lowers:
            if not any(Path(lower).resolve().is_relative_to(folder) for folder in self._lowers):
                raise ConfigError(f"Template.lowers: {lower!r} is below none of this node's --lowers; give it there")
        return self._hold(await self._pool.create(template), lease_s)

    async def _fork(self, request: Request) -> Response:
        lease_s = _lease(await _json(request))
        return self._hold(await self._pool.fork(self._get(request.path_params["id"]).sandbox), lease_s)

    async def _snapshot(self, request: Request) -> Response:
        return JSONResponse({"snapshot": await self._get(request.path_params["id"]).sandbox.snapshot()}, 201)

    async def _snapshots(self, request: Request) -> Response:
        rows = [
            {"id": one.id, "template": to_json(one.template), "bytes": one.bytes, "created": one.created}
            for one in await self._pool.snapshots()
        ]
        return JSONResponse({"snapshots": rows})

    async def _delete_snapshot(self, request: Request) -> Response:
        await self._pool.delete_snapshot(request.path_params["id"])
        return Response(status_code=204)

    # Moving

    async def _migrate(self, request: Request) -> Response:
        node = (await _json(request)).get("node")
        if not isinstance(node, str) or not node:
            raise ConfigError(f"node={node!r}: give the address of the daemon that it is to move to")
        await self._move(request.path_params["id"], node)
        return JSONResponse({"node": node})

    async def _move(self, sandbox_id: str, node: str) -> None:
        held = self._get(sandbox_id)
        async with held.moving:
            self._get(sandbox_id)  # still here
            try:
                await self._pool.bring_template(held.sandbox, node)
                await held.hub.hold(node, _HOLD_S)
                await self._pool.migrate(held.sandbox, node, held.hub.state(), held.lease_s)
            except BaseException:
                held.hub.release(None)
                raise
            self._held.pop(sandbox_id, None)
            if held.expiry is not None:
                held.expiry.cancel()
                held.expiry = None
            self._moved[sandbox_id] = node
            if len(self._moved) > _MAX_REASONS:
                del self._moved[next(iter(self._moved))]
            held.hub.release(node)
        self._spawn(self._leave(held.sandbox))

    def pressed(self, sandbox: ProcessSandbox) -> None:
        """One that stands still for want of memory moves to the first of the other nodes that takes it."""
        if sandbox.id in self._pressed:
            self._pressed[sandbox.id] = True
        elif self._peers:
            self._spawn(self._rescue(sandbox.id))

    async def _rescue(self, sandbox_id: str) -> None:
        self._pressed[sandbox_id] = True
        try:
            while self._pressed[sandbox_id]:
                self._pressed[sandbox_id] = False
                for node in self._peers:
                    try:
                        return await self._move(sandbox_id, node)
                    except (_Moved, SandboxLost):
                        return
                    except (SandboxError, OSError) as error:
                        logging.warning("%s is short of memory, and cannot move to %s: %s", sandbox_id, node, error)
                await asyncio.sleep(_RESCUE_S)
        finally:
            del self._pressed[sandbox_id]

    async def _resize(self, request: Request) -> Response:
        memory_bytes = (await _json(request)).get("memory_bytes")
        if not isinstance(memory_bytes, int) or memory_bytes <= 0:
            raise ConfigError(f"memory_bytes={memory_bytes!r}: give a positive number of bytes")
        await self._pool.resize(self._get(request.path_params["id"]).sandbox, memory_bytes)
        return Response(status_code=204)

    def _spawn(self, work: Coroutine) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _leave(self, sandbox: ProcessSandbox) -> None:
        """Once those who asked here have been answered from there."""
        while sandbox.waits and sandbox.lost is None:
            await asyncio.sleep(_LOOK_S)
        sandbox.mark_lost(MOVED)

    async def _template(self, request: Request) -> Response:
        return JSONResponse({"digest": await asyncio.to_thread(self._pool.template_digest, _key(request))})

    async def _take_template(self, request: Request) -> Response:
        self._check_node(request)
        try:
            await self._arrivals.receive_template(_key(request), request.stream())
        except ClientDisconnect:
            return Response(status_code=400)  # nobody hears it
        return Response(status_code=201)

    def _check_node(self, request: Request) -> None:
        """Images of processes can do whatever this process can: they are taken from who has the key alone."""
        if not self._key or not hmac.compare_digest(request.headers.get(KEY_HEADER, ""), self._key):
            raise SandboxUnsupported(
                "this node takes no sandboxes of that node's: start both daemons with the same --key_file "
                "(and give pools its content, SandboxPool(key=...))"
            )

    async def _arrive(self, request: Request) -> Response:
        self._check_node(request)
        try:
            await self._arrivals.receive(request.path_params["id"], request.stream())
        except ClientDisconnect:
            return Response(status_code=400)  # nobody hears it
        return Response(status_code=201)

    async def _commit(self, request: Request) -> Response:
        could = await self._arrivals.commit(request.path_params["id"])
        return Response(status_code=204 if could else 404)

    async def _refuse(self, request: Request) -> Response:
        could = await self._arrivals.refuse(request.path_params["id"])
        return Response(status_code=204 if could else 409)

    async def _arrival(self, request: Request) -> Response:
        return JSONResponse({"state": self._arrivals.state(request.path_params["id"])})

    def _take_over(self, sandbox: ProcessSandbox, about: dict) -> None:
        """One that has come from another node; its clients come, too, or have until its lease is over."""
        self._moved.pop(sandbox.id, None)
        held = self._hold_it(sandbox, _lease(about), about)
        asyncio.get_running_loop().call_later(held.lease_s, held.hub.give_up_absent)

    def _hold_it(self, sandbox: ProcessSandbox, lease_s: float, state: dict | None = None) -> _Held:
        held = self._held[sandbox.id] = _Held(sandbox, lease_s, state)
        sandbox.when_lost(lambda reason: self._forget(held, reason))
        self._begin_lease(held)
        return held

    def _hold(self, sandbox: ProcessSandbox, lease_s: float) -> Response:
        self._hold_it(sandbox, lease_s)
        return JSONResponse({"id": sandbox.id, "template": to_json(sandbox.template)}, 201)

    def _forget(self, held: _Held, reason: str) -> None:
        if held.expiry is not None:
            held.expiry.cancel()
        sandbox_id = held.sandbox.id
        if self._held.get(sandbox_id) is not held:
            return  # it has moved, and perhaps come back since
        del self._held[sandbox_id]
        self._reasons[sandbox_id] = reason
        if len(self._reasons) > _MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]

    def _begin_lease(self, held: _Held) -> None:
        held.expiry = asyncio.get_running_loop().call_later(
            held.lease_s, lambda: self._spawn(held.sandbox.kill("lease"))
        )

    async def _list(self, request: Request) -> Response:
        usage = await self._pool.usage()
        rows = []
        for sandbox_id, held in self._held.items():
            row = {"id": sandbox_id, "template": held.sandbox.template.name, "clients": held.clients}
            if sandbox_id in usage:
                used = usage[sandbox_id]
                row |= {"private": used.private, "kernel": used.kernel, "shared": used.shared}
                row["growth_10s"] = self._pool.growth(sandbox_id, 10.0)
            rows.append(row)
        return JSONResponse({"sandboxes": rows})

    async def _end(self, request: Request) -> Response:
        sandbox_id, reason = request.path_params["id"], request.query_params.get("reason", "killed")
        held = self._held.get(sandbox_id)
        if held is not None:
            async with held.moving:
                if self._held.get(sandbox_id) is held:
                    await held.sandbox.kill(reason)
                    return Response(status_code=204)
        if sandbox_id in self._moved:
            raise _Moved(self._moved[sandbox_id])
        return Response(status_code=204)

    async def _exec(self, request: Request) -> Response:
        body = await _json(request)
        known = ("script", "timeout_s", "silent_s", "user", "cwd", "user_env", "stdin")
        if "script" not in body or body.keys() - set(known):
            raise ConfigError(f"exec takes {', '.join(known)}; got {', '.join(body) or 'nothing'}")
        sandbox = self._get(request.path_params["id"]).sandbox
        try:
            body["stdin"] = base64.b64decode(body.get("stdin", ""), validate=True)
            result = await sandbox.exec(body.pop("script"), **body)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"exec: {error}; see Sandbox.exec for what it takes") from None
        fields = {name: getattr(result, name) for name in result.__dataclass_fields__ if name != "output"}
        return JSONResponse(fields | {"output": base64.b64encode(result.output).decode()})

    async def _read(self, request: Request) -> Response:
        data = await self._get(request.path_params["id"]).sandbox.read(_path(request))
        return Response(data, media_type="application/octet-stream")

    async def _write(self, request: Request) -> Response:
        await self._get(request.path_params["id"]).sandbox.write(_path(request), await request.body())
        return Response(status_code=204)

    async def _entries(self, request: Request) -> Response:
        entries = await self._get(request.path_params["id"]).sandbox.list(_path(request))
        rows = [{name: getattr(entry, name) for name in entry.__dataclass_fields__} for entry in entries]
        return JSONResponse({"entries": rows})

    async def _agent(self, socket: WebSocket) -> None:
        """Frames of one client, both ways, until either side ends."""
        await socket.accept()
        sandbox_id = socket.path_params["id"]
        try:
            held = self._get(sandbox_id)
            async with held.moving:
                held = self._get(sandbox_id)
        except SandboxLost as error:
            await socket.close(_GONE, error.reason)
            return
        except _Moved as error:
            await socket.send_bytes(pack({"moved": error.node}))
            await socket.close()
            return
        if held.expiry is not None:
            held.expiry.cancel()
            held.expiry = None
        held.clients += 1
        outgoing: asyncio.Queue[bytes | None] = asyncio.Queue()
        back = socket.query_params.get("first_id")
        try:
            first_id = held.hub.attach(
                lambda header, body: outgoing.put_nowait(_frame(header, body)), None if back is None else int(back)
            )
        except (KeyError, ValueError):
            held.clients -= 1
            if not held.clients:
                self._begin_lease(held)
            await socket.close(_GONE, "lease")  # it was away for too long
            return
        forget = held.sandbox.when_lost(lambda reason: outgoing.put_nowait(None))
        outgoing.put_nowait(pack({"first_id": first_id, "paused": held.sandbox.paused}))
        held.hub.catch_up(first_id)
        sending = asyncio.create_task(self._send(socket, outgoing, held))
        try:
            while True:
                held.hub.ask(first_id, *unpack(await socket.receive_bytes()))
        except (WebSocketDisconnect, SandboxLost, KeyError, TypeError, ValueError, ConnectionError, RuntimeError):
            pass  # gone, or it does not speak frames
        finally:
            held.hub.detach(first_id)
            forget()
            held.clients -= 1
            if held.sandbox.lost is not None:
                await sending
            elif not held.clients and self._held.get(sandbox_id) is held:
                self._begin_lease(held)
            sending.cancel()
            with suppress(WebSocketDisconnect, RuntimeError):
                await socket.close()

    async def _send(self, socket: WebSocket, outgoing: asyncio.Queue, held: _Held) -> None:
        with suppress(WebSocketDisconnect, RuntimeError, ConnectionError):
            while (message := await outgoing.get()) is not None:
                await socket.send_bytes(message)
            await socket.close(_GONE, held.sandbox.lost or "node-lost")


def _frame(header: dict, body: bytes) -> bytes:
    """Of what an agent said, whose frames write text more shortly than those to clients."""
    try:
        return pack(header, body)
    except FrameTooLong:
        if "watch" in header:
            return pack({**header, "events": [["lost", ""]]})
        return pack({"id": header["id"], "errno": errno.EFBIG})


async def _json(request: Request) -> dict:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ConfigError("the body is no JSON object")
    return body


def _lease(body: dict) -> float:
    lease_s = body.get("lease_s", 60.0)
    if not isinstance(lease_s, int | float) or not lease_s > 0:
        raise ConfigError(f"lease_s={lease_s!r}: give a positive number of seconds")
    return lease_s


def _key(request: Request) -> str:
    key = request.path_params["key"]
    if not _KEY.fullmatch(key):
        raise ConfigError(f"key={key!r}: give the 64 hexadecimal digits of a template")
    return key


def _path(request: Request) -> str:
    path = request.query_params.get("path", "")
    if not path:
        raise ConfigError("path is missing: give ?path=")
    return path


async def _redirect(request: Request, error: Exception) -> Response:
    """To where a sandbox is now; 308 for clients that follow addresses."""
    node, path = error.node, request.url.path + (f"?{request.url.query}" if request.url.query else "")
    headers = {} if node.startswith("unix:") else {"Location": f"{node}{path}"}
    return JSONResponse({"error": "Moved", "node": node, "message": f"it is at {node}"}, 308, headers=headers)


async def _say(request: Request, error: Exception) -> Response:
    """Errors as {error, message}; what helps to raise the same one on the other side."""
    body = {"error": type(error).__name__, "message": str(error)}
    if isinstance(error, OSError):
        return JSONResponse(body | {"error": "OSError", "errno": error.errno, "path": error.filename}, 422)
    if isinstance(error, SandboxLost):
        body["reason"] = error.reason
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(_RETRY_S)} if status == 503 else None
    return JSONResponse(body, status, headers=headers)

"""The service: sandboxes of one node, over HTTP and web sockets.

POST /sandboxes {template or snapshot, lease_s}; GET /sandboxes; DELETE /sandboxes/ID?reason=; GET /health;
POST /sandboxes/ID/snapshot; POST /sandboxes/ID/fork {lease_s}; GET /snapshots; DELETE /snapshots/ID;
POST /sandboxes/ID/resize {memory_bytes}; POST /sandboxes/ID/migrate {node}, and what nodes say to one another of that:
/challenge, /arrivals/ID and /templates/KEY (see peers.py, arrivals.py). For clients that are not ours also
POST /sandboxes/ID/exec, GET and PUT /sandboxes/ID/files?path=, and GET /sandboxes/ID/list?path=. Ours speaks frames
(sandbox/wire.py) over the web socket /sandboxes/ID/agent.

A sandbox ends when its lease does, which begins when its last web socket closes and anew after every call that names
it; while a call is under way none runs out. Bytes in JSON are base64, and JSON is sent as application/json.

The application has no key of its own: core/door.py stands before it.
"""

import asyncio
import base64
import json
import logging
import re
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from venusrl.core.errors import ConfigError, SandboxError, SandboxLost, SandboxUnsupported, VenusError
from venusrl.core.http import Gone, body_of, until_gone
from venusrl.sandbox import bounds
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.codec import from_json, to_json
from venusrl.sandbox.daemon.arrivals import Arrivals
from venusrl.sandbox.daemon.hub import Hub
from venusrl.sandbox.daemon.models import Create, Exec, Lease, Migrate, Resize, parsed
from venusrl.sandbox.daemon.outbox import Outbox
from venusrl.sandbox.daemon.peers import CHALLENGE, HEADER, Gatekeeper
from venusrl.sandbox.daemon.replies import Moved, Unproven, fail, json_of, key_of, nobody, path_of, redirect, say
from venusrl.sandbox.saving import MOVED, Saving
from venusrl.sandbox.wire import pack, unpack

_HOLD_S = 2.0  # that clients may take to say that they hold on
_LOOK_S = 0.1
_RESCUE_S = 1.0  # until nodes are asked again to take one that is short of memory
_MAX_REASONS = 1000  # ends that are remembered
_MOST_LARGE = 512 << 20  # of one with a template's files, or a script and its input
_TOO_SLOW = 1008  # code of a web socket whose client does not take what it has asked for
_GONE = 4410  # code of a web socket that is closed since its sandbox is gone; the reason is why


class _Held:
    """A sandbox, and who uses it."""

    def __init__(self, sandbox: ProcessSandbox, lease_s: float, state: dict | None = None):
        self.sandbox = sandbox
        self.hub = Hub(sandbox, state)
        self.moving = asyncio.Lock()
        self.lease_s = lease_s
        self.clients = 0
        self.calls = 0  # that are under way
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def is_used(self) -> bool:
        """Its lease does not run."""
        return bool(self.clients or self.calls)


class Daemon:
    """Args:
    pool: of this node; the daemon does not close it.
    lowers: directories of this host below which those of templates may be; whoever can connect can read them.
    peers: addresses of other daemons by name: where sandboxes may move to, and nowhere else.
    key: of the nodes, which another has to prove before this one takes a sandbox of its; empty: it takes none.

    Attributes: gatekeeper: knows whether a call is another node's.
    """

    def __init__(
        self, pool: Saving, lowers: tuple[str, ...] = (), peers: Mapping[str, str] | None = None, key: str = ""
    ):
        self._pool = pool
        self.gatekeeper = Gatekeeper(key)
        self._peers = dict(peers or {})
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
                Route(CHALLENGE, self._challenge),
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
            exception_handlers={
                VenusError: say, OSError: say, Moved: redirect, Gone: nobody, ClientDisconnect: nobody,
                Exception: fail,
            },
        )  # fmt: skip

    def _get(self, sandbox_id: str) -> _Held:
        held = self._held.get(sandbox_id)
        if held is None and sandbox_id in self._moved:
            raise Moved(self._moved[sandbox_id])
        if held is None or held.sandbox.lost is not None:
            reason = self._reasons.get(sandbox_id, "unknown") if held is None else held.sandbox.lost
            raise SandboxLost(sandbox_id, reason)
        return held

    @contextmanager
    def _use(self, request: Request) -> Iterator[_Held]:
        """The sandbox that a call names, whose lease does not run meanwhile, and begins anew afterwards."""
        held = self._get(request.path_params["id"])
        held.calls += 1
        self._end_lease(held)
        try:
            yield held
        finally:
            held.calls -= 1
            self._begin_lease(held)

    async def _challenge(self, request: Request) -> Response:
        return JSONResponse(self.gatekeeper.challenge(request.query_params.get("nonce", "")))

    async def _health(self, request: Request) -> Response:
        stats = self._pool.stats()
        return JSONResponse({"alive": stats.alive, "created": stats.created, "ended": stats.ended, **self._pool.host})

    async def _create(self, request: Request) -> Response:
        asked = parsed(Create, await json_of(request, _MOST_LARGE))
        if asked.snapshot is not None:
            return self._hold(await self._pool.restore(asked.snapshot), asked.lease_s)
        template = from_json(asked.template)
        for lower in template.lowers:
            if not any(Path(lower).resolve().is_relative_to(folder) for folder in self._lowers):
                raise ConfigError(f"Template.lowers: {lower!r} is below none of this node's --lowers; give it there")
        return self._hold(await self._pool.create(template), asked.lease_s)

    async def _fork(self, request: Request) -> Response:
        lease_s = parsed(Lease, await json_of(request)).lease_s
        with self._use(request) as held:
            return self._hold(await self._pool.fork(held.sandbox), lease_s)

    async def _snapshot(self, request: Request) -> Response:
        with self._use(request) as held:
            return JSONResponse({"snapshot": await held.sandbox.snapshot()}, 201)

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
        asked = parsed(Migrate, await json_of(request))
        with self._use(request) as held:
            node = self._address(asked.node)
            await self._move(held.sandbox.id, node)
        return JSONResponse({"node": node})

    def _address(self, node: str) -> str:
        """Of a peer, by its name, or by its address as it is configured: no other is ever called."""
        if node in self._peers.values():
            return node
        if node not in self._peers:
            known = ", ".join(f"{name} ({address})" for name, address in self._peers.items()) or "none"
            raise ConfigError(f"node={bounds.shown(node)} is no peer of this node; its --peers are: {known}")
        return self._peers[node]

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
            self._end_lease(held)
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
                for node in self._peers.values():
                    try:
                        return await self._move(sandbox_id, node)
                    except (Moved, SandboxLost):
                        return
                    except (SandboxError, OSError) as error:
                        logging.warning("%s is short of memory, and cannot move to %s: %s", sandbox_id, node, error)
                await asyncio.sleep(_RESCUE_S)
        finally:
            del self._pressed[sandbox_id]

    async def _resize(self, request: Request) -> Response:
        asked = parsed(Resize, await json_of(request))
        with self._use(request) as held:
            await self._pool.resize(held.sandbox, asked.memory_bytes)
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
        return JSONResponse({"digest": await asyncio.to_thread(self._pool.template_digest, key_of(request))})

    async def _take_template(self, request: Request) -> Response:
        self._check_node(request)
        await self._arrivals.receive_template(key_of(request), request.stream())
        return Response(status_code=201)

    def _check_node(self, request: Request) -> None:
        """Images of processes can do whatever this process can: they are taken from who has the nodes' key alone."""
        if not self.gatekeeper.admits_scope(request.scope):
            kind = Unproven if HEADER in request.headers else SandboxUnsupported
            raise kind(
                "this node takes sandboxes of nodes alone that prove its key: start both daemons with the same "
                "--peer_key_file (and give pools its content, SandboxPool(key=...))"
            )

    async def _arrive(self, request: Request) -> Response:
        self._check_node(request)
        await self._arrivals.receive(request.path_params["id"], request.stream())
        return Response(status_code=201)

    async def _commit(self, request: Request) -> Response:
        self._check_node(request)
        could = await self._arrivals.commit(request.path_params["id"])
        return Response(status_code=204 if could else 404)

    async def _refuse(self, request: Request) -> Response:
        self._check_node(request)
        could = await self._arrivals.refuse(request.path_params["id"])
        return Response(status_code=204 if could else 409)

    async def _arrival(self, request: Request) -> Response:
        return JSONResponse({"state": self._arrivals.state(request.path_params["id"])})

    def _take_over(self, sandbox: ProcessSandbox, about: dict) -> None:
        """One that has come from another node; its clients come, too, or have until its lease is over."""
        self._moved.pop(sandbox.id, None)
        held = self._hold_it(sandbox, bounds.seconds("lease_s", about.get("lease_s", 60.0)), about)
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
        self._end_lease(held)
        sandbox_id = held.sandbox.id
        if self._held.get(sandbox_id) is not held:
            return  # it has moved, and perhaps come back since
        del self._held[sandbox_id]
        self._reasons[sandbox_id] = reason
        if len(self._reasons) > _MAX_REASONS:
            del self._reasons[next(iter(self._reasons))]

    def _end_lease(self, held: _Held) -> None:
        if held.expiry is not None:
            held.expiry.cancel()
            held.expiry = None

    def _begin_lease(self, held: _Held) -> None:
        """Unless somebody uses it, or it is here no more."""
        self._end_lease(held)
        if held.is_used or self._held.get(held.sandbox.id) is not held:
            return
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
            raise Moved(self._moved[sandbox_id])
        return Response(status_code=204)

    async def _exec(self, request: Request) -> Response:
        asked = dict(parsed(Exec, await json_of(request, _MOST_LARGE)))
        with self._use(request) as held:
            result = await until_gone(request, held.sandbox.exec(asked.pop("script"), **asked))
        fields = {name: getattr(result, name) for name in result.__dataclass_fields__ if name != "output"}
        return JSONResponse(fields | {"output": base64.b64encode(result.output).decode()})

    async def _read(self, request: Request) -> Response:
        with self._use(request) as held:
            data = await held.sandbox.read(path_of(request))
        return Response(data, media_type="application/octet-stream")

    async def _write(self, request: Request) -> Response:
        mode = request.query_params.get("mode")
        if mode is not None and not re.fullmatch(r"[0-7]{1,4}", mode):
            raise ConfigError(f"mode={bounds.shown(mode)}: give permission bits as octal digits, such as 644")
        with self._use(request) as held:
            data = await body_of(request, held.sandbox.template.file_bytes)
            await held.sandbox.write(path_of(request), data, None if mode is None else int(mode, 8))
        return Response(status_code=204)

    async def _entries(self, request: Request) -> Response:
        with self._use(request) as held:
            entries = await held.sandbox.list(path_of(request))
        rows = [{name: getattr(entry, name) for name in entry.__dataclass_fields__} for entry in entries]
        return Response(json.dumps({"entries": rows}), media_type="application/json")

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
        except Moved as error:
            await socket.send_bytes(pack({"moved": error.node}))
            await socket.close()
            return
        self._end_lease(held)
        held.clients += 1
        outbox = Outbox()
        back = socket.query_params.get("first_id")
        try:
            first_id = held.hub.attach(outbox.put, None if back is None else int(back))
        except (KeyError, ValueError):
            held.clients -= 1
            self._begin_lease(held)
            await socket.close(_GONE, "lease")  # it was away for too long
            return
        forget = held.sandbox.when_lost(lambda reason: outbox.end())
        outbox.put({"first_id": first_id, "paused": held.sandbox.paused})
        held.hub.catch_up(first_id)
        sending = asyncio.create_task(self._send(socket, outbox, held))
        try:
            while True:
                held.hub.ask(first_id, *unpack(await socket.receive_bytes()))
                await held.sandbox.drain()
        except (WebSocketDisconnect, SandboxLost, KeyError, TypeError, ValueError, ConnectionError, RuntimeError):
            pass  # gone, or it does not speak frames
        finally:
            held.hub.detach(first_id)
            forget()
            held.clients -= 1
            if held.sandbox.lost is not None:
                await sending
            else:
                self._begin_lease(held)
            sending.cancel()
            with suppress(WebSocketDisconnect, RuntimeError):
                await socket.close()

    async def _send(self, socket: WebSocket, outbox: Outbox, held: _Held) -> None:
        with suppress(WebSocketDisconnect, RuntimeError, ConnectionError):
            while (frame := await outbox.take()) is not None:
                await socket.send_bytes(frame)
            if outbox.is_over:
                await socket.close(_TOO_SLOW, "what was asked for is not taken")
            else:
                await socket.close(_GONE, held.sandbox.lost or "node-lost")

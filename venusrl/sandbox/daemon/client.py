"""The owner's side of a daemon: sandboxes of another process or machine, with the same contract."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import httpx
import websockets

from venusrl.core.calls import client
from venusrl.core.errors import ConfigError, SandboxCapacity, SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox import bounds
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.codec import from_json, to_json
from venusrl.sandbox.contract import Template
from venusrl.sandbox.daemon.arrivals import describe, outgoing, parcel
from venusrl.sandbox.daemon.peers import HEADER, Caller
from venusrl.sandbox.snapshots import Snapshot
from venusrl.sandbox.wire import WireError, pack, unpack

_MESSAGE_BYTES = 1 << 30
_GONE = 4410  # see daemon/app.py
_MOVING, _MOVED = b'{"moving"', b'{"moved"'
_RETRY_S = 0.2  # between questions about what may have happened
_COMMIT_S = 30.0  # that one answer to a commit may take
_GRACE_S = 10.0  # that a daemon which listens no more may take to end
_MOST_HOPS = 8  # from node to node after a sandbox that has moved
_MOST_MESSAGE = 2000  # characters of what went wrong there
_KINDS = {kind.__name__: kind for kind in (ConfigError, SandboxError, SandboxUnsupported, SandboxCapacity)}
_FIND_S = 15.0  # that a sandbox is looked for where it was to move when its node died


class _Stream:
    """What ProcessSandbox writes to: whole frames, to a web socket, or kept while the sandbox moves."""

    def __init__(self):
        self._frames: list[bytes] = []
        self._changed = asyncio.Event()
        self._closed = False
        self._left: int | None = None  # frames that may still go out; None: all

    def write(self, frame: bytes) -> None:
        if frame:
            self._frames.append(frame)
            self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def hold(self, last: bytes) -> None:
        """What was written before goes out, then `last`; the rest waits."""
        self._frames.append(last)
        self._left = len(self._frames)
        self._changed.set()

    def release(self) -> None:
        self._left = None
        self._changed.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """For one socket at a time; what was taken is not given again."""
        while True:
            while self._frames and self._left != 0:
                self._left = None if self._left is None else self._left - 1
                yield self._frames.pop(0)
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


def default_socket() -> str:
    """Where a daemon of this user's listens: `$XDG_RUNTIME_DIR/venusrl/sandboxd.sock`, below ~/.local/state else."""
    return str(Path(os.environ.get("XDG_RUNTIME_DIR") or Path.home() / ".local/state") / "venusrl/sandboxd.sock")


class Node:
    """A daemon at an address: http://host:port, or unix:PATH. Use `async with`.

    Args:
      address: None: this user's, at `default_socket`.
      lease_s: seconds that a sandbox outlives its connection.
      wait_s: seconds that an answer may take; creation with a set-up to be built takes long.
      key: of clients (its --key_file); also shown to the nodes that this one says a sandbox has moved to.
      peer_key: of nodes (its --peer_key_file), which is proven and never sent. For pools.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        lease_s: float = 60.0,
        wait_s: float = 900.0,
        key: str = "",
        peer_key: str = "",
    ):
        address = f"unix:{default_socket()}" if address is None else address
        self.address = address
        self._lease_s = bounds.seconds("lease_s", lease_s)
        self.wait_s = bounds.seconds("wait_s", wait_s)
        self._key, self._peer_key = key, peer_key
        self._caller = Caller(peer_key) if peer_key else None
        self._path = address.removeprefix("unix:") if address.startswith("unix:") else None
        transport = None if self._path is None else httpx.AsyncHTTPTransport(uds=self._path)
        base = address if self._path is None else "http://node"
        self._base = base
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = client(base, transport=transport, timeout=wait_s, headers=headers, auth=self._caller)
        self._pumps: set[asyncio.Task] = set()
        self._others: dict[str, Node] = {}  # where sandboxes have moved

    async def __aenter__(self) -> Node:
        await self.health()
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    async def close(self) -> None:
        """Leaves its sandboxes to their leases."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for other in self._others.values():
            await other.close()
        await self._http.aclose()

    async def health(self) -> dict:
        """What the node has and can do.

        Raises:
          SandboxError: nobody answers at the address.
        """
        return (await self._request("GET", "/health")).json()

    async def list(self) -> list[dict]:
        """Its sandboxes, with their memory."""
        return (await self._request("GET", "/sandboxes")).json()["sandboxes"]

    async def create(self, template: Template) -> ProcessSandbox:
        """As SandboxPool.create."""
        body = {"template": to_json(template), "lease_s": self._lease_s}
        made = await self._request("POST", "/sandboxes", json=body)
        return await self.connect(made.json()["id"], template)

    async def end(self, sandbox_id: str, reason: str) -> None:
        """Kills a sandbox; when it returns, none of its processes exists. Nothing happens where there is none."""
        with suppress(SandboxLost):
            await self._request("DELETE", f"/sandboxes/{sandbox_id}", params={"reason": reason})

    async def resize(self, sandbox: ProcessSandbox, memory_bytes: int) -> None:
        """As SandboxPool.resize."""
        await self._request("POST", f"/sandboxes/{sandbox.id}/resize", json={"memory_bytes": memory_bytes})

    # Saved ones

    async def snapshot(self, sandbox: ProcessSandbox) -> str:
        """See Sandbox.snapshot; it is kept by the node."""
        return (await self._request("POST", f"/sandboxes/{sandbox.id}/snapshot")).json()["snapshot"]

    async def fork(self, sandbox: ProcessSandbox) -> ProcessSandbox:
        """See Sandbox.fork."""
        return await self._made(f"/sandboxes/{sandbox.id}/fork", {})

    async def restore(self, snapshot_id: str) -> ProcessSandbox:
        """As SandboxPool.restore."""
        return await self._made("/sandboxes", {"snapshot": snapshot_id})

    async def _made(self, path: str, body: dict) -> ProcessSandbox:
        made = (await self._request("POST", path, json=body | {"lease_s": self._lease_s})).json()
        return await self.connect(made["id"], from_json(made["template"]))

    async def snapshots(self) -> list[dict]:
        """Those that the node keeps, the oldest first."""
        return (await self._request("GET", "/snapshots")).json()["snapshots"]

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """SandboxError where there is none."""
        await self._request("DELETE", f"/snapshots/{snapshot_id}")

    # Moving

    async def migrate(self, sandbox: ProcessSandbox, node: str) -> None:
        """See Sandbox.migrate."""
        await self._request("POST", f"/sandboxes/{sandbox.id}/migrate", json={"node": node})

    async def template(self, key: str) -> str | None:
        """Digest of what the node has under the key of a template. For pools."""
        return (await self._request("GET", f"/templates/{key}")).json()["digest"]

    async def send_template(self, key: str, digest: str, folder: Path) -> None:
        """Sends what a template is made of. For pools. SandboxError where the node does not take it."""
        files = await asyncio.to_thread(describe, folder)
        await self._request(
            "POST", f"/templates/{key}", content=parcel({"digest": digest, "files": files}, files, folder)
        )

    async def arrive(self, sandbox_id: str, snapshot: Snapshot, folder: Path, about: dict) -> None:
        """Sends a sandbox there, where it waits for its commit. For pools.

        Raises:
          SandboxError: it cannot be there, and will not run there.
        """
        try:
            await self._request("POST", f"/arrivals/{sandbox_id}", content=outgoing(snapshot, folder, about))
        except BaseException:
            with suppress(SandboxError):  # where it is not heard, nobody will tell it to commit either
                await self._request("DELETE", f"/arrivals/{sandbox_id}")
            raise

    async def commit(self, sandbox_id: str, is_moot: Callable[[], bool]) -> bool:
        """Has what has arrived run. False: it does not run there, and never will. Returns only when it knows, or when
        it `is_moot`: the sandbox has been killed, so that it does not matter."""
        may_have_heard, refused_since = False, None
        while not is_moot():
            try:
                answer = await self._http.post(f"/arrivals/{sandbox_id}/commit", timeout=_COMMIT_S)
                if answer.is_success:
                    return True
                if answer.status_code < 500:
                    return False
                refused_since = None
            except httpx.HTTPError as error:
                now = asyncio.get_running_loop().time()
                if not _is_refused(error):
                    may_have_heard, refused_since = True, None
                # Nobody listens there: the node has ended, and with it what it had. One that was just ending may have
                # heard what was asked before, and takes a while to be gone.
                elif not may_have_heard or now > (refused_since or now) + _GRACE_S:
                    return False
                else:
                    refused_since = refused_since or now
            await asyncio.sleep(_RETRY_S)
        return False

    async def drop(self, sandbox_id: str) -> None:
        """Ends what has arrived, whether it runs already or not. For pools."""
        with suppress(SandboxError):
            await self._request("DELETE", f"/arrivals/{sandbox_id}")
        with suppress(SandboxError):
            await self.end(sandbox_id, "killed")

    async def take(self, sandbox: ProcessSandbox) -> None:
        """A sandbox that has moved there, on which nothing is lost that was under way. For pools."""
        pump = _Pump(self, sandbox.id, sandbox.template, sandbox)
        await pump.open(sandbox.first_id)
        self._start(pump)

    # Connections

    async def connect(self, sandbox_id: str, template: Template) -> ProcessSandbox:
        """A sandbox that exists; several may be connected to it.

        Raises:
          SandboxLost: it does not exist any more.
        """
        pump = _Pump(self, sandbox_id, template)
        await pump.open(None)
        self._start(pump)
        return pump.sandbox

    def _start(self, pump: _Pump) -> None:
        task = asyncio.create_task(pump.run())
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)

    async def open_socket(self, sandbox_id: str, first_id: int | None):
        """A web socket to a sandbox's agent, as a client that is new, or that comes back.

        Raises:
          SandboxError: nobody answers at the address.
        """
        query = "" if first_id is None else f"?first_id={first_id}"
        path = f"/sandboxes/{sandbox_id}/agent{query}"
        url = f"ws{self._base.removeprefix('http')}{path}"
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        if self._caller is not None:
            await self.health()  # a session has begun then
            headers[HEADER] = self._caller.proof("GET", path)
        options = dict(max_size=_MESSAGE_BYTES, compression=None, ping_interval=None, additional_headers=headers)
        try:
            if self._path is None:
                return await websockets.connect(url, proxy=None, **options)
            return await websockets.unix_connect(self._path, url, **options)
        except (OSError, websockets.WebSocketException) as error:
            raise SandboxError(f"node {self.address}: {error}; is launchers.sandboxd running there?") from error

    def other(self, address: str) -> Node:
        """The daemon at another address, for as long as this one is in use."""
        if address not in self._others:
            keys = {"key": self._key, "peer_key": self._peer_key}
            self._others[address] = Node(address, lease_s=self._lease_s, wait_s=self.wait_s, **keys)
        return self._others[address]

    async def arrived(self, sandbox_id: str) -> str | None:
        """Whether it is "waiting" there or "running"; None: it is not there."""
        answer = await self._request("GET", f"/arrivals/{sandbox_id}")
        return answer.json()["state"]

    async def _request(self, method: str, path: str, hops: int = 0, **arguments) -> httpx.Response:
        """Raises what was raised there."""
        try:
            answer = await self._http.request(method, path, **arguments)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SandboxError(f"node {self.address}: {error!r}; is launchers.sandboxd running there?") from error
        if answer.is_success:
            return answer
        said = _said(answer)
        if said["error"] == "Moved" and isinstance(said.get("node"), str) and hops < _MOST_HOPS:
            return await self.other(said["node"])._request(method, path, hops + 1, **arguments)
        raise self._error(answer.status_code, path, said)

    def _error(self, status: int, path: str, said: dict) -> Exception:
        kind, message = said["error"], said["message"]
        if kind == "OSError" and type(said.get("errno")) is int:
            return OSError(said["errno"], message, said.get("path"))
        if kind == "SandboxLost":
            return SandboxLost(str(said.get("id") or path.split("/")[-1])[:100], str(said.get("reason"))[:100])
        if status == 401:
            return SandboxError(f"node {self.address} wants its key: give Node(key=...), the content of its --key_file")
        return _KINDS.get(kind, SandboxError)(message or f"node {self.address} answered {status}")


def _said(answer: httpx.Response) -> dict:
    """An error as a node tells it; nothing of the kind becomes {"error": "", "message": ""}."""
    try:
        said = answer.json()
    except ValueError:
        said = None
    said = said if isinstance(said, dict) else {}
    return said | {name: str(said.get(name) or "")[:_MOST_MESSAGE] for name in ("error", "message")}


class _Pump:
    """Frames of one sandbox both ways, at whatever node it is; when the node says why it is gone, so does the sandbox.

    Args:
      sandbox: that has been here, and moves; else one is made when the node answers.
    """

    def __init__(self, node: Node, sandbox_id: str, template: Template, sandbox: ProcessSandbox | None = None):
        self._node = node
        self._id = sandbox_id
        self._template = template
        self.sandbox = sandbox
        self._stream = _Stream()
        self._reader = asyncio.StreamReader()
        self._moving: str | None = None

    async def open(self, first_id: int | None) -> None:
        """SandboxLost where the node does not have it."""
        self._socket = await self._node.open_socket(self._id, first_id)
        try:
            first = await self._first()
            for _ in range(_MOST_HOPS):
                if "moved" not in first:
                    break
                await self._socket.close()
                self._node = self._node.other(str(first["moved"]))
                self._socket = await self._node.open_socket(self._id, first_id)
                first = await self._first()
        except (websockets.ConnectionClosed, OSError, TimeoutError) as error:
            reason = self._socket.close_reason if self._socket.close_code == _GONE else "node-lost"
            raise SandboxLost(self._id, reason) from error
        streams = self._reader, self._stream
        if self.sandbox is None:
            self.sandbox = ProcessSandbox(self._id, self._template, streams, self._node, first["first_id"])
            self.sandbox.is_owner = False
            self.sandbox.control_s = self._node.wait_s  # the daemon sees whether it is being saved
            self._reader.feed_data(pack({"ready": True}))
        elif first_id is not None and self.sandbox.is_parked:
            self._reader.feed_data(pack({"ready": True}))
            self.sandbox.is_owner = False
            self.sandbox.rehome(self._node, streams)
        else:
            self.sandbox.rekeep(self._node)
        self._reader.feed_data(pack({"paused": first["paused"]}))

    async def _first(self) -> dict:
        """What a node says first. WireError where that is something else."""
        async with asyncio.timeout(self._node.wait_s):
            message = await self._socket.recv()
        first, _ = unpack(message if isinstance(message, bytes) else b"")
        if "moved" not in first and not (type(first.get("first_id")) is int and isinstance(first.get("paused"), bool)):
            raise WireError("the node does not say how its client begins")
        return first

    async def run(self) -> None:
        """Until the sandbox is gone, or its owner is."""
        try:
            while (target := await self._talk()) is not None:
                self._node = self._node.other(target)
                await self.open(self.sandbox.first_id)
                self._moving = None
                self._stream.release()
            self.sandbox.mark_lost(self._why())
        except SandboxError:
            self.sandbox.mark_lost("node-lost")
        except (WireError, TypeError, KeyError, ValueError):  # it does not speak frames
            self.sandbox.mark_lost("protocol")
        finally:
            self.sandbox.mark_lost("node-lost")
            await self._socket.close()

    def _why(self) -> str:
        return self._socket.close_reason if self._socket.close_code == _GONE else "node-lost"

    async def _talk(self) -> str | None:
        """Over one socket, to its end. The node that the sandbox has moved to, or None: it is gone."""
        sending = asyncio.create_task(self._send())
        moved = None
        try:
            async for message in self._socket:
                if message[8 : 8 + len(_MOVING)] == _MOVING:
                    self._moving = unpack(message)[0]["moving"]
                    self._stream.hold(pack({"op": "held", "id": self.sandbox.first_id}))
                elif message[8 : 8 + len(_MOVED)] == _MOVED:
                    moved, self._moving = unpack(message)[0]["moved"], None
                    if moved is not None:
                        break
                    self._stream.release()
                else:
                    self._reader.feed_data(message)
        except (websockets.ConnectionClosed, OSError):
            pass
        finally:
            sending.cancel()
            await self._socket.close()
        if moved is None and self._moving is not None and self._socket.close_code != _GONE:
            return await self._find(self._moving)  # its node died on the way
        return moved

    async def _find(self, target: str) -> str | None:
        """Whether it has got there after all."""
        give_up = asyncio.get_running_loop().time() + _FIND_S
        while asyncio.get_running_loop().time() < give_up:
            try:
                state = await self._node.other(target).arrived(self._id)
            except SandboxError:
                return None
            if state != "waiting":
                return target if state == "running" else None
            await asyncio.sleep(_RETRY_S)
        return None

    async def _send(self) -> None:
        with suppress(websockets.ConnectionClosed):
            async for frame in self._stream.frames():
                await self._socket.send(frame)
            await self._socket.close()  # its user has let go of it


def _is_refused(error: BaseException | None) -> bool:
    """Nobody listens there, and a machine says so."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):  # of a name with several addresses
            return all(_is_refused(one) for one in error.exceptions)
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            return True
        if isinstance(error, OSError) and error.errno in (111, 2):
            return True
        error = error.__cause__ or error.__context__
    return False

"""The owner's side of a daemon: sandboxes of another process or machine, with the same contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import httpx
import websockets

from venusrl.core import errors
from venusrl.core.calls import client
from venusrl.core.errors import SandboxError, SandboxLost
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.codec import from_json, to_json
from venusrl.sandbox.contract import Template
from venusrl.sandbox.daemon.arrivals import KEY_HEADER, describe, outgoing, parcel
from venusrl.sandbox.snapshots import Snapshot
from venusrl.sandbox.wire import pack, unpack

_MESSAGE_BYTES = 1 << 30
_GONE = 4410  # see daemon/app.py
_MOVING, _MOVED = b'{"moving"', b'{"moved"'
_RETRY_S = 0.2  # between questions about what may have happened
_COMMIT_S = 30.0  # that one answer to a commit may take
_GRACE_S = 10.0  # that a daemon which listens no more may take to end
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


class Node:
    """A daemon at an address: http://host:port, or unix:PATH. Use `async with`.

    Args:
      lease_s: seconds that a sandbox outlives its connection.
      wait_s: seconds that an answer may take; creation with a set-up to be built takes long.
      key: what nodes show each other before one takes a sandbox of the other's. For pools.
    """

    def __init__(self, address: str, *, lease_s: float = 60.0, wait_s: float = 900.0, key: str = ""):
        self.address = address
        self._lease_s = lease_s
        self.wait_s = wait_s
        self._path = address.removeprefix("unix:") if address.startswith("unix:") else None
        transport = None if self._path is None else httpx.AsyncHTTPTransport(uds=self._path)
        base = address if self._path is None else "http://node"
        self._base = base
        headers = {KEY_HEADER: key} if key else {}
        self._http = client(base, transport=transport, timeout=wait_s, headers=headers)
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
        url = f"ws{self._base.removeprefix('http')}/sandboxes/{sandbox_id}/agent{query}"
        options = dict(max_size=_MESSAGE_BYTES, compression=None, ping_interval=None)
        try:
            if self._path is None:
                return await websockets.connect(url, proxy=None, **options)
            return await websockets.unix_connect(self._path, url, **options)
        except (OSError, websockets.WebSocketException) as error:
            raise SandboxError(f"node {self.address}: {error}; is launchers.sandboxd running there?") from error

    def other(self, address: str) -> Node:
        """The daemon at another address, for as long as this one is in use."""
        if address not in self._others:
            self._others[address] = Node(address, lease_s=self._lease_s, wait_s=self.wait_s)
        return self._others[address]

    async def arrived(self, sandbox_id: str) -> str | None:
        """Whether it is "waiting" there or "running"; None: it is not there."""
        answer = await self._request("GET", f"/arrivals/{sandbox_id}")
        return answer.json()["state"]

    async def _request(self, method: str, path: str, **arguments) -> httpx.Response:
        """Raises what was raised there."""
        try:
            answer = await self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise SandboxError(f"node {self.address}: {error!r}; is launchers.sandboxd running there?") from error
        if answer.is_success:
            return answer
        try:
            said = answer.json()
        except ValueError:
            raise SandboxError(f"node {self.address}: {answer.status_code} {answer.text[:200]}") from None
        if said["error"] == "Moved":
            return await self.other(said["node"])._request(method, path, **arguments)
        if said["error"] == "OSError":
            raise OSError(said["errno"], said["message"], said["path"])
        if said["error"] == "SandboxLost":
            raise SandboxLost(path.split("/")[2], said["reason"])
        raise getattr(errors, said["error"], SandboxError)(said["message"])


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
            first, _ = unpack(await self._socket.recv())
            while "moved" in first:
                await self._socket.close()
                self._node = self._node.other(first["moved"])
                self._socket = await self._node.open_socket(self._id, first_id)
                first, _ = unpack(await self._socket.recv())
        except (websockets.ConnectionClosed, OSError) as error:
            reason = self._socket.close_reason if self._socket.close_code == _GONE else "node-lost"
            raise SandboxLost(self._id, reason) from error
        streams = self._reader, self._stream
        if self.sandbox is None:
            self.sandbox = ProcessSandbox(self._id, self._template, streams, self._node, first["first_id"])
            self.sandbox.control_s = self._node.wait_s  # the daemon sees whether it is being saved
            self._reader.feed_data(pack({"ready": True}))
        elif first_id is not None and self.sandbox.is_parked:
            self._reader.feed_data(pack({"ready": True}))
            self.sandbox.rehome(self._node, streams)
        else:
            self.sandbox.rekeep(self._node)
        self._reader.feed_data(pack({"paused": first["paused"]}))

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

"""The owner's side of a daemon: sandboxes of another process or machine, with the same contract."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import websockets

from venusrl.core import errors
from venusrl.core.errors import SandboxError, SandboxLost
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.codec import from_json, to_json
from venusrl.sandbox.contract import Template
from venusrl.sandbox.wire import pack, unpack

_MESSAGE_BYTES = 1 << 30


class _Stream:
    """What ProcessSandbox writes to: whole frames, to a web socket."""

    def __init__(self):
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue()

    def write(self, frame: bytes) -> None:
        self.frames.put_nowait(frame)

    def close(self) -> None:
        self.frames.put_nowait(None)


class Node:
    """A daemon at an address: http://host:port, or unix:PATH. Use `async with`.

    Args:
      lease_s: seconds that a sandbox outlives its connection.
      wait_s: seconds that an answer may take; creation with a set-up to be built takes long.
    """

    def __init__(self, address: str, *, lease_s: float = 60.0, wait_s: float = 900.0):
        self.address = address
        self._lease_s = lease_s
        self._path = address.removeprefix("unix:") if address.startswith("unix:") else None
        transport = None if self._path is None else httpx.AsyncHTTPTransport(uds=self._path)
        base = address if self._path is None else "http://node"
        self._base = base
        self._http = httpx.AsyncClient(base_url=base, transport=transport, timeout=wait_s)
        self._pumps: set[asyncio.Task] = set()

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

    async def snapshot(self, sandbox: ProcessSandbox) -> str:
        """See Sandbox.snapshot; it is kept by the node."""
        return (await self._request("POST", f"/sandboxes/{sandbox.id}/snapshot")).json()["snapshot"]

    async def fork(self, sandbox: ProcessSandbox) -> ProcessSandbox:
        """See Sandbox.fork."""
        return await self._made("POST", f"/sandboxes/{sandbox.id}/fork", {})

    async def restore(self, snapshot_id: str) -> ProcessSandbox:
        """As SandboxPool.restore."""
        return await self._made("POST", "/sandboxes", {"snapshot": snapshot_id})

    async def _made(self, method: str, path: str, body: dict) -> ProcessSandbox:
        made = (await self._request(method, path, json=body | {"lease_s": self._lease_s})).json()
        return await self.connect(made["id"], from_json(made["template"]))

    async def snapshots(self) -> list[dict]:
        """Those that the node keeps, the oldest first."""
        return (await self._request("GET", "/snapshots")).json()["snapshots"]

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """SandboxError where there is none."""
        await self._request("DELETE", f"/snapshots/{snapshot_id}")

    async def connect(self, sandbox_id: str, template: Template) -> ProcessSandbox:
        """A sandbox that exists; several may be connected to it.

        Raises:
          SandboxLost: it does not exist any more.
        """
        url = f"ws{self._base.removeprefix('http')}/sandboxes/{sandbox_id}/agent"
        options = dict(max_size=_MESSAGE_BYTES, compression=None, ping_interval=None)
        try:
            if self._path is None:
                socket = await websockets.connect(url, **options)
            else:
                socket = await websockets.unix_connect(self._path, url, **options)
        except (OSError, websockets.WebSocketException) as error:
            raise SandboxError(f"node {self.address}: {error}; is launchers.sandboxd running there?") from error
        reader, stream = asyncio.StreamReader(), _Stream()
        begun: asyncio.Future[ProcessSandbox] = asyncio.get_running_loop().create_future()
        pump = asyncio.create_task(self._pump(sandbox_id, template, socket, reader, stream, begun))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        try:
            return await begun
        except asyncio.CancelledError:
            pump.cancel()
            raise

    async def _pump(self, sandbox_id, template, socket, reader, stream, begun) -> None:
        """Frames both ways; when the node says why the sandbox is gone, so does the sandbox."""
        sending: asyncio.Task | None = None
        sandbox: ProcessSandbox | None = None
        try:
            async for message in socket:
                if sandbox is not None:
                    reader.feed_data(message)
                else:
                    first, _ = unpack(message)
                    sandbox = ProcessSandbox(sandbox_id, template, (reader, stream), self, first["first_id"])
                    reader.feed_data(pack({"ready": True}) + pack({"paused": first["paused"]}))
                    sending = asyncio.create_task(self._send(socket, stream))
                    if not begun.done():
                        begun.set_result(sandbox)
        except (websockets.ConnectionClosed, OSError, KeyError):
            pass
        finally:
            reason = socket.close_reason if socket.close_code == 4410 else "node-lost"
            if sandbox is not None:
                sandbox.mark_lost(reason)
            elif not begun.done():
                begun.set_exception(SandboxLost(sandbox_id, reason))
            if sending is not None:
                sending.cancel()
            await socket.close()

    async def _send(self, socket, stream: _Stream) -> None:
        with suppress(websockets.ConnectionClosed):
            while (frame := await stream.frames.get()) is not None:
                await socket.send(frame)

    async def end(self, sandbox_id: str, reason: str) -> None:
        """Kills a sandbox; when it returns, none of its processes exists. Nothing happens where there is none."""
        with suppress(SandboxLost):
            await self._request("DELETE", f"/sandboxes/{sandbox_id}", params={"reason": reason})

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
        if said["error"] == "OSError":
            raise OSError(said["errno"], said["message"], said["path"])
        if said["error"] == "SandboxLost":
            raise SandboxLost(path.split("/")[2], said["reason"])
        raise getattr(errors, said["error"], SandboxError)(said["message"])

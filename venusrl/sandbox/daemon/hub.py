"""Several clients of one sandbox at once, each with a range of request ids of its own.

Frames pass through as they are. An answer goes to whoever's range its id is in; the output of a command goes to who
connected to it last, its end to all who have started or connected to it. When the sandbox moves to another node, the
hub there begins with the state of this one; a client that has not come back yet finds what it missed.
"""

import asyncio
import errno
from collections.abc import Callable

from venusrl.core.errors import ConfigError, SandboxError
from venusrl.sandbox.client import RANGE, ProcessSandbox
from venusrl.sandbox.frames import check_asked

Send = Callable[[dict, bytes], None]
_LOOK_S = 0.02
_HEADER_BYTES = 512  # that a frame counts for, besides its body
_MOST_MISSED = 64 << 20  # bytes that are kept for a client that is away


class _Away:
    """A client of before that has not come back."""

    def __init__(self):
        self.missed: list[tuple[dict, bytes]] = []
        self.bytes = 0


class Hub:
    """Clients of one sandbox.

    Args:
      state: of the hub that the sandbox had on another node.
    """

    def __init__(self, sandbox: ProcessSandbox, state: dict | None = None):
        state = state or {}
        self._sandbox = sandbox
        self._clients: dict[int, Send] = {}
        self._away = {client: _Away() for client in state.get("clients", ())}
        # Clients of a command by its number; the last one follows it.
        self._interested: dict[int, list[int]] = {int(job): list(of) for job, of in state.get("jobs", {}).items()}
        self._watches: dict[int, int] = {int(watch): client for watch, client in state.get("watches", {}).items()}
        self._held: dict[int, asyncio.Event] = {}
        self._has_moved = False
        sandbox.foreign = self._tell

    @property
    def clients(self) -> int:
        """That are there."""
        return len(self._clients)

    def state(self) -> dict:
        """What another hub has to know to take over."""
        clients = [*self._clients, *self._away]
        return {"jobs": dict(self._interested), "watches": dict(self._watches), "clients": clients}

    def attach(self, send: Send, first_id: int | None = None) -> int:
        """A client that is new, or comes back for its range; the first id of that.

        Raises:
          KeyError: nobody of that range is awaited.
        """
        if first_id is not None:
            if first_id // RANGE not in self._away:
                raise KeyError(first_id)
            self._clients[first_id // RANGE] = send
            return first_id
        client = self._sandbox.ranges
        self._sandbox.ranges += 1
        self._clients[client] = send
        return client * RANGE

    def catch_up(self, first_id: int) -> None:
        """Tells a client that came back what it missed."""
        away = self._away.pop(first_id // RANGE, None)
        for header, body in [] if away is None else away.missed:
            self._clients[first_id // RANGE](header, body)

    def detach(self, first_id: int) -> None:
        """The client is gone. What it has started goes on, and is not held up by what it no longer takes."""
        client = first_id // RANGE
        if self._has_moved:
            return
        self._clients.pop(client, None)
        self._away.pop(client, None)
        if client in self._held:
            self._held[client].set()
        ended = [{"op": "unwatch", "watch": watch} for watch, of in self._watches.items() if of == client]
        self._watches = {watch: of for watch, of in self._watches.items() if of != client}
        for job, clients in list(self._interested.items()):
            if clients[-1] == client:
                ended.append({"op": "window", "job": job, "bytes": None})
            clients[:] = [other for other in clients if other != client]
            if not clients:
                del self._interested[job]
        for request in ended if self._sandbox.lost is None else ():
            self._sandbox.pass_on({**request, "id": first_id})

    def give_up_absent(self) -> None:
        """Those who have not come back will not."""
        for client in list(self._away):
            self.detach(client * RANGE)

    def ask(self, first_id: int, header: dict, body: bytes) -> None:
        """A request of a client, which is told where a field of it is wrong.

        Raises:
          SandboxLost: the sandbox is.
          ValueError: an id of another's, or no request at all.
        """
        client = first_id // RANGE
        if isinstance(header, dict) and header.get("op") == "held":
            if client in self._held:
                self._held[client].set()
            return
        try:
            check_asked(header)
        except ConfigError:
            if header["id"] // RANGE == client and header["op"] not in ("cancel", "window", "unwatch"):
                self._clients[client]({"id": header["id"], "errno": errno.EINVAL}, b"")
            return
        op = header["op"]
        if header["id"] // RANGE != client:
            raise ValueError(f"id={header['id']} is not in the range of this connection, from {first_id}")
        if op == "window" and self._interested.get(header["job"], [client])[-1] != client:
            return  # another follows it
        if op == "watch":
            self._watches[header["id"]] = client
        elif op in ("start", "connect"):
            self._interested.setdefault(header["job" if op == "connect" else "id"], []).append(client)
        self._sandbox.pass_on(header, body)

    # Moving to another node

    async def hold(self, node: str, wait_s: float) -> None:
        """Clients keep what they would send from now on; when this returns, all they have sent is here."""
        give_up = asyncio.get_running_loop().time() + wait_s
        while self._away:  # what they missed is here
            if asyncio.get_running_loop().time() > give_up:
                raise SandboxError("clients have not followed it here yet; it goes on here")
            await asyncio.sleep(_LOOK_S)
        self._held = {client: asyncio.Event() for client in self._clients}
        for send in self._clients.values():
            send({"moving": node}, b"")
        waits = [asyncio.create_task(event.wait()) for event in self._held.values()]
        if waits:
            _, late = await asyncio.wait(waits, timeout=wait_s)
            for wait in late:
                wait.cancel()
            if late:
                raise SandboxError(
                    f"{len(late)} of its clients do not answer within {wait_s} s; it goes on where it is"
                )

    def release(self, node: str | None) -> None:
        """Clients go on: here, or at the node where the sandbox is now."""
        self._held = {}
        self._has_moved = node is not None
        for send in self._clients.values():
            send({"moved": node}, b"")

    # Answers

    def _tell(self, header: dict, body: bytes) -> None:
        if "moving" in header or "moved" in header:
            return  # these words are the hub's own
        for client in self._concerned(header):
            if client in self._clients:
                self._clients[client](header, body)
            elif client in self._away:
                away = self._away[client]
                away.missed.append((header, body))
                away.bytes += len(body) + _HEADER_BYTES
                if away.bytes > _MOST_MISSED:
                    self.detach(client * RANGE)

    def _concerned(self, header: dict) -> list[int]:
        if "paused" in header:
            return list(self._clients)
        if "id" in header:
            if "errno" in header:
                self._interested.pop(header["id"], None)
                self._watches.pop(header["id"], None)
            return [header["id"] // RANGE]
        if "watch" in header:
            return [self._watches.get(header["watch"], 0)]
        if "stream" in header:
            return self._interested.get(header["job"], [0])[-1:]
        return list(dict.fromkeys(self._interested.pop(header["job"], [])))

"""Several clients of one sandbox at once, each with a range of request ids of its own.

Frames pass through as they are. An answer goes to whoever's range its id is in; the output of a command goes to who
connected to it last, its end to all who have started or connected to it.
"""

from collections.abc import Callable

from venusrl.sandbox.client import RANGE, ProcessSandbox

Send = Callable[[dict, bytes], None]


class Hub:
    """Clients of one sandbox."""

    def __init__(self, sandbox: ProcessSandbox):
        self._sandbox = sandbox
        self._clients: dict[int, Send] = {}
        self._interested: dict[int, list[int]] = {}  # clients of a command by its number; the last one follows it
        self._watches: dict[int, int] = {}
        sandbox.foreign = self._tell

    def attach(self, send: Send) -> int:
        """A new client; the first id of its range."""
        client = self._sandbox.ranges
        self._sandbox.ranges += 1
        self._clients[client] = send
        return client * RANGE

    def detach(self, first_id: int) -> None:
        """The client is gone. What it has started goes on, and is not held up by what it no longer takes."""
        client = first_id // RANGE
        del self._clients[client]
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

    def ask(self, first_id: int, header: dict, body: bytes) -> None:
        """A request of a client. SandboxLost where the sandbox is; ValueError for an id of another's."""
        client, op = first_id // RANGE, header["op"]
        if header["id"] // RANGE != client:
            raise ValueError(f"id={header['id']} is not in the range of this connection, from {first_id}")
        if op == "window" and self._interested.get(header["job"], [client])[-1] != client:
            return  # another follows it
        if op == "watch":
            self._watches[header["id"]] = client
        elif op in ("start", "connect"):
            self._interested.setdefault(header["job" if op == "connect" else "id"], []).append(client)
        self._sandbox.pass_on(header, body)

    def _tell(self, header: dict, body: bytes) -> None:
        for client in self._concerned(header):
            send = self._clients.get(client)
            if send is not None:
                send(header, body)

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

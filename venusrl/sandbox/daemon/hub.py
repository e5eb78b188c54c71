"""Several clients of one sandbox at once, each with a range of request ids of its own.

Frames pass through as they are. An answer goes to whoever's range its id is in; what is told of a command goes to who
started it, or connected to it last.
"""

from collections.abc import Callable

from venusrl.sandbox.client import RANGE, ProcessSandbox

Send = Callable[[dict, bytes], None]


class Hub:
    """Clients of one sandbox."""

    def __init__(self, sandbox: ProcessSandbox):
        self._sandbox = sandbox
        self._clients: dict[int, Send] = {}
        self._followers: dict[int, int] = {}  # client of a command, or of a watch, by its number
        self._last = 0
        sandbox.foreign = self._tell

    def attach(self, send: Send) -> int:
        """A new client; the first id of its range."""
        self._last += 1
        self._clients[self._last] = send
        return self._last * RANGE

    def detach(self, first_id: int) -> None:
        """The client is gone. What it has started goes on, and is not held up by what it no longer takes."""
        client = first_id // RANGE
        del self._clients[client]
        for number in [number for number, follower in self._followers.items() if follower == client]:
            del self._followers[number]
            if self._sandbox.lost is None:
                self._sandbox.pass_on({"op": "window", "job": number, "bytes": None, "id": 0})

    def ask(self, first_id: int, header: dict, body: bytes) -> None:
        """A request of a client. SandboxLost where the sandbox is."""
        client, op = first_id // RANGE, header["op"]
        if header["id"] // RANGE != client:
            raise ValueError(f"id={header['id']} is not in the range of this connection, from {first_id}")
        if op in ("start", "watch"):
            self._followers[header["id"]] = client
        elif op == "connect":
            self._followers[header["job"]] = client
        self._sandbox.pass_on(header, body)

    def _tell(self, header: dict, body: bytes) -> None:
        if "id" in header:
            client = header["id"] // RANGE
        else:
            number = header.get("job", header.get("watch"))
            client = self._followers.get(number, 0)
            if "exit_code" in header:
                self._followers.pop(number, None)
        send = self._clients.get(client)
        if send is not None:
            send(header, body)

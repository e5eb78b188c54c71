"""HTTP over sockets of ours: bound before anybody is told the address, and without signal handlers."""

import array
import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import struct
import termios
from collections.abc import Callable

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from venusrl.core import door
from venusrl.core.errors import ConfigError
from venusrl.core.signals import on_stop

KEEP_ALIVE_S = 15  # seconds for which an idle connection is kept; clients have to let go of theirs clearly sooner
_MESSAGE_BYTES = 1 << 30
HEAD_S = 10.0  # seconds in which the head of a request has to come, from its first byte or from the connection on
_LOOKS = 8  # at a caller that has bytes to take, in door.SEND_S
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: the connection is reset, and the kernel keeps nothing of it


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """(the socket, its address); whoever knows the address can connect at once.

    Raises:
      ConfigError: it cannot be bound.
    """
    try:
        listener = _bound(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the host's name is too long
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host={host} --port={port}: {said}; give another, 0 for a free one") from error
    name = f"[{host}]" if ":" in host else host or "0.0.0.0"
    return listener, f"http://{name}:{listener.getsockname()[1]}"


def _bound(host: str, port: int) -> socket.socket:
    """Listens at the first address of `host`, IPv4 before IPv6; "" is every IPv4 address of this machine.

    Raises:
      OSError, UnicodeError: see `listen`.
    """
    found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _keep_alive(listener)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _keep_alive(listener: socket.socket) -> None:
    """Idle connections end within a minute when the other machine is gone without a word."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items():  # s, s, probes
        if hasattr(socket, name):  # what a connection has, it has from its listener
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def listen_at(path: str) -> tuple[socket.socket, str]:
    """(the socket, its address): a socket file that only this user can connect to.

    Raises:
      ConfigError: it cannot be bound, or another process answers there.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        if _answers(path):
            raise ConfigError(f"--socket={path}: another process answers there; stop it, or give another path")
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(f"--socket={path}: there is a file that is no socket; give another path")
            os.unlink(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"--socket={path}: {error.strerror or error}; give a path in a folder that exists") from error
    except ConfigError:
        listener.close()
        raise
    return listener, f"unix:{path}"


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


class _Outgoing:
    """A connection's transport, for callers that stop reading: what was written for them is not kept for ever.

    It is reset once the caller has taken nothing for door.SEND_S seconds, also where the answer is complete, and where
    only its end is waited for; and where an answer breaks off while the caller is behind, as the door breaks it off.

    Args:
      behind: whether the answer is not complete, and waits for its caller.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, behind: Callable[[], bool]):
        self.plain = transport
        self._loop, self._behind = loop, behind
        self._written = self._taken = 0  # bytes since the connection was made
        self._taken_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str):
        return getattr(self.plain, name)

    def write(self, data: bytes) -> None:
        self.plain.write(data)
        self._written += len(data)
        if self._timer is None and self.plain.get_write_buffer_size():
            self._taken, self._taken_at = self._now_taken(), self._loop.time()
            self._look_later()

    def close(self) -> None:
        if self._behind():
            self.reset()
        else:
            self.plain.close()

    def reset(self) -> None:
        """Ends the connection now; what was not taken is dropped here and in the kernel."""
        self.stop()
        if not self.plain.is_closing() or self.plain.get_write_buffer_size():  # its socket is open
            self.plain.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.plain.abort()

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _now_taken(self) -> int:
        """Bytes; what waits in the kernel, megabytes of it, is not taken either."""
        waiting = array.array("i", [0])
        with contextlib.suppress(OSError):  # a kernel that does not say: what it has counts as taken
            fcntl.ioctl(self.plain.get_extra_info("socket").fileno(), termios.TIOCOUTQ, waiting)
        return self._written - self.plain.get_write_buffer_size() - waiting[0]

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(door.SEND_S / _LOOKS, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self.plain.get_write_buffer_size():
            return
        if self._now_taken() > self._taken:
            self._taken, self._taken_at = self._now_taken(), self._loop.time()
        if self._loop.time() - self._taken_at > door.SEND_S:  # after the door, which ends the answer itself
            self.reset()
        else:
            self._look_later()


class _Protocol(H11Protocol):
    """HTTP/1.1, whose callers have `HEAD_S` for the head of a request, and door.SEND_S to take a part of an answer."""

    _head: asyncio.TimerHandle | None = None
    _upgraded = False

    def connection_made(self, transport) -> None:
        self._outgoing = _Outgoing(transport, self.loop, self._behind)
        super().connection_made(self._outgoing)
        self._watch()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # the caller goes on after an answer that ended the connection
            self.transport.close()
            return
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # a part of the next head came before this answer ended
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._outgoing.stop()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event) -> None:
        self._outgoing.stop()
        self.transport = self._outgoing.plain  # its owner from now on closes it as it likes
        super().handle_websocket_upgrade(event)
        self._upgraded = True
        self._unwatch()

    def _behind(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and self.flow.write_paused

    def _watch(self) -> None:
        if self._upgraded or (self.cycle is not None and not self.cycle.response_complete):
            self._unwatch()
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._late)

    def _unwatch(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _late(self) -> None:
        self._head = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server:
    """Answers with an application until `stop`. `grace_s`: seconds for answers that are under way then."""

    def __init__(self, application: ASGIApp, listener: socket.socket, grace_s: int = 5):
        options = uvicorn.Config(
            application,
            http=_Protocol,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=grace_s,
            timeout_keep_alive=KEEP_ALIVE_S,
            ws_max_size=_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=None,  # a client may be busy for minutes; one that is gone has closed its connection
        )
        self._server, self._listener = uvicorn.Server(options), listener

    async def run(self) -> None:
        await self._server._serve([self._listener])  # `serve` would take the signals for itself

    def stop(self) -> None:
        self._server.should_exit = True


async def answer(application: ASGIApp, listener: socket.socket) -> None:
    """Until SIGTERM, SIGINT or SIGHUP; see `on_stop`."""
    server = Server(application, listener)
    on_stop(server.stop)
    await server.run()

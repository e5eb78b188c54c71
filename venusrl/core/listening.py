"""HTTP over sockets of ours: bound before anybody is told the address, and without signal handlers."""

import asyncio
import os
import socket
import stat

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from venusrl.core.errors import ConfigError
from venusrl.core.signals import on_stop

KEEP_ALIVE_S = 15  # seconds for which an idle connection is kept; clients have to let go of theirs clearly sooner
_MESSAGE_BYTES = 1 << 30
HEAD_S = 10.0  # seconds in which the head of a request has to come, from its first byte or from the connection on


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """(the socket, its address); whoever knows the address can connect at once.

    Raises:
      ConfigError: it cannot be bound.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _keep_alive(listener)
    try:
        listener.bind((host, port))
        listener.listen()
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the host's name is too long
        listener.close()
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host={host} --port={port}: {said}; give another, 0 for a free one") from error
    return listener, f"http://{host}:{listener.getsockname()[1]}"


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


class _Protocol(H11Protocol):
    """HTTP/1.1, whose callers have `HEAD_S` for the head of a request."""

    _head: asyncio.TimerHandle | None = None
    _upgraded = False

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event) -> None:
        super().handle_websocket_upgrade(event)
        self._upgraded = True
        self._unwatch()

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

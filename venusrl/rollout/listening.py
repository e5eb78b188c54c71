"""HTTP over sockets of ours: bound before anybody is told the address, and without signal handlers."""

import asyncio
import signal
import socket

import uvicorn
from starlette.applications import Starlette

from venusrl.core.errors import ConfigError


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """(the socket, its address); whoever knows the address can connect at once.

    Raises:
      ConfigError: it cannot be bound.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host={host} --port={port}: {error.strerror}; give another, 0 for a free one") from error
    return listener, f"http://{host}:{listener.getsockname()[1]}"


class Server:
    """Answers with an application until `stop`. `grace_s`: seconds for answers that are under way then."""

    def __init__(self, application: Starlette, listener: socket.socket, grace_s: int = 5):
        options = uvicorn.Config(application, log_level="warning", lifespan="off", timeout_graceful_shutdown=grace_s)
        self._server, self._listener = uvicorn.Server(options), listener

    async def run(self) -> None:
        await self._server._serve([self._listener])  # `serve` would take the signals for itself

    def stop(self) -> None:
        self._server.should_exit = True


async def answer(application: Starlette, listener: socket.socket) -> None:
    """Until SIGTERM or SIGINT."""
    server = Server(application, listener)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    await server.run()

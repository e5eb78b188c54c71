"""A program that answers HTTP until it is told to stop."""

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


async def answer(application: Starlette, listener: socket.socket) -> None:
    """Until SIGTERM or SIGINT."""
    options = uvicorn.Config(application, log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
    server = uvicorn.Server(options)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
    await server._serve([listener])  # `serve` would take the signals for itself

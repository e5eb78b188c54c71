"""A proxy that the environment names, and that notes who comes to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

NAMES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


@contextlib.asynccontextmanager
async def environment_proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[bytes]]:
    """Gives the first lines that arrive there."""
    seen: list[bytes] = []

    async def refuse(reader, writer):
        seen.append(await reader.readline())
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    for name in NAMES:
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with server:
        yield seen

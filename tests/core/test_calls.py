"""Calls between the project's own services."""

import asyncio
import re
import ssl
from pathlib import Path

import pytest

from venusrl.core.calls import DIRECT, client

from ..proxies import environment_proxy

ROOT = Path(__file__).resolve().parents[2]


async def _answer(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nme")
    writer.close()


async def test_calls_go_to_the_service_and_not_to_a_proxy_of_the_environment(monkeypatch):
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, environment_proxy(monkeypatch) as seen, client(address) as http:
        assert (await http.get("/")).text == "me"
        assert (await asyncio.to_thread(lambda: DIRECT.open(address).read())) == b"me"
    assert seen == []


def test_certificates_of_the_environment_are_used(monkeypatch, tmp_path):
    """As before: a worker behind TLS may have one of its owner's own authority."""
    (tmp_path / "ca.pem").write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    client("http://localhost:1")  # reads none
    with pytest.raises(ssl.SSLError):
        client("https://localhost:1")


def test_no_client_is_made_in_another_way():
    """So that one that is added is of this kind too."""
    ways = re.compile(
        r"httpx\.(Async)?Client\(|httpx\.(get|post|stream|request)\(|urlopen\(|websockets\.connect\((?!url, proxy=None)"
    )
    for folder in ("venusrl", "launchers", "envs"):
        for path in (ROOT / folder).rglob("*.py"):
            found = ways.findall(path.read_text())
            assert not found or path == ROOT / "venusrl/core/calls.py", path

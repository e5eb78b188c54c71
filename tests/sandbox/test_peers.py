"""Nodes that know each other: no key is sent, nothing that was seen opens anything, and nobody else is called."""

import asyncio
import json
import socket
import threading

import httpx
import pytest
import websockets

from tests.sandbox.conftest import end, needs_criu, start_daemon
from tests.sandbox.test_migration import KEY, key_file, two
from venusrl.core.calls import client
from venusrl.core.errors import ConfigError, SandboxError, SandboxUnsupported
from venusrl.sandbox import Template
from venusrl.sandbox.daemon.client import Node
from venusrl.sandbox.daemon.peers import HEADER, Caller, Gatekeeper, parse_peers


class Listener(threading.Thread):
    """Keeps all that is sent to a port, and answers with what is given."""

    def __init__(self, answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"):
        super().__init__(daemon=True)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        self.answer, self.seen = answer, b""
        self.start()

    def run(self):
        while True:
            connection, _ = self.server.accept()
            with connection:
                connection.settimeout(1.0)
                try:
                    self.seen += connection.recv(1 << 16)
                    connection.sendall(self.answer)
                except OSError:
                    continue


async def test_an_address_of_a_request_is_never_called(daemon_address):
    stranger = Listener()
    async with Node(daemon_address) as node:
        sandbox = await node.create(Template("stays"))
        for address in (stranger.address, f"{stranger.address}/", "http://169.254.169.254", "unix:/run/x", "file:///x"):
            with pytest.raises(ConfigError, match="is no peer of this node"):
                await sandbox.migrate(address)
        assert (await sandbox.exec("echo on")).text == "on\n"
    assert stranger.seen == b""


@needs_criu
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 500 no\r\ncontent-length: 14\r\n\r\nsecret of them",
        b"HTTP/1.1 302 go\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n",
        b'HTTP/1.1 200 OK\r\ncontent-length: 52\r\n\r\n{"nonce":"' + b"a" * 32 + b'","proof":"b"}',
        b"\0" * 100,
    ],
)
async def test_a_peer_that_has_not_the_key_is_told_nothing(answer):
    stranger = Listener(answer)
    async with two(peers=f",stranger={stranger.address}") as (a, _):
        sandbox = await a.create(Template("stays"))
        with pytest.raises(SandboxError) as error:
            await sandbox.migrate("stranger")
        assert (await sandbox.exec("echo on")).text == "on\n"
    assert KEY.encode() not in stranger.seen and b"secret" not in str(error.value).encode()
    assert stranger.seen.startswith(b"GET /challenge?nonce=") and HEADER.encode() not in stranger.seen.lower()


def _begun(gatekeeper: Gatekeeper, key: str = KEY) -> Caller:
    caller = Caller(key)
    theirs = "1" * 32
    caller._session = caller._checked(theirs, httpx.Response(200, json=gatekeeper.challenge(theirs)))
    return caller


def test_a_proof_opens_one_call_alone():
    now = [0.0]
    gatekeeper = Gatekeeper(KEY, lambda: now[0])
    caller = _begun(gatekeeper)

    def admits(method, path, proof):
        return gatekeeper.admits(method, path, {HEADER: proof})

    proof = caller.proof("POST", "/arrivals/sb-1")
    for method, path in (("DELETE", "/arrivals/sb-1"), ("POST", "/arrivals/sb-2"), ("POST", "/arrivals/sb-1?x=1")):
        assert not admits(method, path, proof)
    assert admits("POST", "/arrivals/sb-1", proof) and not admits("POST", "/arrivals/sb-1", proof)
    assert not admits("POST", "/sandboxes", caller.proof("POST", "/sandboxes"))  # what is for clients
    assert admits("GET", "/health", caller.proof("GET", "/health"))
    name, number, mac = caller.proof("GET", "/health").split(":")
    for wrong in (
        "",
        "x",
        f"{name}:{int(number) + 1}:{mac}",
        f"{'0' * 32}:{number}:{mac}",
        f"{name}:{number}:{'0' * 64}",
    ):
        assert not admits("GET", "/health", wrong)
    now[0] = 601.0
    assert not admits("GET", "/health", caller.proof("GET", "/health"))
    with pytest.raises(SandboxUnsupported, match="nothing was sent"):
        _begun(Gatekeeper("another key of sixteen"))
    with pytest.raises(SandboxUnsupported):
        Gatekeeper("").challenge("1" * 32)
    for bad in ("", "1" * 31, "G" * 32, "1" * 64):
        with pytest.raises(ConfigError):
            gatekeeper.challenge(bad)
    for _ in range(3000):
        gatekeeper.challenge("1" * 32)
    assert len(gatekeeper._sessions) <= 1000


async def test_a_node_that_has_begun_anew_is_asked_anew():
    async with two() as (a, _), client(a.address, auth=Caller(KEY)) as http:
        assert (await http.get("/health")).status_code == 200
        http.auth._session = ("f" * 32, b"forgotten there")
        assert (await http.delete("/arrivals/sb-1")).status_code == 204


@pytest.mark.parametrize(
    "entry", ["", "a", "a=", "=http://h", "a=ftp://h", "a=http://u@h", "a b=http://h", "a=http://h/p"]
)
def test_what_is_no_peer_is_refused(entry):
    with pytest.raises(ConfigError, match="--peers"):
        parse_peers([entry])
    with pytest.raises(ConfigError, match="--peers"):
        parse_peers(["a=http://h:1", "a=http://h:2"])
    assert parse_peers(["a=http://h:1", "b=unix:/x"]) == {"a": "http://h:1", "b": "unix:/x"}


# Web pages, and whoever has not the key of clients


@pytest.fixture(scope="module")
def locked():
    """A daemon whose clients need a key."""
    with key_file() as path:
        daemon, address = start_daemon("--max_sandboxes=4", f"--key_file={path}")
        yield address
        assert end(daemon) == 0


def test_web_pages_cannot_drive_a_node(daemon_address):
    made = {"template": {"name": "page"}}
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": daemon_address.replace("127.0.0.1", "localhost")},
        {"sec-fetch-site": "cross-site"},
        {"host": "evil.example"},
    ):
        for method, path in (("POST", "/sandboxes"), ("GET", "/sandboxes"), ("GET", "/health")):
            answer = httpx.request(method, f"{daemon_address}{path}", json=made, headers=headers)
            assert answer.status_code in (403, 421), (headers, answer.text)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = httpx.post(f"{daemon_address}/sandboxes", content=json.dumps(made), headers={"content-type": kind})
        assert answer.status_code == 400 and "content-type" in answer.json()["message"]


async def test_web_sockets_of_pages_are_refused(daemon_address):
    async with Node(daemon_address) as node:
        sandbox = await node.create(Template("x"))
        url = f"ws{daemon_address.removeprefix('http')}/sandboxes/{sandbox.id}/agent"
        for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}):
            with pytest.raises(websockets.InvalidStatus):
                await websockets.connect(url, additional_headers=headers)
        assert (await sandbox.exec("echo on")).text == "on\n"


async def test_clients_show_the_key(locked):
    for headers in ({}, {"authorization": "Bearer no"}, {"authorization": KEY}, {"x-venusrl-key": KEY}):
        for path in ("/health", "/sandboxes", "/snapshots", "/arrivals/sb-1"):
            assert httpx.get(f"{locked}{path}", headers=headers).status_code == 401
    with pytest.raises(SandboxError, match="wants its key"):
        await Node(locked).health()
    with pytest.raises(SandboxError):
        await Node(locked).connect("sb-1", Template("x"))
    async with Node(locked, key=KEY) as node:
        sandbox = await node.create(Template("x"))
        assert (await sandbox.exec("echo on")).text == "on\n"
        await sandbox.kill()


async def test_a_key_is_made_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    daemon, address = await asyncio.to_thread(start_daemon, "--nono_key")
    said = daemon.stdout.readline().split()[-1]
    try:
        assert said.startswith(str(tmp_path)) and httpx.get(f"{address}/health").status_code == 401
        with open(said) as f:
            async with Node(address, key=f.read().strip()) as node:
                assert await node.list() == []
    finally:
        assert end(daemon) == 0

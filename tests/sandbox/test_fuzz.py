"""Anything at every door of a node, between good calls of a neighbour, all of which succeed; nothing is left over.

FUZZ=100000 python -m pytest -m slow tests/sandbox/test_fuzz.py
"""

import asyncio
import json
import os
import random
import secrets

import pytest
import websockets

from tests.sandbox.conftest import end, processes, start_daemon
from tests.sandbox.test_life import until
from venusrl.core.errors import SandboxError
from venusrl.sandbox import Template
from venusrl.sandbox.daemon.client import Node
from venusrl.sandbox.daemon.peers import HEADER
from venusrl.sandbox.wire import LENGTHS, pack, unpack

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "X" * 50)
PATHS = (
    "/",
    "/health",
    "/challenge",
    "/sandboxes",
    "/sandboxes/ID",
    "/sandboxes/ID/exec",
    "/sandboxes/ID/files",
    "/sandboxes/ID/list",
    "/sandboxes/ID/resize",
    "/sandboxes/ID/migrate",
    "/sandboxes/ID/fork",
    "/sandboxes/ID/agent",
    "/sandboxes/sb-none/exec",
    "/snapshots",
    "/snapshots/0000000000000000",
    "/snapshots/..%2f..%2fetc",
    "/arrivals/sb-1",
    "/arrivals/ID/commit",
    "/templates/" + "a" * 64,
    "/templates/x",
    "//",
    "/%00",
    "/" + "a" * 3000,
)
VALUES = (
    None,
    True,
    0,
    -1,
    2**63,
    2**64,
    10**300,
    1e308,
    "",
    "x",
    "\0",
    "\ud800",
    "x" * 3000,
    [],
    {},
    [[]],
    {"a": {}},
    "true",
    "echo x",
    {"name": "fuzz"},
    {"name": "fuzz", "pids": 1},
    {"name": "fuzz", "memory_bytes": 2**64},
)
FIELDS = (
    "template",
    "snapshot",
    "lease_s",
    "script",
    "timeout_s",
    "silent_s",
    "user",
    "cwd",
    "user_env",
    "stdin",
    "node",
    "memory_bytes",
    "colour",
)
OPS = (
    "exec",
    "start",
    "processes",
    "connect",
    "window",
    "cancel",
    "input",
    "signal",
    "resize",
    "read",
    "write",
    "stat",
    "list",
    "watch",
    "unwatch",
    "pause",
    "resume",
    "park",
    "unpark",
    "held",
    "",
    "x",
)
FRAME_FIELDS = (
    "job",
    "window",
    "bytes",
    "number",
    "rows",
    "columns",
    "path",
    "offset",
    "max_bytes",
    "mode",
    "watch",
    "timeout_s",
    "silent_s",
    "env",
    "script_bytes",
    "cwd",
    "stdin",
    "pty",
    "merged",
    "stays",
    "new",
)


def request(rng: random.Random, sandbox: str) -> bytes:
    """Of HTTP, as bytes: mostly well formed, and wrong within."""
    body = b""
    if rng.random() < 0.7:
        fields = {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randrange(4))}
        body = json.dumps(fields).encode()
        if rng.random() < 0.2:
            body = body[: rng.randrange(len(body) + 1)] + rng.choice([b"", b"\xff", b"[" * 2000])
    path = rng.choice(PATHS).replace("ID", sandbox)
    if rng.random() < 0.4:
        path += "?" + rng.choice(
            ["path=x", "path=", "path=%00", "reason=x", "nonce=" + "a" * 32, "mode=999", "first_id=x"]
        )
    head = [f"{rng.choice(METHODS)} {path} HTTP/1.1", "host: " + rng.choice(["127.0.0.1", "localhost", "evil.example"])]
    head.append("content-type: " + rng.choice(["application/json", "text/plain", "x", "application/octet-stream"]))
    head.append(f"content-length: {rng.choice([len(body), len(body), len(body), len(body), 0, -1, 10**12, 'x'])}")
    more = [
        "origin: http://evil.example",
        f"{HEADER}: {'a' * 32}:1:{'b' * 64}",
        "authorization: Bearer x",
        "x: " + "y" * 900,
    ]
    more += ["transfer-encoding: chunked", "upgrade: websocket\r\nconnection: upgrade", "expect: 100-continue", "\0: x"]
    head += [rng.choice(more)] * (rng.random() < 0.5)
    data = "\r\n".join([*head, "", ""]).encode("utf-8", "surrogatepass") + body
    if rng.random() < 0.15:
        at = rng.randrange(len(data))
        data = data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(8))) + data[at + 1 :]
    return data


def frame(rng: random.Random, first_id: int) -> bytes:
    """Of a web socket to an agent."""
    header = {
        "op": rng.choice(OPS),
        "id": rng.choice([first_id + rng.randrange(1 << 20), first_id, 0, -1, 2**70, "x", None]),
    }
    for _ in range(rng.randrange(8)):
        header[rng.choice(FRAME_FIELDS)] = rng.choice(VALUES)
    if header["op"] in ("exec", "start") and rng.random() < 0.5:
        header |= {"timeout_s": 1.0, "silent_s": None, "env": {}, "script_bytes": 4, "cwd": None, "stdin": "bytes"}
        header |= {"pty": rng.choice([None, [2, 3]]), "merged": True, "window": rng.choice([None, 0, 1 << 20])}
    data = pack(header, rng.choice([b"", b"true", b"x" * 100]))
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if rng.random() < 0.02:
        data = rng.choice([b"", b"\0" * 8, LENGTHS.pack(1 << 31, 0), LENGTHS.pack(4, 0) + b"[[[["])
    return data


async def requests(address: str, sandbox: str, rng: random.Random, count: int) -> int:
    """Sends so many, some of one connection; how many were answered."""
    host, port = address.removeprefix("http://").split(":")
    answered = 0
    while count > 0:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            for _ in range(min(count, rng.randrange(1, 20))):
                count -= 1
                writer.write(request(rng, sandbox))
                await writer.drain()
                answer = await asyncio.wait_for(reader.read(1 << 16), 0.3)
                answered += answer.startswith(b"HTTP/1.1")
                if not answer or b"connection: close" in answer.lower():
                    break
        except (ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()
    return answered


async def frames(address: str, sandbox: str, rng: random.Random, count: int) -> None:
    url = f"ws{address.removeprefix('http')}/sandboxes/{sandbox}/agent"
    while count > 0:
        try:
            async with websockets.connect(url, compression=None, max_size=None) as connection:
                first_id = unpack(await connection.recv())[0]["first_id"]
                for _ in range(min(count, rng.randrange(1, 200))):
                    count -= 1
                    await connection.send(frame(rng, first_id))
        except (websockets.WebSocketException, OSError):
            count -= 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1200, pytest.param(int(os.environ.get("FUZZ", "10000")), marks=pytest.mark.slow)])
async def test_a_node_survives_whatever_it_is_sent(count):
    rng = random.Random(count)
    daemon, address = await asyncio.to_thread(start_daemon, "--max_sandboxes=40", "--wait_s=1")
    marker = f"fuzzed-{secrets.token_hex(4)}"
    async with Node(address, lease_s=5.0) as node:
        neighbour, victim = [await node.create(Template(name)) for name in ("neighbour", "victim")]
        await neighbour.start(f"exec -a {marker} sleep 1000", follow=False)
        descriptors = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        answered = 0
        for _ in range(max(1, count // 1200)):
            work = [requests(address, victim.id, rng, 300), requests(address, victim.id, rng, 300)]
            work += [frames(address, victim.id, rng, 600)]
            running = asyncio.gather(*work)
            while not running.done():
                assert (await neighbour.exec("echo well")).text == "well\n"
                assert neighbour.id in [row["id"] for row in await node.list()]
                await asyncio.sleep(0.01)
            answered += sum((await running)[:2])
            if victim.lost:
                victim = await node.create(Template("victim"))
            for row in await node.list():
                if row["id"] not in (neighbour.id, victim.id):
                    await node.end(row["id"], "killed")
        assert answered > count // 6 and daemon.poll() is None and neighbour.lost is None
        for saved in await node.snapshots():
            await node.delete_snapshot(saved["id"])
        assert len(processes(marker)) == 1
        try:
            await asyncio.wait_for(victim.resume(), 5)  # one of them has paused it, perhaps
            assert (await asyncio.wait_for(victim.exec("echo well"), 20)).text == "well\n"
        except (SandboxError, TimeoutError):
            pytest.fail("the victim does not answer any more")
        await until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= descriptors + 8)
    assert end(daemon) == 0
    await until(lambda: not processes(marker))

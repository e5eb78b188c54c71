"""Which calls hold and renew a lease, what a client may leave untaken, and creations that never end."""

import asyncio
import base64
import os
import signal
import time

import httpx
import pytest
import websockets

from tests.sandbox.conftest import end, in_process, start_daemon
from venusrl.core.errors import SandboxLost
from venusrl.sandbox import Template
from venusrl.sandbox.daemon import outbox
from venusrl.sandbox.daemon.client import Node
from venusrl.sandbox.daemon.outbox import Outbox
from venusrl.sandbox.wire import pack, unpack


async def made(http: httpx.AsyncClient, lease_s: float) -> str:
    answer = await http.post("/sandboxes", json={"template": {"name": "leased"}, "lease_s": lease_s})
    return f"/sandboxes/{answer.json()['id']}"


async def test_a_call_holds_the_lease_while_it_runs(daemon_address):
    async with httpx.AsyncClient(base_url=daemon_address, timeout=30) as http:
        path = await made(http, 0.3)
        ran = await http.post(f"{path}/exec", json={"script": "sleep 0.9; echo ran"})
        assert base64.b64decode(ran.json()["output"]) == b"ran\n"
        assert (await http.get(f"{path}/list", params={"path": "."})).status_code == 200
        await asyncio.sleep(0.6)
        assert (await http.get(f"{path}/list", params={"path": "."})).json()["reason"] == "lease"


@pytest.mark.parametrize("call", ["exec", "write", "read", "list", "resize", "failing"])
async def test_every_call_that_names_it_renews_the_lease(daemon_address, call):
    async with httpx.AsyncClient(base_url=daemon_address, timeout=30) as http:
        path = await made(http, 0.4)
        await http.put(f"{path}/files", params={"path": "f"}, content=b"x")
        for _ in range(3):
            await asyncio.sleep(0.2)
            if call == "exec":
                answer = await http.post(f"{path}/exec", json={"script": "true"})
            elif call == "write":
                answer = await http.put(f"{path}/files", params={"path": "f", "mode": "600"}, content=b"x")
            elif call == "read":
                answer = await http.get(f"{path}/files", params={"path": "f"})
            elif call == "list":
                answer = await http.get(f"{path}/list", params={"path": "."})
            elif call == "resize":
                answer = await http.post(f"{path}/resize", json={"memory_bytes": 512 << 20})
            else:
                answer = await http.get(f"{path}/files", params={"path": "none"})
            assert answer.status_code in (200, 204, 422, 500)
        await http.get("/sandboxes")  # which does not
        await asyncio.sleep(0.6)
        assert (await http.get(f"{path}/list", params={"path": "."})).status_code == 410


async def test_a_caller_that_hangs_up_ends_its_command(daemon_address):
    async with httpx.AsyncClient(base_url=daemon_address, timeout=30) as http:
        path = await made(http, 30.0)
        with pytest.raises(httpx.ReadTimeout):
            await http.post(f"{path}/exec", json={"script": "echo $$ > pid; sleep 30"}, timeout=0.5)
        for _ in range(100):
            ran = await http.post(f"{path}/exec", json={"script": "kill -0 $(cat pid) && echo there"})
            if base64.b64decode(ran.json()["output"]) != b"there\n":
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("it goes on for nobody")
        await http.delete(path)


# What nobody takes


async def test_an_outbox_keeps_no_more_than_it_may(monkeypatch):
    monkeypatch.setattr(outbox, "WATCH_BYTES", 20_000)
    monkeypatch.setattr(outbox, "MOST_BYTES", 100_000)
    box = Outbox()
    for number in range(500):
        box.put({"watch": 7, "events": [["write", f"f{number}"]]})
    box.put({"id": 1}, b"after")
    taken = [unpack(await box.take()) for _ in range(len(box._frames))]
    assert taken[-1][1] == b"after" and taken[-2][0]["events"] == [["lost", ""]] and len(taken) < 60
    box.put({"watch": 7, "events": [["write", "again"]]})
    assert unpack(await box.take())[0]["events"] == [["write", "again"]]
    for _ in range(30):
        box.put({"id": 1}, bytes(5000))
    assert box.is_over and await box.take() is None


@pytest.mark.slow
async def test_a_client_that_never_reads_does_not_fill_the_node():
    daemon, address = await asyncio.to_thread(start_daemon, "--max_sandboxes=3", before=_SMALL)
    memory = f"/proc/{daemon.pid}/statm"

    def resident() -> int:
        with open(memory) as f:
            return int(f.read().split()[1]) * 4096

    async with Node(address) as node:
        sandbox, neighbour = [await node.create(Template("x")) for _ in range(2)]
        await sandbox.write("large", bytes(4 << 20))
        before = resident()
        url = f"ws{address.removeprefix('http')}/sandboxes/{sandbox.id}/agent"
        async with websockets.connect(url, compression=None, max_queue=1) as socket:
            first_id = unpack(await socket.recv())[0]["first_id"]
            socket.transport.pause_reading()
            for number in range(60):
                ask = {"op": "read", "id": first_id + number + 1, "path": "large", "offset": 0, "max_bytes": 1 << 24}
                await socket.send(pack(ask))
            began = time.monotonic()
            while time.monotonic() < began + 1.0:
                assert (await neighbour.exec("echo well")).text == "well\n"
                assert resident() < before + (120 << 20)
        assert (await sandbox.exec("echo on")).text == "on\n"
    assert end(daemon) == 0


_SMALL = "from venusrl.sandbox.daemon import outbox\noutbox.MOST_BYTES = 16 << 20"


# Creations


@in_process
async def test_a_creation_that_never_ends_does_at_its_deadline(pool):
    await pool.open()
    os.kill(pool.spawner_pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        waiting = asyncio.create_task(pool.create(Template("never", start_s=0.5, ttl_s=1000.0)))
        await asyncio.sleep(1.0)
    finally:
        os.kill(pool.spawner_pid, signal.SIGCONT)
    with pytest.raises(SandboxLost) as error:
        await waiting
    assert error.value.reason == "start" and time.monotonic() - began < 5.0
    assert (await (await pool.create(Template("next"))).exec("echo on")).text == "on\n" and pool.alive == 1


_NEVER_READY = """
from venusrl.sandbox.client import ProcessSandbox
hear = ProcessSandbox._hear
ProcessSandbox._hear = lambda self, header, body: None if self.template.name == 'mute' else hear(self, header, body)
"""
_DIES = """
import os, signal
from venusrl.sandbox.making import Making
begin = Making._begin
async def dying(self, sandbox_id, template, agent, restored):
    if template.name == 'dies':
        os.kill(self.spawner_pid, signal.SIGKILL)
        while not self._link.closed.is_set():
            import asyncio
            await asyncio.sleep(0.01)
    return await begin(self, sandbox_id, template, agent, restored)
Making._begin = dying
"""


async def test_a_sandbox_that_is_lost_while_it_is_made_says_so_to_every_client():
    daemon, address = await asyncio.to_thread(start_daemon, "--max_sandboxes=3", before=_NEVER_READY + _DIES)
    async with Node(address) as node:
        began = time.monotonic()
        with pytest.raises(SandboxLost) as error:
            await node.create(Template("mute", start_s=0.5))
        assert error.value.reason == "start" and error.value.sandbox_id.startswith("sb-")
        assert time.monotonic() - began < 5.0
        with pytest.raises(SandboxLost, match="node-lost"):
            await node.create(Template("dies"))
        answer = httpx.post(f"{address}/sandboxes", json={"template": {"name": "mute", "start_s": 0.2}})
        assert (answer.status_code, answer.json()["reason"]) == (410, "start")
        assert (await (await node.create(Template("next"))).exec("echo on")).text == "on\n"
        assert (await node.health())["alive"] == 1
    assert end(daemon) == 0

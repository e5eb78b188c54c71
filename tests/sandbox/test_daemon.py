"""The daemon as a process: several clients, leases, kill -9, plain HTTP, and errors that arrive as they were raised."""

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import time

import httpx
import pytest
import websockets

from venusrl.core.errors import ConfigError, SandboxCapacity, SandboxError, SandboxLost
from venusrl.sandbox import Template
from venusrl.sandbox.client import RANGE
from venusrl.sandbox.codec import from_json, to_json
from venusrl.sandbox.daemon.client import Node
from venusrl.sandbox.daemon.hub import Hub
from venusrl.sandbox.wire import WireError, pack, unpack

from ..proxies import environment_proxy
from .conftest import ROOT, cgroup_paths, end, processes, start_daemon
from .test_life import until


@pytest.fixture
async def node(daemon_address):
    async with Node(daemon_address, lease_s=0.8) as node:
        yield node
        for sandbox in await node.list():
            await node.end(sandbox["id"], "killed")


async def test_two_clients_of_one_sandbox(node, daemon_address):
    first = await node.create(Template("shared"))
    process = await first.start("echo early; read x; echo got $x; sleep 0.2", stdin=None)
    assert (await anext(aiter(process))).data == b"early\n"
    async with Node(daemon_address) as other:
        second = await other.connect(first.id, first.template)
        results = await asyncio.gather(*(s.exec(f"echo {i}") for i, s in enumerate((first, second) * 10)))
        assert [r.text for r in results] == [f"{i}\n" for i in range(20)]
        taken = await second.connect(process.id)
        await taken.send(b"it\n")
        assert [(o.stream, o.data) async for o in taken] == [("kept", b"early\n"), ("stdout", b"got it\n")]
        assert (await second.exec("exit 3")).exit_code == 3
    await asyncio.sleep(1.0)  # longer than the lease: the first is still there
    assert (await first.exec("echo still")).text == "still\n"


async def test_a_process_goes_on_when_its_client_has_gone(node, daemon_address):
    keeper = await node.create(Template("kept"))
    async with Node(daemon_address) as other:
        visitor = await other.connect(keeper.id, keeper.template)
        started = await visitor.start("head -c 5000000 /dev/zero; echo end")  # more than a window: nobody takes it
        await asyncio.sleep(0.3)
    again = await keeper.connect(started.id)
    result = await asyncio.wait_for(again.wait(), 10)
    assert result.output_total == 5_000_004 and result.output.endswith(b"end\n")


async def test_a_lease_ends_what_nobody_is_connected_to(node, daemon_address):
    async with Node(daemon_address, lease_s=0.6) as owner:
        left = await owner.create(Template("left"))
        await left.exec("sleep 973.5 &")
        await asyncio.sleep(1.0)
        assert (await left.exec("echo here")).text == "here\n"  # connected, so the lease does not run
    async with Node(daemon_address) as heir:
        found = await heir.connect(left.id, left.template)  # within the lease
        assert (await found.exec("echo found")).text == "found\n"
    await until(lambda: not processes("973.5"), 3)
    with pytest.raises(SandboxLost, match="reason: lease"):
        await node.connect(left.id, left.template)


async def test_every_client_hears_why_it_is_gone(node, daemon_address):
    first = await node.create(Template("gone", ttl_s=1.0))
    async with Node(daemon_address) as other:
        second = await other.connect(first.id, first.template)
        calls = [asyncio.create_task(s.exec("sleep 972.5", timeout_s=60)) for s in (first, second)]
        for call in calls:
            with pytest.raises(SandboxLost, match="reason: ttl"):
                await asyncio.wait_for(call, 3)
    with pytest.raises(SandboxLost, match="reason: unknown"):
        await node.connect("sb-none", first.template)


@pytest.mark.parametrize("hard", [True, False])
async def test_a_daemon_that_ends_leaves_nothing(hard, tmp_path):
    daemon, address = start_daemon(f"--templates={tmp_path}")
    async with Node(address) as node:
        built = Template("built", setup=("echo x > x",))
        sandboxes = [await node.create(built) for _ in range(3)]
        await sandboxes[0].exec("setsid sleep 971.5 &")
        call = asyncio.create_task(sandboxes[1].exec("sleep 971.5"))
        await until(lambda: len(processes("971.5")) == 2)
        if hard:
            daemon.kill()
        assert end(daemon) == (-9 if hard else 0)
        with pytest.raises(SandboxLost, match=r"reason: (node-lost|closed)"):
            await asyncio.wait_for(call, 10)
        with pytest.raises(SandboxError, match=r"is launchers\.sandboxd running"):
            await node.create(built)
    await until(lambda: not processes("971.5"))
    marker = f"venusrl-{os.stat('/proc/self/ns/pid').st_ino}-"
    await until(lambda: not cgroup_paths(f"{marker}*/layer-*"))
    daemon, address = start_daemon(f"--templates={tmp_path}")  # and the next one works, with what was built
    async with Node(address) as node:
        assert (await (await node.create(built)).exec("cat x")).text == "x\n"
    assert end(daemon) == 0


CLIENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from venusrl.sandbox import Template
from venusrl.sandbox.daemon.client import Node
async def main():
    async with Node(sys.argv[2], lease_s=0.5) as node:
        sandbox = await node.create(Template("x"))
        await sandbox.exec("setsid sleep 970.5 &")
        print(sandbox.id, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_client_that_is_killed_leaves_nothing_after_its_lease(node, daemon_address):
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(ROOT), daemon_address], stdout=subprocess.PIPE, text=True
    )
    name = client.stdout.readline().strip()
    assert name in [sandbox["id"] for sandbox in await node.list()]
    client.kill()
    client.wait()
    client.stdout.close()
    started = time.monotonic()
    await until(lambda: not processes("970.5"))
    assert time.monotonic() - started > 0.2
    assert name not in [sandbox["id"] for sandbox in await node.list()]


async def test_a_node_is_called_directly_whatever_the_environment_says_of_proxies(daemon_address, monkeypatch):
    async with environment_proxy(monkeypatch) as seen, Node(daemon_address, key="a key of sixteen") as node:
        sandbox = await node.create(Template("direct"))
        assert (await sandbox.exec("echo here")).text == "here\n"
        await sandbox.write("f", b"x" * 100_000)
        await node.end(sandbox.id, "killed")
    assert seen == []


async def test_plain_http(daemon_address, node):
    made = httpx.post(f"{daemon_address}/sandboxes", json={"template": {"name": "plain"}, "lease_s": 30})
    assert made.status_code == 201
    base = f"{daemon_address}/sandboxes/{made.json()['id']}"
    body = {"script": "cat; echo err >&2; pwd; exit 3", "stdin": base64.b64encode(b"in\n").decode(), "cwd": "/tmp"}
    ran = httpx.post(f"{base}/exec", json=body).json()
    assert (ran["exit_code"], base64.b64decode(ran["output"])) == (3, b"in\nerr\n/tmp\n")
    data = bytes(range(256)) * 100
    assert httpx.put(f"{base}/files", params={"path": "d/x"}, content=data).status_code == 204
    assert httpx.get(f"{base}/files", params={"path": "d/x"}).content == data
    assert [e["name"] for e in httpx.get(f"{base}/list", params={"path": "d"}).json()["entries"]] == ["x"]
    missing = httpx.get(f"{base}/files", params={"path": "none"})
    assert (missing.status_code, missing.json()["errno"]) == (422, 2)
    for bad, says in (
        ({}, "script="),
        ({"script": "x", "colour": 1}, "colour=1: Extra inputs are not permitted"),
        ({"script": "x", "timeout_s": -1}, "timeout_s"),
    ):
        refused = httpx.post(f"{base}/exec", json=bad)
        assert refused.status_code == 400 and says in refused.json()["message"]
    assert httpx.get(f"{base}/files").status_code == 400
    [listed] = [
        row for row in httpx.get(f"{daemon_address}/sandboxes").json()["sandboxes"] if row["template"] == "plain"
    ]
    assert listed["clients"] == 0 and listed.get("private", 1) > 0
    assert httpx.delete(base, params={"reason": "because"}).status_code == 400
    assert httpx.delete(base).status_code == httpx.delete(base).status_code == 204
    gone = httpx.post(f"{base}/exec", json={"script": "true"})
    assert (gone.status_code, gone.json()["reason"]) == (410, "killed")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("[", "no JSON object"),
        ("[]", "no JSON object"),
        ("{}", "template:"),
        ('{"template": {"name": "x", "pids": 1}}', "Template.pids=1"),
        ('{"template": {"name": "x", "files": {"a": "?"}}}', "template:"),
        ('{"template": {"name": "x"}, "lease_s": 0}', "lease_s=0"),
    ],
)
async def test_bad_templates_are_refused(daemon_address, node, body, says):
    answer = httpx.post(f"{daemon_address}/sandboxes", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and says in answer.json()["message"]
    assert await node.list() == []


async def test_errors_arrive_as_they_were_raised(node):
    with pytest.raises(SandboxError, match="ended with 7"):
        await node.create(Template("bad", setup=("exit 7",)))
    with pytest.raises(OSError, match="No space left"):
        await node.create(Template("full", files={"f": bytes(3 << 20)}, disk_bytes=1 << 20))
    sandbox = await node.create(Template("x"))
    with pytest.raises(ConfigError, match="because"):
        await sandbox.kill("because")


async def test_a_full_node_says_when_to_ask_again():
    daemon, address = start_daemon("--max_sandboxes=1", "--wait_s=0.1")
    async with Node(address) as node:
        await node.create(Template("first"))
        with pytest.raises(SandboxCapacity, match="max_sandboxes"):
            await node.create(Template("second"))
        refused = httpx.post(f"{address}/sandboxes", json={"template": {"name": "third"}})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    assert end(daemon) == 0


async def test_a_client_that_speaks_nonsense_harms_nobody(node, daemon_address):
    sandbox = await node.create(Template("x"))
    url = f"ws{daemon_address.removeprefix('http')}/sandboxes/{sandbox.id}/agent"
    for message in (b"", b"\0" * 8, pack({"op": "exec"}), pack({"op": "pause", "id": 1}), b"\xff" * 40, "text"):
        async with websockets.connect(url) as socket:
            await socket.recv()
            await socket.send(message)
            with pytest.raises(websockets.ConnectionClosed):
                await asyncio.wait_for(socket.recv(), 5)
        assert (await sandbox.exec("echo fine")).text == "fine\n"


async def test_a_socket_file_is_this_users_alone(tmp_path):
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # what one that was killed left
    daemon, address = start_daemon(f"--socket={path}")
    assert address == f"unix:{path}" and path.stat().st_mode & 0o077 == 0
    async with Node(address) as node:
        assert (await (await node.create(Template("x"))).exec("echo x")).text == "x\n"
    second = [sys.executable, "-m", "launchers.sandboxd", f"--socket={path}"]
    done = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "another process answers there" in done.stderr
    (tmp_path / "file").write_text("mine")
    second[-1] = f"--socket={tmp_path / 'file'}"
    done = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "is no socket" in done.stderr and (tmp_path / "file").read_text() == "mine"
    assert end(daemon) == 0


async def test_lower_directories_only_where_the_node_lets_them_be(tmp_path):
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    (tmp_path / "open/link").symlink_to(tmp_path / "closed")
    daemon, address = start_daemon(f"--lowers={tmp_path / 'open'}", f"--templates={tmp_path / 'store'}")
    async with Node(address) as node:
        sandbox = await node.create(Template("let", lowers=(str(tmp_path / "open"),)))
        assert (await sandbox.exec("cat x")).text == "open"
        for lower in ("closed", "open/../closed", "open/link"):
            with pytest.raises(ConfigError, match="below none"):
                await node.create(Template("not", lowers=(f"{tmp_path}/{lower}",)))
    assert end(daemon) == 0


async def test_a_pause_is_everybodys(node, daemon_address):
    first = await node.create(Template("paused"))
    async with Node(daemon_address) as other:
        second = await other.connect(first.id, first.template)
        running = asyncio.create_task(second.exec("sleep 0.3; echo ran", timeout_s=1.0))
        await asyncio.sleep(0.1)
        await first.pause()
        await asyncio.sleep(0.1)
        late = asyncio.create_task(second.exec("echo late", timeout_s=0.5))
        plain = asyncio.create_task(
            asyncio.to_thread(httpx.post, f"{daemon_address}/sandboxes/{first.id}/exec", json={"script": "echo plain"})
        )
        third = await other.connect(first.id, first.template)  # one who comes while it is paused
        waiting = asyncio.create_task(third.exec("echo third"))
        await asyncio.sleep(1.5)
        assert not any(task.done() for task in (running, late, plain, waiting))
        await second.resume()
        assert [(await task).text for task in (running, late, waiting)] == ["ran\n", "late\n", "third\n"]
        assert (await running).seconds < 1.0 and not (await late).timed_out and 0 <= (await late).seconds < 0.5
        assert (await plain).json()["exit_code"] == 0
        assert not first.paused and (await first.exec("echo on")).text == "on\n"


async def test_all_who_are_interested_hear_of_an_end(node, daemon_address):
    first = await node.create(Template("ends"))
    process = await first.start("read x; head -c 3000000 /dev/zero; exit 5", stdin=None)
    async with Node(daemon_address) as other:
        second = await other.connect(first.id, first.template)
        taken = await second.connect(process.id)
        await process.send(b"\n")
        ended = asyncio.create_task(process.wait())  # which does not turn off what the other takes
        total = sum([len(output.data) async for output in taken])
        assert total == 3_000_000 and (await taken.wait()).exit_code == 5
        assert (await asyncio.wait_for(ended, 5)).exit_code == 5
        left = await first.start("sleep 0.5; exit 6")
        async with Node(daemon_address) as visitor:
            third = await visitor.connect(first.id, first.template)
            await third.connect(left.id)
        assert (await asyncio.wait_for(left.wait(), 5)).exit_code == 6


def test_check_says_what_works():
    done = subprocess.run(
        [sys.executable, "-m", "launchers.sandboxd", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["process"]["ok"] and report.keys() == {"process", "gvisor", "qemu", "firecracker"}
    for name, found in report.items():
        if found["ok"]:
            assert found["no_capabilities"] and found["no_new_privs"] is not False, name
        else:
            assert found["problem"], name


def test_templates_and_frames_survive_the_way():
    template = Template(
        "t", files={"a/b": b"\0\xff"}, env={"A": "b"}, setup=("x", "y"), lowers=("/z",), pids=9, tenant="q"
    )
    assert from_json(json.loads(json.dumps(to_json(template)))) == template
    assert unpack(pack({"a": 1}, b"xyz")) == ({"a": 1}, b"xyz")
    for bad in (b"", pack({}, b"x")[:-1], pack({}) + b"x", b"\0\0\0\1\0\0\0\0{"):
        with pytest.raises(WireError):
            unpack(bad)


async def test_who_has_not_followed_a_move_holds_up_the_next():
    """What it has missed is in this hub, and would be lost with it."""

    class Box:
        ranges, lost, foreign = 5, None, None

    seen = []
    hub = Hub(Box(), {"clients": [3], "jobs": {"7": [3]}})
    hub._tell({"id": 3 * RANGE + 1, "exit_code": 0}, b"missed")
    with pytest.raises(SandboxError, match="not followed"):
        await hub.hold("http://there", 0.1)
    hub.attach(lambda header, body: seen.append(body), 3 * RANGE)
    hub.catch_up(3 * RANGE)
    assert seen == [b"missed"] and hub.state()["clients"] == [3]
    with pytest.raises(SandboxError, match="do not answer"):
        await hub.hold("http://there", 0.1)

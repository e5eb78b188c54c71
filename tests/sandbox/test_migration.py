"""Sandboxes that move between nodes while they run: nothing is lost, and none ever runs in two places."""

import asyncio
import os
import random
import tempfile
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.sandbox.conftest import end, free_ports, needs_criu, processes, start_daemon
from tests.sandbox.test_life import until
from venusrl.core.calls import client
from venusrl.core.errors import ConfigError, SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox import SandboxPool, Template
from venusrl.sandbox.agent.berth import KEPT, meet
from venusrl.sandbox.daemon.arrivals import Arrivals, outgoing
from venusrl.sandbox.daemon.client import Node
from venusrl.sandbox.daemon.peers import Caller

pytestmark = needs_criu

# Shows how far it is where the host can see it: in its name.
_COUNTER = """
import sys, time
n = 0
while True:
    n += 1
    with open('/proc/self/comm', 'w') as f: f.write('n%d' % n)
    time.sleep(0.002)
"""


KEY = "k" * 32


@contextmanager
def key_file():
    """A file that only this user can read."""
    with tempfile.NamedTemporaryFile("w") as f:
        f.write(KEY + "\n")
        f.flush()
        yield f.name


@asynccontextmanager
async def two(*before, flags=((), ()), peers=""):
    """Two daemons, and a client of each; they run the code of `before` first, and have flags of their own, and peers
    besides each other and themselves."""
    ports = free_ports(2)
    with key_file() as path:
        daemons = [
            start_daemon(
                "--max_sandboxes=6", "--wait_s=1", f"--peer_key_file={path}", f"--port={port}",
                f"--peers=other=http://127.0.0.1:{other},self=http://127.0.0.1:{port}{peers}", *own, before=code,
            )
            for code, own, port, other in zip(before or ("", ""), flags, ports, reversed(ports), strict=True)
        ]  # fmt: skip
    try:
        async with Node(daemons[0][1], lease_s=3.0) as a, Node(daemons[1][1], lease_s=3.0) as b:
            a.process, b.process = daemons[0][0], daemons[1][0]
            yield a, b
    finally:
        for daemon, _ in daemons:
            end(daemon)


@pytest.fixture
async def nodes():
    async with two() as pair:
        yield pair


class Witness(threading.Thread):
    """Sees from outside which copies of a counter advance, and when."""

    def __init__(self, marker):
        super().__init__(daemon=True)
        self.marker = marker
        self.advances = []  # processes, in the order in which they were seen to advance
        self.done = threading.Event()

    def run(self):
        seen, found, looked = {}, [], 0.0
        while not self.done.is_set():
            if time.monotonic() > looked + 0.02:
                found, looked = processes(self.marker), time.monotonic()
            for pid in found:
                try:
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                before = seen.get(pid)
                seen[pid] = name
                if before is not None and before.startswith("n") and name.startswith("n") and before != name:
                    self.advances.append(pid)
            time.sleep(0.001)

    def check(self):
        self.done.set()
        self.join()
        turns = sum(before != after for before, after in pairwise(self.advances))
        assert turns <= 2, "two ran at once"  # from here to there, and back where there has failed
        return len(set(self.advances))


async def start_counter(sandbox, marker):
    await sandbox.write("counter.py", _COUNTER.encode())
    return await sandbox.start(f"exec python3 -I -S counter.py {marker}", follow=False)


async def test_nothing_changes_for_its_users(nodes):
    a, b = nodes
    sandbox = await a.create(Template("moving", env={"E": "e"}))
    other = await b.other(a.address).connect(sandbox.id, sandbox.template)
    witness = Witness("first-counter")
    witness.start()
    await start_counter(sandbox, "first-counter")
    followed = await sandbox.start("for i in $(seq 60); do echo $i; sleep 0.02; done")
    of_other = await other.start("while read line; do echo got $line; done", stdin=None)
    slow = asyncio.create_task(sandbox.exec("sleep 1; echo slow; exit 3"))
    over_http = asyncio.create_task(
        a._request("POST", f"/sandboxes/{sandbox.id}/exec", json={"script": "sleep 1; echo h"})
    )
    await asyncio.sleep(0.2)
    moving = asyncio.create_task(sandbox.migrate(b.address))
    late = [asyncio.create_task(box.exec(f"echo {n}")) for n in range(10) for box in (sandbox, other)]
    await asyncio.sleep(0.1)
    late += [asyncio.create_task(box.write(f"f{n}", b"x" * n)) for n in range(10) for box in (sandbox, other)]
    await moving
    assert b"".join([output.data async for output in followed]).split() == [b"%d" % n for n in range(1, 61)]
    assert (await slow).text == "slow\n" and (await slow).exit_code == 3
    assert [(await task).text for task in late[:20]] == [f"{n}\n" for n in range(10) for _ in range(2)]
    await asyncio.gather(*late)
    assert len(await other.list(".")) == 11
    await of_other.send(b"me\n")
    assert (await anext(aiter(of_other))).data == b"got me\n"
    assert "aA==" not in (await over_http).text and (await over_http).json()["output"] == "aAo="
    assert await a.list() == [] and [row["id"] for row in await b.list()] == [sandbox.id]
    assert (await sandbox.exec("echo $E; hostname")).text == "e\nsandbox\n"
    await asyncio.sleep(0.1)
    assert witness.check() == 2
    # There are saves, forks and moves from there, too, through either client, and the way back.
    assert (await (await sandbox.fork()).exec("echo fork")).text == "fork\n"
    await other.migrate(a.address)
    assert (await sandbox.exec("echo back")).text == (await other.exec("echo back")).text == "back\n"
    assert [row["id"] for row in await a.list()] == [sandbox.id]
    await sandbox.kill()
    with pytest.raises(SandboxLost, match="killed"):
        await other.exec("true")


async def test_clients_that_come_later_are_shown_the_way(nodes):
    a, b = nodes
    sandbox = await a.create(Template("moved"))
    await sandbox.write("f", b"here")
    await sandbox.migrate(b.address)
    late = await a.connect(sandbox.id, sandbox.template)
    assert await late.read("f") == b"here"
    address = f"{a.address}/sandboxes/{sandbox.id}/files?path=f"
    assert httpx.get(address).status_code == 308 and httpx.get(address, follow_redirects=True).content == b"here"
    await a.end(sandbox.id, "killed")
    with pytest.raises(SandboxLost):
        await late.exec("true")


async def test_from_a_pool_in_this_process(nodes, tmp_path):
    _, b = nodes
    async with SandboxPool(max_sandboxes=1, snapshots=tmp_path, key=KEY) as pool:
        sandbox = await pool.create(Template("mine"))
        process = await sandbox.start("for i in $(seq 50); do echo $i; sleep 0.02; done")
        changes = sandbox.watch(".")
        watching = asyncio.create_task(anext(changes))
        slow = asyncio.create_task(sandbox.exec("sleep 0.7; echo slow"))
        await asyncio.sleep(0.1)
        await sandbox.migrate(b.address)
        assert (await slow).text == "slow\n"
        assert b"".join([output.data async for output in process]).split() == [b"%d" % n for n in range(1, 51)]
        assert (await watching).kind == "lost"
        await sandbox.write("new", b"")
        assert (await anext(changes)).name == "new"
        assert pool.alive == 0 and pool.stats().ended == {"moved": 1}
        assert (await (await pool.create(Template("next"))).exec("echo next")).text == "next\n"
    assert list(tmp_path.iterdir()) == []
    assert (await sandbox.exec("echo there")).text == "there\n"  # it does not end with the pool
    await sandbox.kill()


async def test_one_that_is_paused_stays_so(nodes):
    a, b = nodes
    sandbox = await a.create(Template("paused"))
    await sandbox.exec("(while true; do echo x >> ticks; sleep 0.01; done) &")
    await sandbox.pause()
    await sandbox.migrate(b.address)
    waiting = asyncio.create_task(sandbox.exec("stat -c %s ticks"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await sandbox.resume()
    assert int((await waiting).text) > 0


async def test_its_template_goes_by_its_key(nodes, tmp_path):
    """Both nodes have it; what is shared there is shared again."""
    a, b = nodes
    template = Template("warm", setup=("head -c 30000000 /dev/zero | tr '\\0' x > warm",))
    sandbox = await a.create(template)
    await sandbox.write("own", b"mine")
    await sandbox.migrate(b.address)
    assert (await sandbox.exec("stat -c %s warm; cat own")).text == "30000000\nmine"
    [row] = await b.list()
    assert row["private"] < 5_000_000 and row["shared"] == 30_000_000


async def test_its_template_goes_along(tmp_path):
    """Where the other node does not have it: the same files, of the same modes, shared there by all that come."""
    setup = "head -c 3000000 /dev/urandom > warm; mkdir -p d/e; ln -s ../warm d/link; echo x > d/run; chmod 750 d/run"
    template = Template("travels", setup=(setup,))
    async with two(flags=([f"--templates={tmp_path}/a"], [f"--templates={tmp_path}/b"])) as (a, b):
        boxes = [await a.create(template) for _ in range(2)]
        look = "sha256sum warm d/link; stat -c '%n %a %u %F' . d d/e d/link d/run warm"
        before = (await boxes[0].exec(look)).text
        for sandbox in boxes:
            await sandbox.write("own", sandbox.id.encode())
            await sandbox.migrate(b.address)
            assert (await sandbox.exec(look)).text == before
            assert await sandbox.read("own") == sandbox.id.encode()
        assert await (await b.create(template)).stat("warm")  # and it is not built again
        [here], [there] = ([p for p in (tmp_path / name).iterdir() if len(p.name) == 64] for name in "ab")
        assert (here / "manifest.json").read_text() == (there / "manifest.json").read_text()
        flags = [f"--templates={tmp_path}/c"]
        async with two(flags=(flags, flags), peers=f",third={b.address}") as (c, _):
            other = await c.create(template)  # the same recipe, and other files: they are random
            assert (await other.exec(look)).text != before
            with pytest.raises(SandboxError, match="other files"):
                await other.migrate(b.address)
            assert (await other.exec("echo on")).text == "on\n"


async def test_a_template_that_comes_damaged_is_not_kept(nodes, tmp_path):
    _, b = nodes
    key = "ab" * 32
    (tmp_path / "tree.tar").write_bytes(b"no archive")
    (tmp_path / "manifest.json").write_text("{}")
    b_with_key = Node(b.address, peer_key=KEY)
    with pytest.raises(SandboxError, match="cannot be packed or unpacked"):
        await b_with_key.send_template(key, "d" * 64, tmp_path)
    assert await b.template(key) is None
    with pytest.raises(SandboxUnsupported, match="peer_key_file"):
        await b.send_template(key, "d" * 64, tmp_path)
    with pytest.raises(ConfigError, match="hexadecimal"):
        await b_with_key.send_template("zz", "d" * 64, tmp_path)
    await b_with_key.close()


# What goes wrong: it goes on where it is


async def test_a_node_that_cannot_take_it(tmp_path):
    async with two(peers=f",nobody=http://127.0.0.1:9,none=unix:{tmp_path}/none") as (a, b):
        await it_goes_on_where_it_is(a, b, tmp_path)


async def it_goes_on_where_it_is(a, b, tmp_path):
    sandbox = await a.create(Template("stays"))
    await start_counter(sandbox, "stays-counter")
    full = [await b.create(Template("full")) for _ in range(6)]
    for node, why in (
        ("nobody", "launchers.sandboxd"),
        (f"unix:{tmp_path}/none", "launchers.sandboxd"),
        ("other", "no place"),
        (a.address, "here already"),
    ):
        with pytest.raises(SandboxError, match=why):
            await sandbox.migrate(node)
        assert (await sandbox.exec("echo on")).text == "on\n"
    for node in ("http://127.0.0.1:10", f"{b.address}/", "stranger", ""):
        with pytest.raises(ConfigError, match="node="):
            await sandbox.migrate(node)
    assert len(await a.list()) == 1 and len(processes("stays-counter")) == 1
    await full[0].kill()
    await sandbox.migrate(b.address)
    assert (await sandbox.exec("echo moved")).text == "moved\n"


async def test_a_stranger_brings_nothing(daemon_address):
    """What arrives is taken from who has the key, and a node without one takes nothing."""
    async with two(peers=f",stranger={daemon_address}") as (a, b):
        for address, headers in ((a.address, {}), (a.address, {"x-venusrl-proof": f"{'a' * 32}:1:{'b' * 64}"})):
            for method, path in (("POST", ""), ("DELETE", ""), ("POST", "/commit")):
                refused = httpx.request(method, f"{address}/arrivals/sb-1{path}", headers=headers)
                assert refused.status_code == (401 if headers else 501)
        sandbox = await a.create(Template("stays"))
        with pytest.raises(SandboxUnsupported, match="peer_key_file"):
            await sandbox.migrate(daemon_address)
        async with SandboxPool(max_sandboxes=1) as pool, SandboxPool(max_sandboxes=1, key="another" * 4) as other:
            for maker in (pool, other):
                mine = await maker.create(Template("mine"))
                with pytest.raises(SandboxUnsupported, match="peer_key_file"):
                    await mine.migrate(b.address)
                assert (await mine.exec("echo on")).text == (await sandbox.exec("echo on")).text == "on\n"


async def test_moves_saves_and_forks_at_once(nodes):
    """Each finds it where it is then, or says that it has gone."""
    a, b = nodes
    sandbox = await a.create(Template("busy"))
    await start_counter(sandbox, "busy-counter")
    works = [sandbox.migrate(b.address), sandbox.snapshot(), sandbox.fork(), sandbox.migrate(b.address)]
    results = await asyncio.gather(*works, return_exceptions=True)
    assert all(not isinstance(result, BaseException) or isinstance(result, SandboxError) for result in results), results
    assert (await sandbox.exec("echo on")).text == "on\n"
    assert sandbox.id in [row["id"] for row in await b.list()]
    await sandbox.migrate(a.address)
    await sandbox.migrate(b.address)
    assert (await sandbox.exec("echo there and back")).text == "there and back\n"


async def test_a_client_that_does_not_hold_on_keeps_it_where_it_is(nodes, monkeypatch):
    """What it has sent, or would send, must not be lost on the way."""
    a, b = nodes
    sandbox = await a.create(Template("busy"))
    with monkeypatch.context() as busy:
        busy.setattr("venusrl.sandbox.daemon.client._Stream.hold", lambda stream, last: None)
        moving = asyncio.create_task(sandbox.migrate(b.address))
        await asyncio.sleep(0.2)
        late = asyncio.create_task(sandbox.exec("echo late"))
        with pytest.raises(SandboxError, match="do not answer"):
            await moving
        assert (await late).text == "late\n"
    await sandbox.migrate(b.address)
    assert (await sandbox.exec("echo there")).text == "there\n"


async def test_what_it_may_have_moves_with_it(nodes):
    """Its time to live, and its limit of memory."""
    a, b = nodes
    sandbox = await a.create(Template("limited", ttl_s=6.0))
    await a.resize(sandbox, 700 << 20)
    await asyncio.sleep(1.0)
    await sandbox.migrate(b.address)
    began = time.monotonic()
    result = await sandbox.exec("python3 -I -S -c 'x = bytearray(1) * (600 << 20); print(1)'", timeout_s=20)
    assert (result.text, result.oom) == ("1\n", False)
    with pytest.raises(SandboxLost, match="ttl"):
        await sandbox.exec("sleep 30", timeout_s=60)
    assert 1.0 < time.monotonic() - began < 5.2


async def test_the_old_lease_does_not_end_it_there(nodes):
    a, b = nodes
    made = (await a._request("POST", "/sandboxes", json={"template": {"name": "http"}, "lease_s": 1.5})).json()
    await a._request("POST", f"/sandboxes/{made['id']}/migrate", json={"node": b.address})
    there = await b.connect(made["id"], Template("http"))
    await asyncio.sleep(2.5)
    assert (await there.exec("echo still")).text == "still\n"
    await b.end(made["id"], "killed")
    left = await a.create(Template("left"))
    await left.migrate(b.address)
    left.mark_lost("closed")  # its user lets go of it
    await until_empty(a, b)


async def test_what_arrives_damaged_is_refused(nodes, tmp_path):
    a, _ = nodes
    async with SandboxPool(max_sandboxes=1, snapshots=tmp_path, key=KEY) as pool:
        saved = await (await pool.create(Template("sent"))).snapshot()
        [snapshot] = await pool.snapshots()
    whole = b"".join([data async for data in outgoing(snapshot, tmp_path / saved, {"lease_s": 5.0})])
    rng = random.Random(5)
    header = 8 + int.from_bytes(whole[:8])
    broken = [b"", whole[:4], whole[:100], whole[:-1], b"\xff" * 100, whole[:8] + b"[]" + whole[10:]]
    for _ in range(10):
        at = rng.randrange(header, len(whole))
        broken.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    async with client(a.address, auth=Caller(KEY)) as http:
        for data in broken:
            answer = await http.post("/arrivals/sb-sent", content=data)
            assert answer.status_code in (400, 500), answer.text
            assert (await http.post("/arrivals/sb-sent/commit")).status_code == 404
        assert (await a.health())["alive"] == 0
        # And whole, but never told to commit: it can be taken back, once or twice, and then cannot be committed.
        assert (await http.post("/arrivals/sb-sent", content=whole)).status_code == 201
        assert (await http.get("/arrivals/sb-sent")).json() == {"state": "waiting"}
        assert (await http.post("/arrivals/sb-sent", content=whole)).status_code == 500
        for _ in range(2):
            assert (await http.delete("/arrivals/sb-sent")).status_code == 204
        assert (await http.post("/arrivals/sb-sent/commit")).status_code == 404
        assert (await a.health())["alive"] == 0
        # Committed twice, it runs once; then it cannot be taken back.
        assert (await http.post("/arrivals/sb-sent", content=whole)).status_code == 201
        assert [(await http.post("/arrivals/sb-sent/commit")).status_code for _ in range(2)] == [204, 204]
        assert (await http.delete("/arrivals/sb-sent")).status_code == 409
        assert len(await a.list()) == 1


def test_where_no_agent_waits_is_no_broken_connection():
    """To the spawner that one is its owner's end."""
    with pytest.raises(OSError) as caught:
        meet(os.getpid(), b"\0nobody waits here", KEPT, [0])
    assert not isinstance(caught.value, ConnectionError)


async def test_a_sender_that_gives_up_leaves_nothing(tmp_path):
    async def begins():
        yield b"\0\0"
        await asyncio.sleep(60)

    async with SandboxPool(max_sandboxes=1, snapshots=tmp_path, key=KEY) as pool:
        arrivals = Arrivals(pool, lambda sandbox, about: None)
        for after in (0.0, 0.0, 0.0002, 0.0005, 0.001, 0.002, 0.01, 0.05):
            receiving = asyncio.create_task(arrivals.receive("sb-sent", begins()))
            await asyncio.sleep(after)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
        await until(lambda: not list(tmp_path.iterdir()))


async def test_a_kill_while_it_moves(nodes):
    a, b = nodes
    for after in (0.02, 0.1, 0.2, 0.3):
        sandbox = await a.create(Template("killed"))
        await start_counter(sandbox, "killed-counter")
        moving = asyncio.create_task(sandbox.migrate(b.address))
        await asyncio.sleep(after)
        await sandbox.kill()
        await asyncio.wait({moving})
        moving.exception()
        await until(lambda: not processes("killed-counter"), 10)
    await until_empty(a, b)


async def until_empty(*nodes):
    give_up = time.monotonic() + 10
    while any([await node.list() for node in nodes]) or any([(await node.health())["alive"] for node in nodes]):
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)

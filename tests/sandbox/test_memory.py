"""A sandbox that has used up its memory stands still, goes on with more, or ends for that reason."""

import asyncio
import dataclasses
import errno
import signal
import subprocess
import time
from contextlib import ExitStack

import pytest

from tests.sandbox.conftest import end, needs_criu, processes, start_daemon
from tests.sandbox.test_migration import KEY, key_file, two, until_empty
from tests.sandbox.test_snapshots import in_process
from venusrl.core.errors import ConfigError, SandboxError, SandboxLost
from venusrl.sandbox import SandboxPool, Template, client
from venusrl.sandbox.daemon.client import Node

HELD = Template("held", memory_bytes=64 << 20, disk_bytes=8 << 20, oom="hold", oom_wait_s=1.0)
HOG = "python3 -I -S -c 'x = bytearray(1) * (120 << 20); print(len(x) >> 20)'"

# Counts what it is sent, and needs no memory for it.
COUNTER = """python3 -I -S -c '
import os
room, count = bytearray(b"x") * 65536, 0
while got := os.readv(0, [room]): count += got
print(count)'"""


@pytest.fixture
async def pressed():
    """(pool, sandboxes that stood still)."""
    seen: asyncio.Queue = asyncio.Queue()
    async with SandboxPool(max_sandboxes=4, on_pressure=seen.put_nowait) as pool:
        if pool.host["cgroups"]["memory"] != "v1":
            pytest.skip("no writable memory cgroup of version 1 on this host")
        yield pool, seen


async def test_more_memory_lets_it_go_on(pressed):
    pool, seen = pressed
    sandbox = await pool.create(HELD)
    call = asyncio.create_task(sandbox.exec(HOG, timeout_s=30))
    assert await asyncio.wait_for(seen.get(), 10) is sandbox
    await asyncio.sleep(0.3)
    assert not call.done()
    await pool.resize(sandbox, 256 << 20)
    result = await asyncio.wait_for(call, 10)
    assert (result.text, result.exit_code, result.oom) == ("120\n", 0, False)
    await asyncio.sleep(1.2)  # what was to end it does so no more
    assert (await sandbox.exec("echo on")).text == "on\n"


async def test_too_little_more_holds_it_again(pressed):
    pool, seen = pressed
    sandbox = await pool.create(HELD)
    call = asyncio.create_task(sandbox.exec(HOG, timeout_s=30))
    await asyncio.wait_for(seen.get(), 10)
    await pool.resize(sandbox, 80 << 20)
    await asyncio.sleep(0.3)
    assert not call.done()
    await pool.resize(sandbox, 256 << 20)
    assert (await asyncio.wait_for(call, 10)).text == "120\n"


@pytest.mark.parametrize("agent", ["native", "python"])
async def test_its_agent_waits_for_memory_too(agent, monkeypatch):
    """What the kernel refuses it meanwhile (ENOBUFS, ENFILE, EFAULT, no memory for an area) does not end it."""
    monkeypatch.setattr(client, "_GRACE_S", 0.05)  # as long as it may be held, no answer is no fault
    seen: asyncio.Queue = asyncio.Queue()
    async with SandboxPool(max_sandboxes=1, on_pressure=seen.put_nowait, agent=agent) as pool:
        if pool.host["cgroups"]["memory"] != "v1":
            pytest.skip("no writable memory cgroup of version 1 on this host")
        sandbox = await pool.create(dataclasses.replace(HELD, oom_wait_s=30.0))
        await sandbox.write("many", bytes(3_000_000))
        counting = await sandbox.start(COUNTER, stdin=None)
        late = asyncio.create_task(sandbox.exec("sleep 967.25", timeout_s=0.6))
        await asyncio.sleep(0.3)
        call = asyncio.create_task(sandbox.exec(HOG, timeout_s=30))
        await asyncio.wait_for(seen.get(), 10)
        sending = asyncio.create_task(send_all(counting, 40))
        reads, lists = [], []
        for mib in range(65, 105):
            reads += [asyncio.create_task(sandbox.read("many")) for _ in range(2)]
            lists += [asyncio.create_task(sandbox.list("/usr/bin")) for _ in range(2)]
            await asyncio.sleep(0.01)
            await pool.resize(sandbox, mib << 20)
        await asyncio.sleep(0.3)
        assert sandbox.lost is None and not call.done()
        await pool.resize(sandbox, 256 << 20)
        names = await sandbox.list("/usr/bin")
        for reply in await asyncio.wait_for(asyncio.gather(*reads, *lists, return_exceptions=True), 20):
            if isinstance(reply, OSError):  # it may be refused, and is never less than all of it
                assert reply.errno in (errno.ENOMEM, errno.ENFILE), reply
            else:
                assert reply in (bytes(3_000_000), names)
        assert (await asyncio.wait_for(call, 10)).text == "120\n"
        await asyncio.wait_for(sending, 10)
        assert (await asyncio.wait_for(counting.wait(), 10)).text == f"{40 * 50_000}\n"
        stopped = await asyncio.wait_for(late, 10)
        assert stopped.timed_out and stopped.exit_code == -signal.SIGKILL and not processes("967.25")


async def send_all(process, count):
    for _ in range(count):
        await process.send(bytes(50_000))
    await process.close_stdin()


async def test_without_more_it_ends_and_says_why(pressed):
    pool, _ = pressed
    sandbox, neighbour = await pool.create(HELD), await pool.create(HELD)
    started = time.monotonic()
    with pytest.raises(SandboxLost, match="reason: oom"):
        await sandbox.exec(HOG, timeout_s=30)
    assert 0.8 < time.monotonic() - started < 5
    assert pool.stats().ended == {"oom": 1}
    assert (await neighbour.exec("echo fine")).text == "fine\n"
    with pytest.raises(SandboxError):
        await pool.resize(sandbox, 256 << 20)


async def test_one_that_waits_can_be_killed_and_leaves_nothing(pressed):
    pool, seen = pressed
    sandbox = await pool.create(HELD)
    call = asyncio.create_task(sandbox.exec(HOG, timeout_s=30))
    await asyncio.wait_for(seen.get(), 10)
    await asyncio.wait_for(sandbox.kill(), 5)
    with pytest.raises(SandboxLost, match="reason: killed"):
        await call
    assert pool.alive == 0


async def test_limits_go_down_and_up(pressed):
    pool, _ = pressed
    sandbox = await pool.create(Template("sized", memory_bytes=256 << 20))
    await pool.resize(sandbox, 48 << 20)
    assert (await sandbox.exec(HOG)).oom
    await pool.resize(sandbox, 256 << 20)
    assert (await sandbox.exec(HOG)).text == "120\n"
    script = "x = bytearray(1) * (120 << 20); print(1, flush=True); input()"
    hold = await sandbox.start(f"python3 -I -S -c '{script}'", stdin=None)
    assert (await anext(aiter(hold))).data == b"1\n"
    with pytest.raises(SandboxError, match="cannot have another limit"):
        await pool.resize(sandbox, 48 << 20)
    assert hold.result is None


# Saved and moved


@needs_criu
async def test_want_of_memory_moves_it(tmp_path):
    """It stands still when it has used up what it was given, and goes on where there is more."""
    moves = []

    def move(sandbox):
        moves.append(asyncio.create_task(sandbox.migrate(b.address)))

    async with (
        two() as (_, b),
        SandboxPool(max_sandboxes=1, snapshots=tmp_path, key=KEY, on_pressure=move) as pool,
    ):
        if pool.host["cgroups"]["memory"] != "v1":
            pytest.skip("no writable memory cgroup of version 1 on this host")
        sandbox = await pool.create(Template("grows", memory_bytes=256 << 20, oom="hold"))
        await pool.resize(sandbox, 64 << 20)
        result = await sandbox.exec(HOG, timeout_s=30)
        assert (result.text, result.exit_code, result.oom) == ("120\n", 0, False)
        await asyncio.gather(*moves)
        assert pool.stats().ended == {"moved": 1} and len(await b.list()) == 1


@needs_criu
async def test_want_of_memory_moves_it_between_daemons(tmp_path):
    """To the first that can take it: not one that does not answer, nor one whose disk is full."""
    small = tmp_path / "small"
    small.mkdir()
    with ExitStack() as ending:

        def started(*flags):
            daemon, address = start_daemon("--max_sandboxes=2", f"--peer_key_file={path}", *flags)
            ending.callback(end, daemon)
            return address

        path = ending.enter_context(key_file())
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=True)
        ending.callback(subprocess.run, ["umount", small], check=True)
        full, there = started(f"--snapshots={small}/s"), started()
        here = started(f"--peers=none=http://127.0.0.1:9,full={full},there={there}")
        async with Node(here) as a, Node(there) as b:
            if (await a.health())["cgroups"]["memory"] != "v1":
                pytest.skip("no writable memory cgroup of version 1 on this host")
            sandbox = await a.create(Template("grows", memory_bytes=256 << 20, oom="hold"))
            await a.resize(sandbox, 64 << 20)
            assert (await sandbox.exec(HOG, timeout_s=30)).text == "120\n"
            await until_empty(a)
            assert [row["id"] for row in await b.list()] == [sandbox.id]
            lost = await a.create(Template("alone", memory_bytes=80 << 20, oom="hold", oom_wait_s=1.0))
            with pytest.raises(SandboxLost, match="oom"):  # there it has no more than here
                await lost.exec(HOG, timeout_s=30)


@needs_criu
async def test_kills_of_before_a_move_are_known_after_it():
    async with two() as (a, b):
        if not (await a.health())["cgroups"]["memory"]:
            pytest.skip("no writable memory cgroup on this host")
        sandbox = await a.create(Template("small", memory_bytes=48 << 20, disk_bytes=8 << 20))
        begun = await sandbox.start(f"{HOG}; echo killed; sleep 1.5")
        async for output in begun:
            if b"killed" in output.data:
                break
        quiet = await sandbox.start("sleep 1.5")
        await sandbox.migrate(b.address)
        assert (await begun.wait()).oom and not (await quiet.wait()).oom
        assert (await sandbox.exec(HOG)).oom


@in_process
async def test_kills_of_before_are_known_in_a_copy(pool):
    if not pool.host["cgroups"]["memory"]:
        pytest.skip("no writable memory cgroup on this host")
    sandbox = await pool.create(Template("small", memory_bytes=48 << 20, disk_bytes=8 << 20))
    begun = await sandbox.start(f"{HOG}; echo killed; sleep 1.5")
    async for output in begun:
        if b"killed" in output.data:
            break
    copy = await sandbox.fork()
    later = await copy.start("sleep 0.1")
    taken = await copy.connect(begun.id)
    assert (await begun.wait()).oom and (await taken.wait()).oom and not (await later.wait()).oom


def test_bad_ones_are_refused():
    for bad, says in ((dict(oom="wait"), "Template.oom"), (dict(oom_wait_s=0), "oom_wait_s")):
        with pytest.raises(ConfigError, match=says):
            Template("bad", **bad)

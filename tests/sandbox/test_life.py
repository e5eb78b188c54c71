"""Conformance: pause, kill, ttl, the pool's places, and that nothing outlives its owner."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from venusrl.core.errors import SandboxCapacity, SandboxError, SandboxLost
from venusrl.sandbox import Sandbox, SandboxPool, Template

from .conftest import cgroup_paths, in_process, on_host, processes

ROOT = str(Path(__file__).resolve().parents[2])


async def until(condition, seconds=5.0):
    """Waits for a condition; fails after `seconds`."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "condition never held"
        await asyncio.sleep(0.02)


def cgroups(spawner="*"):
    """Directories of sandboxes, of one spawner or of all in this pid namespace."""
    marker = f"venusrl-{os.stat('/proc/self/ns/pid').st_ino}-{spawner}-"
    return cgroup_paths(f"{marker}*/sb-*")


def test_implements_the_protocol():
    from venusrl.sandbox.client import ProcessSandbox

    names = [name for name in dir(Sandbox) if not name.startswith("_")]
    assert {"exec", "read", "write", "list", "pause", "resume", "snapshot", "migrate", "kill"} <= set(names)
    assert all(callable(getattr(ProcessSandbox, name)) for name in names)


@on_host
async def test_kill_fails_the_call_in_flight(sandbox):
    call = asyncio.create_task(sandbox.exec("sleep 984.5"))
    await until(lambda: processes("984.5"))
    started = time.monotonic()
    await sandbox.kill()
    with pytest.raises(SandboxLost) as lost:
        await call
    assert lost.value.reason == "killed" and time.monotonic() - started < 2
    assert processes("984.5") == []


async def test_every_call_after_kill_raises_with_the_reason(sandbox):
    await sandbox.kill("closed")
    await sandbox.kill()
    calls = [
        lambda: sandbox.exec("true"), lambda: sandbox.read("x"), lambda: sandbox.write("x", b""),
        lambda: sandbox.list("."), sandbox.pause, sandbox.resume, sandbox.snapshot, lambda: sandbox.migrate("n"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SandboxLost, match="reason: closed"):
            await asyncio.wait_for(call(), 1)


async def test_pause_stops_everything_and_the_deadline(sandbox):
    await sandbox.exec("(while sleep 0.01; do echo >> ticks; done) &")
    while (await sandbox.exec("test -e ticks")).exit_code != 0:  # a slow machine begins later
        await asyncio.sleep(0.05)
    call = asyncio.create_task(sandbox.exec("sleep 0.5; echo woke", timeout_s=1.5))
    await asyncio.sleep(0.2)
    await sandbox.pause()
    await sandbox.pause()
    late = asyncio.create_task(sandbox.read("ticks"))
    await asyncio.sleep(2.0)
    assert not late.done() and not call.done()
    await sandbox.resume()
    await sandbox.resume()
    ticks = len(await late)
    result = await call
    assert (result.text, result.timed_out) == ("woke\n", False)
    assert result.seconds < 1.5
    assert ticks < 90  # 0.01 s and a fork each: at most 20 before the pause, and a few at resume
    await until_more_ticks(sandbox, ticks)


async def until_more_ticks(sandbox, ticks):
    for _ in range(100):
        if len(await sandbox.read("ticks")) > ticks:
            return
        await asyncio.sleep(0.02)
    pytest.fail("the background process did not go on after resume")


async def test_kill_while_paused(sandbox):
    await sandbox.exec("sleep 983.5 &")
    await sandbox.pause()
    waiting = asyncio.create_task(sandbox.exec("true"))
    await asyncio.sleep(0.05)
    await sandbox.kill()
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(waiting, 1)
    assert processes("983.5") == []


@in_process
async def test_ttl(pool):
    sandbox = await pool.create(Template("short", ttl_s=0.5))
    started = time.monotonic()
    with pytest.raises(SandboxLost) as lost:
        await sandbox.exec("sleep 982.5", timeout_s=60)
    assert lost.value.reason == "ttl" and 0.3 < time.monotonic() - started < 2
    assert pool.alive == 0 and pool.stats().ended == {"ttl": 1}
    assert processes("982.5") == []


async def test_a_ttl_may_be_longer_than_a_poll(pool):
    sandbox = await pool.create(Template("long", ttl_s=1e12))
    assert (await sandbox.exec("echo x", timeout_s=1e9)).text == "x\n"


@in_process
async def test_agent_killed_from_outside_is_noticed(pool, sandbox):
    call = asyncio.create_task(sandbox.exec("sleep 981.5"))
    await until(lambda: processes("981.5"))
    [agent] = [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if parent(entry.name) == pool.spawner_pid]
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(SandboxLost, match="reason: killed"):
        await asyncio.wait_for(call, 2)


def parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


async def test_a_full_pool_refuses_after_its_wait():
    async with SandboxPool(max_sandboxes=1, wait_s=0.3) as pool:
        await pool.create(Template("first"))
        with pytest.raises(SandboxCapacity, match="max_sandboxes"):
            await pool.create(Template("refused"))


async def test_a_full_pool_is_fair():
    async with SandboxPool(max_sandboxes=1) as pool:
        first = await pool.create(Template("first"))
        order = []

        async def take(name):
            sandbox = await pool.create(Template(name))
            order.append(name)
            await sandbox.kill()

        waiting = []
        for name in "abc":
            waiting.append(asyncio.create_task(take(name)))
            await asyncio.sleep(0)
        assert pool.stats().waiting == 3 and pool.alive == 1
        await first.kill()
        await asyncio.gather(*waiting)
        assert order == ["a", "b", "c"] and pool.alive == 0


async def test_cancelled_create_gives_its_place_back():
    async with SandboxPool(max_sandboxes=1, wait_s=5) as pool:
        for delay in (0, 0.001, 0.003, 0.006):
            task = asyncio.create_task(pool.create(Template("x")))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                await task.result().kill()
        assert pool.alive == 0
        sandbox = await pool.create(Template("y"))
        assert (await sandbox.exec("echo ok")).text == "ok\n"


async def test_many_large_requests_at_once_all_arrive():
    """More than the socket to the spawner holds."""
    async with SandboxPool(max_sandboxes=40) as pool:
        large = Template("large", env={"A": "x" * 60_000})
        sandboxes = await asyncio.wait_for(asyncio.gather(*(pool.create(large) for _ in range(40))), 30)
        assert (await sandboxes[-1].exec("echo ${#A}")).text == "60000\n"


async def test_close_ends_all():
    pool = SandboxPool(max_sandboxes=3)
    sandboxes = [await pool.create(Template("x")) for _ in range(3)]
    call = asyncio.create_task(sandboxes[0].exec("sleep 980.5"))
    await until(lambda: processes("980.5"))
    await pool.close()
    with pytest.raises(SandboxLost, match="reason: closed"):
        await call
    assert processes("980.5") == []
    with pytest.raises(SandboxError, match="closed"):
        await pool.create(Template("x"))
    await pool.close()


def baseline(pool):
    """What sandboxes take of their owner, spawner and host: descriptors, mounts, processes, mappings, cgroups."""
    spawner = f"/proc/{pool.spawner_pid}"
    mounts = [len(Path(f"{of}/mountinfo").read_text().splitlines()) for of in ("/proc/self", spawner)]
    agents = len([pid for pid in processes("venusrl.sandbox.spawner.spawner") if parent(pid) == pool.spawner_pid])
    descriptors = len(os.listdir("/proc/self/fd")), len(os.listdir(f"{spawner}/fd"))
    mappings = len(Path(f"{spawner}/maps").read_text().splitlines())
    return descriptors, mounts, agents, mappings, len(cgroups(pool.spawner_pid))


@in_process
async def test_fifty_cycles_leave_nothing(pool):
    await (await pool.create(Template("warm"))).kill()
    await until(lambda: not cgroups(pool.spawner_pid))
    before = baseline(pool)
    for _ in range(50):
        sandbox = await pool.create(Template("x", files={"f": b"x"}))
        await sandbox.exec("sleep 979.5 &")
        await sandbox.kill()
    assert processes("979.5") == []
    await until(lambda: baseline(pool) == before)


OWNER = """
import asyncio, os, sys, time
sys.path.insert(0, sys.argv[1])
from venusrl.sandbox import SandboxPool, Template
async def main():
    pool = SandboxPool(max_sandboxes=2)
    boxes = [await pool.create(Template("x")) for _ in range(2)]
    await boxes[0].exec(f"setsid sleep 978.{5} & sleep 0.3")
    await boxes[1].exec(f"sleep 978.{5} & sleep 0.3")
    await boxes[1].pause()
    heir = os.fork()
    if heir == 0:  # a fork holds every socket of the owner open, and must not keep the sandboxes alive
        time.sleep(60)
        os._exit(0)
    print(pool.spawner_pid, heir, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_owner_killed_leaves_nothing():
    owner = subprocess.Popen([sys.executable, "-c", OWNER, ROOT], stdout=subprocess.PIPE, text=True)
    try:
        spawner, heir = map(int, owner.stdout.readline().split())
        assert len(processes("978.5")) == 2
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    await until(lambda: not processes("978.5") and not Path(f"/proc/{spawner}").exists())
    await until(lambda: not cgroups(spawner))
    os.kill(heir, signal.SIGKILL)  # still there: it was the owner's death that counted


@in_process
async def test_spawner_killed_takes_its_sandboxes_and_the_pool_recovers(pool):
    sandboxes = [await pool.create(Template("x")) for _ in range(2)]
    await sandboxes[1].exec("setsid sleep 976.5 &")
    call = asyncio.create_task(sandboxes[0].exec("sleep 976.5"))
    await until(lambda: len(processes("976.5")) == 2)
    old = pool.spawner_pid
    os.kill(old, signal.SIGKILL)
    with pytest.raises(SandboxLost, match="reason: node-lost"):
        await asyncio.wait_for(call, 3)
    with pytest.raises(SandboxLost, match="reason: node-lost"):
        await sandboxes[1].exec("true")
    await until(lambda: not processes("976.5"))
    again = await pool.create(Template("again"))
    assert (await again.exec("echo back")).text == "back\n"
    assert pool.spawner_pid != old and pool.stats().spawners == 2 and pool.alive == 1
    assert not cgroups(old)

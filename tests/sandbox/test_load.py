"""What takes minutes (`make test-sandbox`): neighbours of hogs, hundreds of sandboxes at once, hundreds in turn."""

import asyncio
import contextlib
import os
import time
from pathlib import Path

import pytest

from venusrl.sandbox import SandboxPool, Template

from ..launchers.programs import descendants
from .conftest import processes
from .test_life import baseline, cgroups, until

pytestmark = pytest.mark.slow

HOGS = {
    "fork bomb": ":(){ :|:& };: ; sleep 60",
    "memory hog": "while :; do python3 -I -S -c 'x = bytearray(1) * (400 << 20)'; done",
    "disk filler": "while :; do head -c 100000000 /dev/zero > f; rm -f f; done",
    "hog of descriptors": "python3 -I -S -c 'import os\nwhile True:\n  try: os.dup(0)\n  except OSError: pass'",
    "spinner": "for i in $(seq 30); do (while :; do :; done) & done; wait",
}


ROUNDS, CALLS = 4, 400
BUSY = 0.8  # processors that may be busy without the hog: the calls themselves take 0.3
KERNEL_THREAD = 0x00200000  # PF_KTHREAD, in the flags of a process
OTHERS = 0.03  # processors that other programs may use in a round that counts: the p99 is about one call in a hundred


async def exec_seconds(sandbox, calls: int = CALLS) -> list[float]:
    """Of an exec each, in between the next one's."""
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        await sandbox.exec("true")
        seconds.append(time.perf_counter() - started)
        await asyncio.sleep(0.005)
    return seconds


def busy_s() -> float:
    """Seconds that this machine's processors have been at work, all together."""
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def others_s() -> dict[int, float]:
    """Seconds of processor of programs outside of this test, by pid, with those of their children that have ended.

    The kernel's own are not in it, for a hog keeps them busy too.
    """
    ours = {os.getpid(), *descendants(os.getpid())}
    seconds = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in ours:
            with contextlib.suppress(OSError):  # it has ended
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if not int(fields[6]) & KERNEL_THREAD:
                    seconds[int(entry)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


async def measured(sandbox) -> tuple[list[float], float, float]:
    """Of some calls, the seconds of each; and processors that were busy, and that programs outside of the test used."""
    began, busy, others = time.perf_counter(), busy_s(), others_s()
    seconds = await exec_seconds(sandbox)
    passed = time.perf_counter() - began
    used = sum(max(0.0, now - others.get(pid, 0.0)) for pid, now in others_s().items())
    return seconds, (busy_s() - busy) / passed, used / passed


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) * 99 // 100 - 1]


@pytest.mark.parametrize("hog", HOGS)
async def test_a_hog_slows_its_neighbour_less_than_twice(hog):
    """The p99 of all calls beside it against that of all calls without it, in turns of a few seconds.

    A round counts where other programs left the machine alone in both of its parts, whatever its result: beside a hog,
    all but the hog share one processor of two, so a program that uses a tenth of it meets one call in ten.
    """
    async with SandboxPool(max_sandboxes=2) as pool:
        if None in pool.host["cgroups"].values():
            pytest.skip("no writable cgroups for memory, processes and processors on this host")
        victim = await pool.create(Template("victim"))
        await exec_seconds(victim, 50)
        alone, beside, rounds, noise = [], [], 0, []
        for _ in range(4 * ROUNDS):
            quiet, busy, others = await measured(victim)
            noise.append(others)
            if busy > BUSY or others > OTHERS:
                continue
            sandbox = await pool.create(Template("hog"))
            await sandbox.start(HOGS[hog], follow=False)
            await asyncio.sleep(0.5)
            loud, _, others = await measured(victim)
            noise.append(others)
            await sandbox.kill()
            await asyncio.sleep(0.5)
            if others > OTHERS:
                continue
            alone, beside, rounds = alone + quiet, beside + loud, rounds + 1
            if rounds == ROUNDS:
                break
        if rounds < ROUNDS:
            used = ", ".join(f"{others:.2f}" for others in noise)
            pytest.skip(f"only {rounds} rounds were quiet: other programs used {used} processors (limit {OTHERS})")
        ratio = p99(beside) / p99(alone)
        print(f"{hog}: p99 of a neighbour's exec {p99(alone) * 1e3:.2f} -> {p99(beside) * 1e3:.2f} ms, {ratio:.2f}x")
        assert ratio < 2


async def test_five_hundred_at_once():
    async with SandboxPool(max_sandboxes=500) as pool:
        sandboxes = [await pool.create(Template("crowd")) for _ in range(500)]
        await asyncio.gather(*(sandbox.write("id", sandbox.id.encode()) for sandbox in sandboxes))
        results = await asyncio.gather(*(sandbox.exec("cat id; sleep 969.5 &") for sandbox in sandboxes))
        assert [result.text.strip() for result in results] == [sandbox.id for sandbox in sandboxes]
        assert len(processes("969.5")) == 500
        spawner = pool.spawner_pid
    await until(lambda: not processes("969.5") and not cgroups(spawner))


async def test_five_hundred_cycles_leave_nothing(tmp_path):
    async with SandboxPool(max_sandboxes=4, templates=tmp_path) as pool:
        templates = [
            Template("plain", files={"f": b"x"}),
            Template("built", setup=("echo x > x",)),
            Template("held", oom="hold" if pool.host["cgroups"]["memory"] == "v1" else "kill"),
        ]
        for template in templates:
            await (await pool.create(template)).kill()
        await until(lambda: len(cgroups(pool.spawner_pid)) == 0)
        before = baseline(pool)
        for i in range(500):
            sandbox = await pool.create(templates[i % 3])
            await sandbox.exec("setsid sleep 968.5 & echo x > y")
            if i % 7 == 0:
                await sandbox.start("cat", stdin=None, pty=(24, 80) if i % 2 else None)
            await sandbox.kill()
        assert processes("968.5") == []
        await until(lambda: baseline(pool) == before)

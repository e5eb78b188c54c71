"""What stands still does, whatever runs in it: pauses, deadlines, and sandboxes that are saved, copied and moved.

The commands here send themselves SIGCONT by timers, in threads and children, and look into the agent as soon as the
kernel lets them.
"""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sandbox.conftest import MACHINES, ROOT, needs_criu, needs_root, processes
from tests.sandbox.test_migration import nodes  # noqa: F401, a fixture
from venusrl.sandbox import SandboxPool, Template
from venusrl.sandbox.machines.pool import MachinePool
from venusrl.sandbox.spawner import limits

# Each of its threads of each of its processes writes down the longest time that it did not run, and whether it could
# open the agent's memory. argv: name, processes, threads.
HOSTILE = r"""
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
class Value(ctypes.Union): _fields_ = [("i", ctypes.c_int), ("p", ctypes.c_void_p)]
class Event(ctypes.Structure):
    _fields_ = [("value", Value), ("signo", ctypes.c_int), ("notify", ctypes.c_int), ("pad", ctypes.c_char * 48)]
class Time(ctypes.Structure): _fields_ = [("s", ctypes.c_long), ("n", ctypes.c_long)]
class Interval(ctypes.Structure): _fields_ = [("every", Time), ("first", Time)]

def arm():
    signal.signal(signal.SIGCONT, lambda *_: None)
    armed = 0
    for us in (400, 700, 1100, 1900, 3100, 5000):
        timer, event = ctypes.c_void_p(), Event()
        event.signo, event.notify = signal.SIGCONT, 0
        if libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0:
            span = Interval(Time(0, us * 1000), Time(0, us * 1000))
            armed += libc.timer_settime(timer, 0, ctypes.byref(span), None) == 0
    return armed

def run(name):
    worst, last = 0.0, time.monotonic()
    while True:
        now = time.monotonic()
        if now - last > worst:
            worst = now - last
            with open(f"gap-{name}.new", "w") as f: f.write(f"{worst:.3f}")
            os.rename(f"gap-{name}.new", f"gap-{name}")
        last = now
        try:
            fd = os.open("/proc/1/mem", os.O_RDWR)
            open("opened", "w").write(name)
        except OSError:
            pass
        for pid in os.listdir("/proc"):  # wake whoever is stopped
            if pid.isdigit() and int(pid) > 1:
                try: os.kill(int(pid), signal.SIGCONT)
                except OSError: pass
        time.sleep(0.002)

name, count, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for child in range(1, count):
    if os.fork() == 0:
        if child % 2: os.setsid()
        name = f"{name}.{child}"
        break
armed = arm()
for thread in range(1, threads):
    threading.Thread(target=run, args=(f"{name}-{thread}",), daemon=True).start()
print("armed", armed, flush=True)
run(name)
"""
PROCESSES, THREADS = 3, 2
# Has itself and its children forked, away from its session and its parents, for ever.
FLEEING = r"""
import os, time
while True:
    if os.fork() == 0:
        os.setsid()
    else:
        os._exit(0)
    open("fled", "w").write(str(os.getpid()))
"""


async def hostile(sandbox, **options):
    """Starts it, and returns when all of it runs."""
    await sandbox.write("hostile.py", HOSTILE.encode())
    process = await sandbox.start(f"exec python3 -I -S hostile.py h {PROCESSES} {THREADS}", **options)
    lines = 0
    async for output in process:
        lines += output.data.count(b"armed")
        if lines == PROCESSES:
            break
    while len(await gaps(sandbox)) < PROCESSES * THREADS:
        await asyncio.sleep(0.02)
    return process


async def gaps(sandbox) -> dict[str, float]:
    """Longest standstill of each thread, in seconds."""
    names = [e.name for e in await sandbox.list(".") if e.name.startswith("gap-") and not e.name.endswith(".new")]
    return {name: float(await sandbox.read(name)) for name in names}


async def was_opened(sandbox) -> bool:
    return "opened" in [entry.name for entry in await sandbox.list(".")]


def needs_freezer(pool) -> None:
    if not pool.host["cgroups"].get("freezer"):
        pytest.skip("no freezer here, and the tier says so")


async def test_nothing_runs_in_a_pause(pool):
    needs_freezer(pool)
    sandbox = await pool.create(Template("test"))
    await hostile(sandbox)
    await sandbox.pause()
    await asyncio.sleep(0.6)
    await sandbox.resume()
    for _ in range(100):  # until each has run again
        await asyncio.sleep(0.1)
        if min((await gaps(sandbox)).values()) > 0.55:
            break
    assert min((await gaps(sandbox)).values()) > 0.55


async def test_a_deadline_is_as_long_beside_pauses(pool):
    needs_freezer(pool)
    sandbox = await pool.create(Template("test"))
    deadline = (
        30.0 if isinstance(pool, MachinePool) else 2.0
    )  # without hardware's help a machine takes seconds to begin
    process = await hostile(sandbox, timeout_s=deadline)
    for _ in range(3):
        await sandbox.pause()
        await asyncio.sleep(0.3)
        await sandbox.resume()
    result = await process.wait()
    assert result.timed_out and deadline - 0.1 < result.seconds < 1.3 * deadline
    assert (await sandbox.exec("ls /proc | grep -c '^[0-9]'; true")).exit_code == 0
    assert (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[h]ostile.py'")).text == "0\n"


async def test_nobody_flees_a_deadline(pool):
    """Beside another command, which goes on; also where the commands are stopped by signals."""
    sandbox = await pool.create(Template("test"))
    await sandbox.write("fleeing.py", FLEEING.encode())
    await hostile(sandbox)
    fleeing = asyncio.create_task(sandbox.exec("python3 -I -S fleeing.py; sleep 100", timeout_s=0.5))
    assert (await fleeing).timed_out
    assert (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[f]leeing.py'")).text == "0\n"
    assert len(await sandbox.processes()) == 1 and len(await gaps(sandbox)) == PROCESSES * THREADS


async def test_what_is_killed_in_a_pause_ends_before_the_rest_goes_on(pool):
    needs_freezer(pool)
    sandbox = await pool.create(Template("test"))
    await hostile(sandbox)
    other = await sandbox.start("while true; do echo x >> more; sleep 0.005; done")
    await asyncio.sleep(0.1)
    await sandbox.pause()
    ends = asyncio.create_task(other.kill())
    await asyncio.sleep(0.1)
    await sandbox.resume()
    assert (await ends).timed_out and len(await sandbox.processes()) == 1


async def test_a_paused_one_can_be_ended(pool):
    """Also where frozen processes do not die before they are thawed."""
    sandbox = await pool.create(Template("test", ttl_s=600.0))
    await sandbox.start("sleep 1000")
    await sandbox.pause()
    await asyncio.wait_for(sandbox.kill(), 10.0)
    late = await pool.create(Template("test", ttl_s=1.0))
    await late.pause()
    for _ in range(100):
        if late.lost:
            break
        await asyncio.sleep(0.1)
    assert late.lost == "ttl"


@needs_criu
@pytest.mark.parametrize("pool", ["process", "daemon", *MACHINES], indirect=True)
async def test_nobody_looks_into_the_agent_while_it_is_saved(pool):
    sandbox = await pool.create(Template("test"))
    await hostile(sandbox)
    saved = [await sandbox.snapshot() for _ in range(3)]
    copies = [await sandbox.fork(), await pool.restore(saved[-1])]
    for one in (sandbox, *copies):
        await asyncio.sleep(0.1)
        assert not await was_opened(one)
        result = await one.exec("echo the real one; exit 3")
        assert (result.exit_code, result.text) == (3, "the real one\n") and len(await one.processes()) == 1
        await one.kill()
    for name in saved:
        await pool.delete_snapshot(name)


@needs_criu
async def test_nobody_looks_into_the_agent_while_it_moves(nodes):  # noqa: F811
    a, b = nodes
    sandbox = await a.create(Template("test"))
    await hostile(sandbox)
    await sandbox.pause()
    await sandbox.migrate(b.address)
    await asyncio.sleep(0.3)
    await sandbox.resume()
    await asyncio.sleep(0.1)
    assert not await was_opened(sandbox)
    assert min((await gaps(sandbox)).values()) > 0.25
    await sandbox.kill()


@needs_root
@pytest.mark.parametrize("version", [1, 2])
def test_the_freezer_of_each_version(version):
    """Holds what sends itself SIGCONT, lets in who moves itself in as another user, and lets what is killed die."""
    kind = "cgroup" if version == 1 else "cgroup2"
    lines = Path("/proc/self/mountinfo").read_text().splitlines(True)
    mounts = "".join(line for line in lines if f" - {kind} " in line)
    cgroups = limits.detect(mounts, Path("/proc/self/cgroup").read_text(), "test", ("freezer",))
    if cgroups.report["freezer"] != f"v{version}":
        pytest.skip(f"no freezer of version {version} that can be written")
    group = cgroups.make("one", 1 << 30, 64)
    top = f"{cgroups.hierarchies[0].directory}/../cgroup.procs"
    try:
        group.join(os.getpid())  # as the agent
        files = group.freezer.open_files()
        child = subprocess.Popen(
            ["bash", "-c", f"echo 0 >&{files[2]} || exit 9; while true; do kill -CONT $$; done"],
            pass_fds=files[2:], user=65534, group=65534, start_new_session=True, cwd="/",
        )  # fmt: skip
        limits.write(top, str(os.getpid()))
        for fd in files:
            os.close(fd)

        def used() -> int:
            """Ticks of the processor."""
            assert child.poll() is None
            return sum(map(int, Path(f"/proc/{child.pid}/stat").read_text().rsplit(")")[-1].split()[11:13]))

        def runs() -> bool:
            before = used()
            for _ in range(50):
                os.kill(child.pid, signal.SIGCONT)
                time.sleep(0.001)
            return used() > before

        while used() < 3:
            pass
        group.freezer.freeze()
        assert group.freezer.is_asked() and child.pid in group.freezer.members() and not runs()
        with group.freezer.whole_frozen():
            assert not group.freezer.is_asked() and not runs()
        assert group.freezer.is_asked() and not runs()
        group.freezer.thaw()
        assert not group.freezer.is_asked() and runs()
        group.freezer.freeze()
        child.kill()
        group.let_die()
        assert child.wait(5) == -signal.SIGKILL
    finally:
        limits.write(top, str(os.getpid()))
        while not group.remove() or not cgroups.close():
            pass


def without_mounts(kinds: str, *command: str) -> subprocess.CompletedProcess:
    """Runs a command where nothing of these kinds is mounted."""
    script = f"for m in $(awk '$3 ~ /^({kinds})$/ {{print $2}}' /proc/mounts); do umount -l $m || exit 99; done"
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{script}; exec "$@"', "sh", sys.executable, *command],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if run.returncode == 99:
        pytest.skip("mounts of cgroups cannot be taken away here")
    return run


@needs_root
@pytest.mark.slow
def test_with_cgroups_of_version_2_alone():
    """Two of these tests, where version 1 is not mounted."""
    names = ("test_nothing_runs_in_a_pause", "test_nobody_looks_into_the_agent_while_it_is_saved")
    tests = [f"{__file__}::{name}[process]" for name in names]
    run = without_mounts("cgroup", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    assert run.returncode == 0 and run.stdout.startswith(".. "), run.stdout


WITHOUT = """
import asyncio
from venusrl.core.errors import SandboxUnsupported
from venusrl.sandbox import SandboxPool, Template
async def main():
    async with SandboxPool(max_sandboxes=1) as pool:
        sandbox = await pool.create(Template("test"))
        print(pool.host["cgroups"]["freezer"])
        await sandbox.pause()
        await sandbox.resume()
        print((await sandbox.exec("echo goes on")).text.strip())
        try:
            await sandbox.snapshot()
        except SandboxUnsupported as error:
            print(error)
        try:
            print(await sandbox.park())
        except OSError as error:
            print(error.strerror)
asyncio.run(main())
"""


@needs_criu
def test_without_a_freezer_the_tier_says_so_and_nothing_is_saved():
    run = without_mounts("cgroup2?", "-c", WITHOUT)
    none, on, refused, parked = run.stdout.splitlines()
    assert (none, on) == ("None", "goes on") and "freezer cgroup" in refused and parked == os.strerror(95)


OWNER = """
import asyncio
from venusrl.sandbox import SandboxPool, Template
async def main():
    async with SandboxPool(max_sandboxes=1) as pool:
        sandbox = await pool.create(Template("test"))
        await sandbox.start("exec -a MARKER sleep 1000")
        await asyncio.sleep(0.2)
        await sandbox.pause()
        print(pool.spawner_pid, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


@pytest.mark.parametrize("both", [False, True], ids=["owner", "owner and spawner"])
def test_who_is_paused_ends_with_its_node(both):
    """With the owner, by its spawner; with both, when the next pool starts at the latest."""
    marker = f"paused-{secrets.token_hex(8)}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.replace("MARKER", marker)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    spawner = int(owner.stdout.readline())
    assert len(processes(marker)) >= 2  # the owner's own command line has it, too
    if both:
        os.kill(owner.pid, signal.SIGSTOP)  # or it would clean up
        os.kill(spawner, signal.SIGKILL)
    owner.kill()
    owner.wait()
    owner.stdout.close()

    async def next_pool():
        async with SandboxPool(max_sandboxes=1) as pool:
            await pool.create(Template("test"))

    if both:
        asyncio.run(next_pool())
    give_up = time.monotonic() + 10.0
    while processes(marker):
        assert time.monotonic() < give_up
        time.sleep(0.05)

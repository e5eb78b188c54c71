"""Sandboxes that are saved, restored and forked: what was there is there again, and nothing else."""

import asyncio
import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.sandbox.conftest import MACHINES, needs_criu, processes
from tests.sandbox.test_life import cgroups, until
from venusrl.core.errors import SandboxCapacity, SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox import SandboxPool, Template, client

here = pytest.param("process", marks=needs_criu)
saves = pytest.mark.parametrize("pool", [here, pytest.param("daemon", marks=needs_criu), *MACHINES], indirect=True)
in_process = pytest.mark.parametrize("pool", [here], indirect=True)

# Says on demand what it holds: of each kind of thing that a process can have, one.
_HOLDER = r"""
import ctypes, json, mmap, os, random, select, signal, socket, sys, threading, time
heap = os.urandom(20 << 20)
plain = open("plain", "w+b"); plain.write(b"0123456789"); plain.flush(); plain.seek(4)
gone = open("gone", "w+b"); gone.write(b"deleted"); gone.flush(); os.unlink("gone")
shared = mmap.mmap(os.open("plain", os.O_RDWR), 10)
private = mmap.mmap(os.open("plain", os.O_RDWR), 10, flags=mmap.MAP_PRIVATE); private[:3] = b"abc"
memory = os.memfd_create("memory"); os.write(memory, b"in memory")
left, right = socket.socketpair(); left.send(b"on its way")
read, write = os.pipe(); os.write(write, b"piped")
os.mkfifo("fifo"); fifo = os.open("fifo", os.O_RDWR); os.write(fifo, b"first")
poll = select.epoll(); poll.register(read, select.EPOLLIN)
server = socket.socket(socket.AF_UNIX); server.bind("/tmp/server"); server.listen()
handled = []
signal.signal(signal.SIGUSR1, lambda *_: handled.append("usr1"))
counted = [0]
def count():
    while True:
        counted[0] += 1; time.sleep(0.01)
threading.Thread(target=count, daemon=True).start()
os.chdir("/tmp"); os.environ["SEEN"] = "yes"; random.seed(7)
began = time.monotonic()
print("ready", flush=True)
for line in sys.stdin:
    os.kill(os.getpid(), signal.SIGUSR1)
    before = counted[0]; time.sleep(0.1)
    client = socket.socket(socket.AF_UNIX); client.connect("/tmp/server")
    print(json.dumps({
        "heap": hash(heap) and __import__("hashlib").sha256(heap).hexdigest(), "at": plain.tell(),
        "next": plain.read(2).decode(), "gone": os.pread(gone.fileno(), 99, 0).decode(), "shared": shared[:].decode(),
        "private": private[:].decode(), "memory": os.pread(memory, 99, 0).decode(), "cwd": os.getcwd(),
        "socket": right.recv(99, socket.MSG_PEEK).decode(), "polled": [fd == read for fd, _ in poll.poll(1)],
        "fifo": select.select([fifo], [], [], 0)[0] == [fifo], "handled": handled[-1:], "runs": counted[0] > before,
        "threads": threading.active_count(), "pid": os.getpid(), "seen": os.environ["SEEN"], "random": random.random(),
        "accepted": bool(server.accept()), "late": time.monotonic() < began, "off": abs(time.time() - float(line)) < 5,
    }), flush=True)
"""


async def start_holder(sandbox):
    await sandbox.write("holder.py", _HOLDER.encode())
    process = await sandbox.start("exec python3 -I -S holder.py", stdin=None)
    assert (await anext(aiter(process))).data == b"ready\n"
    return process


async def ask(process):
    await process.send(f"{time.time()}\n".encode())
    async for output in process:
        if output.stream != "kept":
            assert output.stream == "stdout", output.data.decode()
            return json.loads(output.data)


@saves
async def test_everything_is_there_again(pool, sandbox):
    await sandbox.exec("mkdir -p d; echo x > d/f; chmod 700 d; ln -s d/f link; ln d/f hard; touch -d @1000 old")
    await sandbox.exec("setfattr -n user.a -v b old 2>/dev/null; head -c 1000 /dev/zero | tr '\\0' z > /dev/shm/s")
    shell = await sandbox.start("v=here; cd d; while read line; do echo $v $PWD $line; done", stdin=None)
    terminal = await sandbox.start("stty -echo; while read line; do echo $(tty) $line $(stty size); done", pty=(40, 90))
    holder = await start_holder(sandbox)
    await sandbox.exec("sleep 963.5 &")
    seen = await ask(holder)
    assert seen["runs"] and seen["off"] and not seen["late"] and seen["cwd"] == "/tmp"

    saved = await sandbox.snapshot()
    after = await ask(holder)
    copy = await pool.restore(saved)
    there = await pool.restore(saved)
    for box in (sandbox, copy):
        listing = await box.exec(
            "stat -c '%n %a %h %s %Y %u' d d/f link hard old /dev/shm/s; readlink link; ps ax | wc -l"
        )
        if box is sandbox:
            expected = listing
        assert listing.output == expected.output
    copied = await copy.connect(holder.id)
    assert (await ask(copied)) == after and after | {"at": 4, "next": seen["next"], "random": 0} == seen | {"random": 0}
    again = await there.connect(holder.id)
    assert await ask(again) == after
    shells = [shell, await copy.connect(shell.id)]
    for number, process in enumerate(shells):
        await process.send(b"%d\n" % number)
        assert await _line(process) == b"here /workspace/d %d\n" % number
    copied = await copy.connect(terminal.id)
    await copied.send(b"hello\n")
    assert b"/dev/pts/0 hello 40 90" in await _line(copied)
    await pool.delete_snapshot(saved)


async def _line(process):
    async for output in process:
        if output.stream != "kept" and output.data.strip():
            return output.data


@saves
async def test_forks_go_their_own_ways(pool, sandbox):
    process = await sandbox.start("n=0; while read x; do n=$((n+x)); echo $n; done", stdin=None)
    await process.send(b"5\n")
    await _line(process)
    await sandbox.write("f", b"common")
    forks = [await sandbox.fork() for _ in range(2)]
    for number, box in enumerate((sandbox, *forks)):
        mine = process if box is sandbox else await box.connect(process.id)
        await mine.send(b"%d\n" % number)
        assert await _line(mine) == b"%d\n" % (5 + number)
        assert await box.read("f") == b"common"
        await box.write("f", b"%d" % number)
    assert [await box.read("f") for box in (sandbox, *forks)] == [b"0", b"1", b"2"]
    of_fork = await forks[0].fork()
    assert await of_fork.read("f") == b"1"
    await sandbox.kill()
    assert await of_fork.read("f") == await forks[0].read("f") == b"1"


@saves
async def test_what_is_random_differs(pool, sandbox):
    script = "while read x; do head -c 16 /dev/urandom | od -An -tx1; done"
    process = await sandbox.start(script, stdin=None)
    saved = await sandbox.snapshot()
    seen = set()
    for box in (sandbox, await pool.restore(saved), await pool.restore(saved)):
        mine = process if box is sandbox else await box.connect(process.id)
        await mine.send(b"\n")
        seen.add(await _line(mine))
    assert len(seen) == 3


@saves
async def test_what_goes_on_meanwhile_is_not_disturbed(pool, sandbox):
    """Commands that run while it is saved end as they would have, for their own callers, and only once."""
    slow = asyncio.create_task(sandbox.exec("sleep 0.7; echo slow; exit 3"))
    followed = await sandbox.start("for i in $(seq 40); do echo $i; sleep 0.02; done")
    watched = sandbox.watch(".")
    watching = asyncio.create_task(anext(watched))
    await asyncio.sleep(0.2)
    saved = asyncio.create_task(sandbox.snapshot())
    await asyncio.sleep(0.02)
    late = asyncio.create_task(sandbox.exec("echo late"))
    lines = b"".join([output.data async for output in followed])
    assert lines.split() == [b"%d" % i for i in range(1, 41)]
    assert (await slow).exit_code == 3 and (await slow).text == "slow\n" and (await late).text == "late\n"
    assert (await watching).kind == "lost"  # what happens meanwhile is not seen, and this says so
    await sandbox.exec("touch new")
    assert (await anext(watched)).name == "new"
    copy = await pool.restore(await saved)
    running = {process.script[:5]: process.id for process in await copy.processes()}
    assert running.keys() == {"sleep", "for i"}
    taken = await copy.connect(running["sleep"])
    assert (await taken.wait()).text == "slow\n" and taken.result.exit_code == 3


@saves
async def test_one_that_is_paused_stays_so(pool, sandbox):
    await sandbox.exec("(while true; do echo x >> ticks; sleep 0.01; done) &")
    await sandbox.pause()
    saved = await sandbox.snapshot()
    copy = await pool.restore(saved)
    assert len((await copy.exec("a=$(stat -c %s ticks); sleep 0.2; echo $(($(stat -c %s ticks) - a))")).text) > 1
    waiting = asyncio.create_task(sandbox.exec("stat -c %s ticks"))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await sandbox.resume()
    assert int((await waiting).text) > 0


@in_process
async def test_what_is_asked_while_it_is_saved_holds(pool, sandbox, monkeypatch):
    monkeypatch.setattr(client, "_GRACE_S", 0.05)  # no answer while it is saved is no fault
    await sandbox.exec("(while true; do echo x >> ticks; sleep 0.01; done) & head -c 30000000 /dev/urandom > big")
    for asks in ("pause", "resume", "pause"):
        saving = asyncio.create_task(sandbox.snapshot())
        await until(lambda: sandbox.is_parked)
        await getattr(sandbox, asks)()
        await saving
        assert sandbox.paused == (asks == "pause")
        counting = asyncio.create_task(sandbox.exec("stat -c %s ticks"))
        if asks == "pause":
            await asyncio.sleep(0.2)
            assert not counting.done()
            await sandbox.resume()
        assert int((await asyncio.wait_for(counting, 10)).text) > 0


@in_process
async def test_a_fork_that_is_given_up_leaves_nothing(pool, sandbox, tmp_path):
    for _ in range(3):
        forking = asyncio.create_task(sandbox.fork())
        await until(lambda: sandbox.is_parked)
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
    assert await pool.snapshots() == [] and list((tmp_path / "snapshots").iterdir()) == []
    assert pool.alive == 1 and (await sandbox.exec("echo on")).text == "on\n"


@in_process
async def test_a_copy_is_as_confined(pool, sandbox):
    await sandbox.exec("sleep 962.5 &")
    copy = await sandbox.fork()
    script = (
        "grep -E '^(Cap|NoNewPrivs|Seccomp)' /proc/self/status; cat /proc/1/environ /proc/1/maps; "
        r"find / -maxdepth 1 -printf '%M %u %g %p %l\n' | sort; "
        "mount -t tmpfs none /tmp; touch /run/disk/x /etc/x /x /usr/x; unshare -U true; ls /proc | grep -c '^[0-9]'; "
        "cat /proc/mounts | cut -d' ' -f2-4 | sed 's/,size=.*//' | sort"
    )
    seen = [(await box.exec(script)).text for box in (sandbox, copy)]
    assert "Seccomp:\t2" in seen[1] and "CapEff:\t0000000000000000" in seen[1] and "Permission denied" in seen[1]
    assert seen[0] == seen[1]
    users = {Path(f"/proc/{pid}/uid_map").read_text().split()[1] for pid in processes("962.5")}
    assert len(users) == 2, "they are of different users of the host"
    limits = [Path(f"/proc/{pid}/limits").read_text() for pid in processes("962.5")]
    assert limits[0] == limits[1]


@in_process
async def test_limits_hold_for_a_copy(pool, needs_memory_cgroup):
    sandbox = await pool.create(Template("small", memory_bytes=64 << 20, disk_bytes=16 << 20, pids=20))
    copy = await sandbox.fork()
    hog = await copy.exec("python3 -I -S -c 'bytearray(80 << 20)'; echo $?")
    assert hog.oom and "137" in hog.text
    assert "No space left" in (await copy.exec("head -c 20000000 /dev/zero > f")).text
    assert "fork" in (await copy.exec("for i in $(seq 40); do sleep 5 & done")).text
    held = await pool.create(Template("held", memory_bytes=64 << 20, disk_bytes=16 << 20, oom="hold", oom_wait_s=0.3))
    copy = await held.fork()
    with pytest.raises(SandboxLost) as lost:
        await copy.exec("python3 -I -S -c 'bytearray(80 << 20)'")
    assert lost.value.reason == "oom"


@in_process
async def test_memory_of_a_copy_is_as_much(pool, sandbox, needs_memory_cgroup):
    await start_holder(sandbox)
    before = (await pool.usage())[sandbox.id]
    copy = await sandbox.fork()
    after = (await pool.usage())[copy.id]
    assert 0.8 < after.private / before.private < 1.25


@in_process
async def test_a_template_is_shared_with_copies(pool, needs_memory_cgroup):
    """A file of the template that is mapped, and written here and there: only what was written is saved."""
    template = Template("warm", setup=("head -c 50000000 /dev/urandom > warm; mkdir d; echo x > d/a; echo y > d/b",))
    sandbox = await pool.create(template)
    script = (
        "import mmap, sys; f = open('warm', 'rb')\n"
        "warm = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)\n"
        "for at in range(0, len(warm), 4096): warm[at]\n"
        "for at in range(0, 5 << 20, 4096): warm[at] = 7\n"
        "print(1, flush=True)\n"
        "for line in sys.stdin: print(warm[4096], sum(warm[at] for at in range(0, len(warm), 4096)), flush=True)"
    )
    process = await sandbox.start(['exec python3 -I -S -c "$S"'][0], user_env={"S": script}, stdin=None)
    assert (await anext(aiter(process))).data == b"1\n"
    await sandbox.exec(
        "rm -r d; mkdir d; echo z > d/c; echo new > warm.txt; rm warm.txt; mv d e; mkdir d; rmdir e 2>&1"
    )
    saved = await sandbox.snapshot()
    [snapshot] = await pool.snapshots()
    used = (await pool.usage())[sandbox.id].private
    assert 5 << 20 < snapshot.bytes < used * 1.1
    copy = await pool.restore(saved)
    copied = await copy.connect(process.id)
    sums = []
    for one in (process, copied):
        await one.send(b"\n")
        sums.append(await _line(one))
    assert sums[0] == sums[1] and sums[0].startswith(b"7 ")
    listing = [(await box.exec("find . | sort; cat e/c; md5sum warm")).text for box in (sandbox, copy)]
    assert listing[0] == listing[1] and "d/a" not in listing[1] and "z\n" in listing[1]
    assert (await pool.usage())[copy.id].private < used * 1.25
    with pytest.raises(SandboxError, match="in use"):
        pool._shelf.store.delete(snapshot.layer)


# What goes wrong


@in_process
async def test_a_damaged_snapshot_starts_nothing(pool, sandbox, tmp_path):
    await sandbox.exec("sleep 961.5 &")
    saved = await sandbox.snapshot()
    await sandbox.kill()
    folder = tmp_path / "snapshots" / saved
    files = sorted(path for path in folder.iterdir())
    rng = random.Random(3)
    for path in [*rng.sample(files, 8), folder / "manifest.json"]:
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole + b"x", _flipped(whole, rng), None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            if damaged == whole or (path.name == "manifest.json" and _same(damaged, whole)):
                path.write_bytes(whole)
                continue
            with pytest.raises(SandboxError, match="damaged"):
                await pool.restore(saved)
            assert pool.alive == 0 and processes("961.5") == []
            path.unlink(missing_ok=True)
            path.write_bytes(whole)
    assert (await (await pool.restore(saved)).exec("echo whole")).text == "whole\n"


def _flipped(data, rng):
    at = rng.randrange(len(data)) if data else 0
    return data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :] if data else b"y"


def _same(damaged, whole):
    try:
        return json.loads(damaged)["files"] == json.loads(whole)["files"]
    except (TypeError, ValueError, KeyError):
        return False


@saves
async def test_there_is_no_such_snapshot(pool):
    for name in ("", "../x", "0" * 16, "nothing"):
        with pytest.raises(SandboxError, match="no snapshot"):
            await pool.restore(name)
    with pytest.raises(SandboxError, match="no snapshot"):
        await pool.delete_snapshot("0" * 16)


@in_process
async def test_images_that_criu_refuses_leave_nothing(pool, sandbox, tmp_path):
    """Whole, but wrong: everything that had been restored is gone again."""
    await sandbox.exec("sleep 960.5 &")
    saved = await sandbox.snapshot()
    await sandbox.kill()
    folder = tmp_path / "snapshots" / saved
    store = pool._snapshots
    staged = store.stage()
    for path in folder.iterdir():
        (staged / path.name).write_bytes(path.read_bytes())
    (staged / "manifest.json").unlink()
    [core] = [path for path in staged.glob("fdinfo-2.img")]
    core.write_bytes(core.read_bytes()[:-10])
    broken = store.finish(staged, type(store.open(saved))(**{**vars(store.open(saved)), "id": "f" * 16}))
    with pytest.raises(SandboxError, match="cannot be restored"):
        await pool.restore(broken.id)
    assert pool.alive == 0 and processes("960.5") == []
    await until(lambda: not cgroups(pool.spawner_pid))
    assert (await (await pool.restore(saved)).exec("echo fine")).text == "fine\n"


@needs_criu
async def test_a_full_disk_loses_nothing(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", small], check=True)
    try:
        async with SandboxPool(max_sandboxes=2, snapshots=small / "s") as pool:
            sandbox = await pool.create(Template("large"))
            holder = await start_holder(sandbox)
            with pytest.raises(SandboxError, match=r"(?i)cannot be saved"):
                await sandbox.snapshot()
            assert (await ask(holder))["runs"] and (await sandbox.exec("echo on")).text == "on\n"
            assert list((small / "s").iterdir()) == []
            tiny = await pool.create(Template("tiny"))
            saved = await tiny.snapshot()
            await tiny.kill()
            assert (await (await pool.restore(saved)).exec("echo fits")).text == "fits\n"
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@in_process
async def test_a_kill_ends_what_is_being_saved_or_restored(pool, sandbox):
    await start_holder(sandbox)
    saved = await sandbox.snapshot()
    saving = asyncio.create_task(sandbox.snapshot())
    await asyncio.sleep(0.05)
    await sandbox.kill()
    with pytest.raises(SandboxError):
        await saving
    assert pool.alive == 0
    restoring = asyncio.create_task(pool.restore(saved))
    await asyncio.sleep(0.06)
    restoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    await until(lambda: pool.alive == 0 and not processes("holder.py"))
    assert (await (await pool.restore(saved)).exec("echo fine")).text == "fine\n"


@in_process
async def test_a_caller_who_gives_up_leaves_a_sandbox_that_runs(pool, sandbox):
    holder = await start_holder(sandbox)
    for after in (0.0, 0.01, 0.05, 0.1):
        saving = asyncio.create_task(sandbox.snapshot())
        await asyncio.sleep(after)
        saving.cancel()
        await asyncio.wait({saving})
        assert (await ask(holder))["runs"] and not sandbox.paused


@needs_criu
async def test_the_death_of_the_spawner_ends_all_of_it(tmp_path):
    async with SandboxPool(max_sandboxes=4, snapshots=tmp_path) as pool:
        sandbox = await pool.create(Template("a"))
        await start_holder(sandbox)
        saved = await sandbox.snapshot()
        for work in (sandbox.snapshot, lambda: pool.restore(saved)):
            task = asyncio.create_task(work())
            await asyncio.sleep(0.06)
            os.kill(pool.spawner_pid, 9)
            with pytest.raises(SandboxError):
                await task
            await until(lambda: not processes("holder.py") and not processes("criu"))
            sandbox = await pool.create(Template("b"))
            await start_holder(sandbox)
        assert (await (await pool.restore(saved)).exec("echo fine")).text == "fine\n"
    assert [path.name for path in tmp_path.iterdir()] == [saved]


@needs_criu
async def test_what_a_dead_process_was_writing_is_removed(tmp_path):
    (tmp_path / ".staged-left").mkdir()
    (tmp_path / ".staged-left/pages-1.img").write_bytes(b"x" * 1000)
    (tmp_path / ".theirs").mkdir()
    async with SandboxPool(max_sandboxes=2, snapshots=tmp_path) as pool:
        saved = await (await pool.create(Template("a"))).snapshot()
    assert {path.name for path in tmp_path.iterdir()} == {saved, ".theirs"}


@needs_criu
async def test_another_pool_restores_it(tmp_path):
    async with SandboxPool(max_sandboxes=1, snapshots=tmp_path) as pool:
        sandbox = await pool.create(Template("a", env={"E": "e"}))
        await sandbox.write("f", b"mine")
        saved = await sandbox.snapshot()
        with pytest.raises(SandboxCapacity):
            async with SandboxPool(max_sandboxes=1, wait_s=0.1, snapshots=tmp_path) as full:
                await full.create(Template("b"))
                await full.restore(saved)
    async with SandboxPool(max_sandboxes=1, snapshots=tmp_path) as pool:
        copy = await pool.restore(saved)
        assert copy.template.env == {"E": "e"} and (await copy.exec("cat f; echo $E")).text == "minee\n"


@needs_criu
@pytest.mark.parametrize("pool", ["python"], indirect=True)
async def test_the_python_agent_says_why_not(pool, sandbox):
    for call in (sandbox.snapshot, sandbox.fork):
        with pytest.raises(SandboxUnsupported, match="C compiler"):
            await call()
    assert (await sandbox.exec("echo on")).text == "on\n"


@in_process
async def test_twenty_rounds_leave_nothing(pool, sandbox, tmp_path):
    def counts():
        spawner = pool.spawner_pid
        return (
            len(os.listdir(f"/proc/{spawner}/fd")),
            len(os.listdir("/proc/self/fd")),
            len(Path("/proc/self/mountinfo").read_text().splitlines()),
            len(cgroups(spawner)),
        )

    async def round_():
        copy = await sandbox.fork()
        assert (await copy.exec("echo x")).text == "x\n"
        await copy.kill()

    await round_()
    before, roots = counts(), set(Path("/tmp").glob(".criu.mntns*"))
    for _ in range(20):
        await round_()
    await until(lambda: counts() == before)
    assert list((tmp_path / "snapshots").iterdir()) == [] and set(Path("/tmp").glob(".criu.mntns*")) == roots

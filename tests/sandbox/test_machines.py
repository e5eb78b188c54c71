"""Machines: what they have in common beyond the contract, and what is particular to each kind."""

import asyncio
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sandbox.conftest import MACHINES, ROOT, machine_pool, processes
from tests.sandbox.test_life import until
from tests.sandbox.test_migration import two
from venusrl.core.errors import ConfigError, SandboxCapacity, SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox import SandboxPool, Template
from venusrl.sandbox.machines import pages
from venusrl.sandbox.machines.image import cpio, in_order
from venusrl.sandbox.machines.pool import MachinePool

SMALL = Template("small", memory_bytes=96 << 20, disk_bytes=32 << 20)
each = pytest.mark.parametrize("backend", MACHINES)
cloned = pytest.mark.parametrize("backend", MACHINES[:2])
qemu = pytest.mark.parametrize("backend", MACHINES[:1])
gvisor = pytest.mark.parametrize("backend", MACHINES[2:])


def of_machines() -> list[int]:
    return processes("runsc") + processes("qemu-system")


@each
async def test_many_come_and_go_and_leave_nothing(backend, tmp_path):
    async with machine_pool(backend, max_sandboxes=6, folder=tmp_path / "m") as pool:
        boxes = await asyncio.gather(*(pool.create(SMALL) for _ in range(6)))
        with pytest.raises(SandboxCapacity):
            pool._wait_s = 0.1
            await pool.create(SMALL)
        await asyncio.gather(*(box.write("id", box.id.encode()) for box in boxes))
        script = "cat id; echo; head -c 8 /dev/urandom | od -An -tx1"
        seen = [(await box.exec(script)).text.split("\n")[:2] for box in boxes]
        assert [own for own, _ in seen] == [box.id for box in boxes] and len({drawn for _, drawn in seen}) == 6
        usage = await pool.usage()
        assert usage.keys() == {box.id for box in boxes}
        assert all(0 < used.private < 400 << 20 for used in usage.values())
        await boxes[0].kill()
        assert pool.stats().ended == {"killed": 1}
        with pytest.raises(SandboxLost, match="killed"):
            await boxes[0].exec("true")
        assert (await boxes[1].exec("echo on")).text == "on\n"
    assert [box.lost for box in boxes[1:]] == ["closed"] * 5
    assert list((tmp_path / "m").iterdir()) == []
    await until(lambda: not of_machines())


@each
async def test_time_is_right_in_copies(backend, tmp_path):
    async with machine_pool(backend, snapshots=tmp_path / "s") as pool:
        sandbox = await pool.create(SMALL)
        saved = await sandbox.snapshot()
        await asyncio.sleep(2.0)
        for box in (sandbox, await pool.restore(saved)):
            assert abs(float((await box.exec("date +%s.%N")).text) - time.time()) < 1.0


@each
async def test_one_that_ends_by_itself_is_said_to_be_lost(backend):
    async with machine_pool(backend) as pool:
        sandbox = await pool.create(SMALL)
        waiting = asyncio.create_task(sandbox.exec("sleep 60"))
        await asyncio.sleep(0.2)
        pool._machines[sandbox.id].group.kill()
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(waiting, 10)
        await until(lambda: pool.alive == 0)
        assert (await (await pool.create(SMALL)).exec("echo next")).text == "next\n"


@each
async def test_nothing_outlives_its_owner(backend, tmp_path):
    async with machine_pool(backend):
        pass  # skips where there is none
    script = f"""
import asyncio
from venusrl.sandbox import Template
from venusrl.sandbox.machines.pool import MachinePool
async def main():
    async with MachinePool({backend!r}, max_sandboxes=2, folder={str(tmp_path / "m")!r}) as pool:
        sandbox = await pool.create(Template("left", memory_bytes=96 << 20, disk_bytes=32 << 20))
        await sandbox.start("sleep 954.5", follow=False)
        print("made", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout.readline() == "made\n"
        owner.send_signal(signal.SIGKILL)
    await until(lambda: not of_machines())
    async with machine_pool(backend, folder=tmp_path / "m") as pool:
        await (await pool.create(SMALL)).kill()
        assert len(list((tmp_path / "m").iterdir())) == 1


@each
async def test_a_set_up_that_fails_says_so(backend):
    async with machine_pool(backend) as pool:
        with pytest.raises(SandboxError, match="ended with 3: because"):
            await pool.create(Template("fails", setup=("echo because; exit 3",)))
        with pytest.raises(SandboxError, match="no directory"):
            await pool.create(Template("none", lowers=("/nowhere/at/all",)))
        await until(lambda: not of_machines())


@qemu
async def test_a_guest_that_does_not_come_up_says_why(backend, tmp_path):
    (tmp_path / "root/init").mkdir(parents=True)  # cannot be run
    (tmp_path / "archive").write_bytes(b"".join(cpio(tmp_path / "root")))
    async with machine_pool(backend) as pool:
        pool.backend._image = dataclasses.replace(pool.backend._image, initramfs=tmp_path / "archive")
        with pytest.raises(SandboxError, match=r"(?s)the guest says nothing, and ended .* Kernel panic"):
            await pool.create(Template("broken"))
        await until(lambda: not of_machines())


def test_modules_are_loaded_after_what_they_need(tmp_path):
    # From one release of Debian's 6.1 to the next, virtio_ring's need of virtio became virtio's of virtio_ring.
    needs = {"a": "", "b-c": "a", "d": "in_the_kernel,b_c,a", "e": "d,a", "unused": "a"}
    found = {}
    for name, needed in needs.items():
        found[name.replace("-", "_")] = tmp_path / f"{name}.ko"
        (tmp_path / f"{name}.ko").write_bytes(b"\x7fELF\0license=GPL\0depends=%s\0name=x\0" % needed.encode())
    assert [path.name for path in in_order(found, ("in_the_kernel", "e", "b_c"))] == ["a.ko", "b-c.ko", "d.ko", "e.ko"]


@each
async def test_it_moves_to_another_node(backend, tmp_path):
    async with machine_pool(backend):
        pass
    flags = [
        [f"--backend={backend}", f"--templates={tmp_path}/{name}", f"--snapshots={tmp_path}/s{name}"] for name in "ab"
    ]
    async with two(flags=flags) as (a, b):
        sandbox = await a.create(SMALL)
        await sandbox.write("f", b"mine")
        lines = await sandbox.start("i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done")
        slow = asyncio.create_task(sandbox.exec("sleep 3; echo slow"))
        first = await anext(aiter(lines))
        for node in (b, a, b):
            await sandbox.migrate(node.address)
            assert [row["id"] for row in await node.list()] == [sandbox.id]
            assert await sandbox.read("f") == b"mine"
        assert (await slow).text == "slow\n"
        seen = first.data
        async for output in lines:
            seen += output.data
            if seen.count(b"\n") > 60:
                break
        assert [int(line) for line in seen.split()[:60]] == list(range(1, 61))
        assert await a.list() == []
        with pytest.raises(SandboxUnsupported, match="memory"):
            await b.resize(sandbox, 1 << 30)
        os.kill(a.process.pid, signal.SIGKILL)
        assert (await sandbox.exec("echo on")).text == "on\n"
        with pytest.raises(SandboxError):
            await sandbox.migrate(a.address)
        assert (await sandbox.exec("cat f")).text == "mine"


@each
async def test_a_full_disk_leaves_it_running(backend, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=True)
    try:
        async with machine_pool(backend, snapshots=small / "s") as pool:
            sandbox = await pool.create(SMALL)
            await sandbox.exec("head -c 5000000 /dev/urandom > f")
            with pytest.raises((SandboxError, OSError)):
                await sandbox.snapshot()
            assert (await sandbox.exec("stat -c %s f")).text == "5000000\n"
            assert list((small / "s").iterdir()) == [] and pool.alive == 1
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@each
async def test_a_damaged_snapshot_starts_nothing(backend, tmp_path):
    async with machine_pool(backend, snapshots=tmp_path / "s", max_sandboxes=1) as pool:
        sandbox = await pool.create(SMALL)
        saved = await sandbox.snapshot()
        await sandbox.kill()
        largest = max((tmp_path / "s" / saved).iterdir(), key=lambda path: path.stat().st_size)
        whole = largest.read_bytes()
        largest.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(SandboxError, match=f"damaged: {largest.name} is not what was saved"):
            await pool.restore(saved)
        assert pool.alive == 0 and pool._machines == {}
        largest.write_bytes(whole)
        assert (await (await pool.restore(saved)).exec("echo fine")).text == "fine\n"


@each
async def test_a_caller_who_gives_up_leaves_nothing_half_done(backend, tmp_path):
    """Given up at several moments: what is not handed over is not there, neither machine nor folder nor snapshot."""
    async with machine_pool(backend, snapshots=tmp_path / "s", folder=tmp_path / "m", max_sandboxes=2) as pool:
        sandbox = await pool.create(SMALL)
        machines = len(of_machines())
        kinds = {"snapshot": sandbox.snapshot, "fork": sandbox.fork, "create": lambda: pool.create(SMALL)}
        given_up, kept = dict.fromkeys(kinds, 0), set()
        for wait_s in (0.0, 0.02, 0.05, 0.1):
            for kind, work in kinds.items():
                task = asyncio.create_task(work())
                await asyncio.sleep(wait_s)
                too_late = task.done()
                task.cancel()
                (done,) = await asyncio.gather(task, return_exceptions=True)
                assert isinstance(done, asyncio.CancelledError) is not too_late, f"{kind} after {wait_s} s: {done!r}"
                given_up[kind] += not too_late
                if too_late and kind == "snapshot":
                    kept.add(done)
                elif too_late:
                    assert (await done.exec("echo own")).text == "own\n"
                    await done.kill()
                assert (await sandbox.exec("echo on", timeout_s=20)).text == "on\n"
                await until(lambda: pool.alive == 1 and list(pool._machines) == [sandbox.id])
                await until(lambda: len(of_machines()) == machines)
                assert {saved.id for saved in await pool.snapshots()} == kept
                await until(lambda: {path.name for path in (tmp_path / "s").glob("*")} == kept)
        assert min(given_up.values()) > 0, "nothing was given up in time"
        other = await pool.create(SMALL)
        assert (await other.exec("echo two")).text == "two\n"
        with pytest.raises(SandboxCapacity):  # both places are taken, and no more than both
            pool._wait_s = 0.1
            await pool.create(SMALL)


@cloned
async def test_what_is_saved_is_what_was_written(backend, tmp_path):
    """20 MB more in a clone are 20 MB more in its snapshot, and pages that it shared are shared again."""
    folders = {"templates": tmp_path / "t", "snapshots": tmp_path / "s"}
    async with machine_pool(backend, **folders) as pool:
        sandbox = await pool.create(SMALL)
        await sandbox.exec("true")
        sizes = []
        for _ in range(2):
            saved = await sandbox.snapshot()
            sizes.append((await pool.snapshots())[-1].bytes)
            await sandbox.exec("head -c 20000000 /dev/urandom > own")
        assert sizes[0] < 12_000_000
        saved = await sandbox.snapshot()
        more = (await pool.snapshots())[-1].bytes - sizes[0]
        assert 20_000_000 < more < 34_000_000
        copy = await pool.restore(saved)
        digests = [(await box.exec("sha256sum own")).text for box in (sandbox, copy)]
        assert digests[0] == digests[1]
        assert (await pool.usage())[copy.id].private < 140 << 20
    async with machine_pool(backend, templates=tmp_path / "t", snapshots=tmp_path / "s") as pool:
        assert (await (await pool.restore(saved)).exec("sha256sum own")).text == digests[0]
    async with machine_pool(backend, snapshots=tmp_path / "s") as pool:
        with pytest.raises(SandboxError, match="cloned from is not here"):
            await pool.restore(saved)


@gvisor
async def test_gvisor_is_a_kernel_of_its_own(backend):
    async with machine_pool(backend) as pool:
        sandbox = await pool.create(SMALL)
        script = (
            "uname -r; grep -E '^Cap(Inh|Prm|Eff)' /proc/self/status; id -u; mknod /tmp/d b 8 0 && cat /tmp/d; "
            "ls /dev/sda /dev/vda /sys /proc/1/root/root/.ssh; grep -c . /proc/net/route; echo > /usr/x; kill -9 1"
        )
        text = (await sandbox.exec(script)).text
        assert os.uname().release not in text
        assert text.count("\t0000000000000000\n") == 3 and "\n1000\n" in text
        assert "/tmp/d: No such de" in text and "/usr/x: Permission denied" in text
        assert "kill: (1) - Operation not permitted" in text
        assert "/dev/sda" in text and text.count("No such file or directory") >= 2


@gvisor
async def test_a_container_that_takes_too_much_ends_as_oom(backend):
    async with machine_pool(backend) as pool:
        sandbox, other = await pool.create(SMALL), await pool.create(SMALL)
        if not pool._machines[sandbox.id].group.exists:
            pytest.skip("no writable memory cgroup on this host")
        with pytest.raises(SandboxLost, match="oom"):
            await sandbox.exec("python3 -I -S -c 'x = bytearray(1) * (600 << 20)'")
        assert (await other.exec("echo on")).text == "on\n"


@each
async def test_a_snapshot_of_another_kind_is_refused(backend, tmp_path):
    async with machine_pool(backend, snapshots=tmp_path) as pool:
        saved = await (await pool.create(SMALL)).snapshot()
        async with SandboxPool(max_sandboxes=1, snapshots=tmp_path) as other:
            if other.host["mode"] == "range":
                with pytest.raises(SandboxError, match=f"of the kind '{backend}'"):
                    await other.restore(saved)


@each
async def test_lowers_of_any_size_and_what_does_not_fit(backend, tmp_path):
    lower = tmp_path / "lower"
    (lower / "d").mkdir(parents=True)
    for i in range(3):
        (lower / f"d/{i}").write_bytes(random.Random(i).randbytes(900_000))
    (lower / "link").symlink_to("d/0")
    few = Template("lowers", memory_bytes=96 << 20, disk_bytes=32 << 20, lowers=(str(lower),), file_bytes=1 << 20)
    async with machine_pool(backend) as pool:
        sandbox = await pool.create(few)
        result = await sandbox.exec("cat d/0 d/1 d/2 | wc -c; readlink link; stat -c %u d/0")
        assert result.text == "2700000\nd/0\n1000\n"
        (lower / "d/large").write_bytes(bytes(2 << 20))
    async with machine_pool(backend) as pool:
        with pytest.raises(SandboxError, match="lowers of 'lowers' do not fit"):
            await pool.create(few)


def test_a_kind_that_there_is_not():
    with pytest.raises(ConfigError, match="qemu, firecracker, gvisor"):
        MachinePool("docker", max_sandboxes=1)


# Pages

_CHILD = r"""
import mmap, os, sys
f = open(sys.argv[1], "r+b")
m = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
print("up", flush=True)
for line in sys.stdin:
    what, *rest = line.split()
    if what == "write":
        at, data = int(rest[0]), bytes.fromhex(rest[1]); m[at:at + len(data)] = data
    elif what == "touch":
        m[int(rest[0])]
    elif what == "forget":
        m.madvise(mmap.MADV_DONTNEED, int(rest[0]), int(rest[1]))
    elif what == "all":
        sys.stdout.buffer.write(m[:]); sys.stdout.buffer.flush(); continue
    print("ok", flush=True)
"""


class _Mapper:
    """A process that maps a file privately."""

    def __init__(self, file: Path, size: int):
        self.size = size
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.read(3)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += self.process.stdout.read(count - len(data))
        return data

    def say(self, *words) -> None:
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())
        assert self.read(3) == b"ok\n"

    def all(self) -> bytes:
        self.process.stdin.write(b"all\n")
        return self.read(self.size)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.mark.parametrize("seed", range(3))
def test_pages_are_those_that_were_written(seed, tmp_path):
    """Against a plain model: what another process is given is what the first one has, and no page more is saved."""
    chance = random.Random(seed)
    count = 200
    size = count * pages.PAGE
    file = tmp_path / "memory"
    model = bytearray(chance.randbytes(size // 2) + bytes(size - size // 2))
    file.write_bytes(model)
    original = bytes(model)
    first, second = _Mapper(file, size), _Mapper(file, size)
    try:
        written = set()
        for _ in range(300):
            at = chance.randrange(size - 64)
            what = chance.random()
            if what < 0.7:
                data = chance.randbytes(chance.randrange(1, 64))
                first.say("write", at, data.hex())
                model[at : at + len(data)] = data
                written |= {at // pages.PAGE, (at + len(data) - 1) // pages.PAGE}
            elif what < 0.9:
                first.say("touch", at)
            else:
                start = at // pages.PAGE * pages.PAGE
                first.say("forget", start, pages.PAGE)  # the file's again
                model[start : start + pages.PAGE] = original[start : start + pages.PAGE]
                written.discard(start // pages.PAGE)
        assert first.all() == model
        assert pages.save(first.process.pid, file, tmp_path / "pages") == len(written)
        pages.load(second.process.pid, file, tmp_path / "pages")
        assert second.all() == model
        assert file.read_bytes() == original
    finally:
        first.end(), second.end()


def test_pages_that_do_not_fit_are_refused(tmp_path):
    file, larger = tmp_path / "memory", tmp_path / "memory-of-more"
    file.write_bytes(bytes(4 * pages.PAGE))
    larger.write_bytes(bytes(8 * pages.PAGE))
    one, other = _Mapper(larger, 8 * pages.PAGE), _Mapper(file, 4 * pages.PAGE)
    try:
        one.say("write", 7 * pages.PAGE, "aa")
        assert pages.save(one.process.pid, larger, tmp_path / "pages") == 1
        with pytest.raises(SandboxError, match="larger memory"):
            pages.load(other.process.pid, file, tmp_path / "pages")
        saved = (tmp_path / "pages").read_bytes()
        for damaged in (b"", saved[:-1], saved + b"x", b"\xff" * 8 + saved[8:]):
            (tmp_path / "pages").write_bytes(damaged)
            with pytest.raises(SandboxError, match="damaged"):
                pages.load(one.process.pid, larger, tmp_path / "pages")
    finally:
        one.end(), other.end()


@pytest.mark.parametrize("seed", range(20))
def test_a_packed_file_is_the_same_file(seed, tmp_path):
    chance = random.Random(seed)
    size = chance.randrange(1, 600) * pages.PAGE
    file = tmp_path / "memory"
    with open(file, "wb") as f:
        f.truncate(size)
        for _ in range(chance.randrange(6)):
            at = chance.randrange(size)
            os.pwrite(f.fileno(), chance.randbytes(min(chance.randrange(1, 300_000), size - at)), at)
    pages.pack(file, tmp_path / "packed")
    pages.unpack(tmp_path / "packed", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    held = os.stat(file).st_blocks * 512
    assert (tmp_path / "packed").stat().st_size <= held + held // 64 + 3 * pages.PAGE

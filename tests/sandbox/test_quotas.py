"""What templates take of the host's disk, whatever the way, and lower directories that cannot be copied."""

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from tests.sandbox.conftest import MACHINES, end, machine_pool, needs_root, start_daemon
from venusrl.core.errors import SandboxError
from venusrl.sandbox import SandboxPool, Template
from venusrl.sandbox.daemon.client import Node
from venusrl.sandbox.layers import disk_use

MIB = 1 << 20
MOST, SLACK = 32 * MIB, 160 * MIB
_PYTHON = "python3 -I -S -c '{}'"
WAYS = {
    "allocated, not written": "for i in $(seq 100); do fallocate -l 60M f$i || exit 3; done",
    "written": "for i in $(seq 100); do head -c 60000000 /dev/zero > f$i || exit 3; done",
    "small files": _PYTHON.format('for i in range(200000): open(f"s{i}", "w").write("x")'),
    "empty files": _PYTHON.format('for i in range(400000): open(f"s{i}", "w")'),
    "long links": _PYTHON.format('import os\nfor i in range(100000): os.symlink("x" * 2000, f"l{i}")'),
    "extended attributes": _PYTHON.format(
        "import os\n"
        'for i in range(100000): open(f"s{i}", "w"); os.setxattr(f"s{i}", "user.a", os.urandom(1500).hex().encode())'
    ),
    "without a name": _PYTHON.format(
        'import os\nkept = []\nfor i in range(100):\n f = open("u", "wb"); os.unlink("u"); f.write(bytes(60000000)); '
        "f.flush(); kept.append(f)"
    ),
}


class Space(threading.Thread):
    """The least that is free on the disk of a folder while a test runs."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder, self.over = folder, threading.Event()
        self.first = self.least = self.free()

    def free(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bfree * found.f_frsize

    def run(self):
        while not self.over.wait(0.005):
            self.least = min(self.least, self.free())

    def taken(self) -> int:
        self.over.set()
        self.join()
        return self.first - self.least


@needs_root
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.slow] * (way in ("empty files", "long links", "extended attributes")))
        for way in WAYS
    ],
)
async def test_a_set_up_takes_no_more_than_it_may(way, tmp_path):
    async with SandboxPool(max_sandboxes=2, templates=tmp_path / "t") as pool:
        space = Space(tmp_path)
        space.start()
        with pytest.raises(SandboxError, match=r"layer_bytes=33554432|ended with 3"):
            await pool.create(Template("greedy", setup=(WAYS[way],), layer_bytes=MOST))
        assert space.taken() < MOST + SLACK
        assert not [path for path in (tmp_path / "t").iterdir() if path.name.startswith(".")]
        assert (await (await pool.create(Template("next", setup=("echo x > x",)))).read("x")) == b"x\n"


def test_disk_use_counts_as_the_file_system_does(tmp_path):
    """Blocks, not lengths; what has two names once; an inode for everything."""
    (tmp_path / "full").write_bytes(os.urandom(100_000))
    os.link(tmp_path / "full", tmp_path / "again")
    with open(tmp_path / "sparse", "wb") as f:
        f.truncate(1 << 40)
    os.symlink("x" * 2000, tmp_path / "link")
    used = sum(os.lstat(tmp_path / name).st_blocks * 512 for name in ("full", "sparse", "link"))
    assert disk_use(tmp_path) == used + 3 * 256


@pytest.fixture(params=["pool", "daemon"])
async def maker(request, tmp_path):
    if request.param == "pool":
        async with SandboxPool(max_sandboxes=4, templates=tmp_path / "store") as pool:
            yield pool
        return
    daemon, address = await asyncio.to_thread(
        start_daemon, f"--lowers={tmp_path}", f"--templates={tmp_path / 'store'}", "--max_sandboxes=4"
    )
    async with Node(address) as node:
        yield node
    assert end(daemon) == 0


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


async def test_what_a_template_cannot_hold_is_named_and_mended_builds(maker, tmp_path):
    lower = tmp_path / "lower"
    (lower / "d").mkdir(parents=True)
    (lower / "f").write_text("f")
    template = Template("mended", lowers=(str(lower),))
    for kind, make in (("FIFO", os.mkfifo), ("socket", _socket), ("device", lambda p: os.mknod(p, 0o20600, 0x103))):
        if kind == "device" and os.geteuid() != 0:
            continue
        make(lower / "d/it")
        with pytest.raises(SandboxError, match=f"d/it' is a {kind}"):
            await asyncio.wait_for(maker.create(template), 20)
        os.unlink(lower / "d/it")
    with pytest.raises(SandboxError, match="is no directory"):
        await maker.create(Template("file", lowers=(str(lower / "f"),)))
    sandbox = await maker.create(template)
    assert await sandbox.read("f") == b"f"


async def test_a_set_up_that_fails_is_tried_again_with_what_is_there_then(maker, tmp_path):
    lower = tmp_path / "lower"
    lower.mkdir()
    template = Template("again", lowers=(str(lower),), setup=("test -e there",))
    for _ in range(2):
        with pytest.raises(SandboxError, match="ended with 1"):
            await maker.create(template)
    (lower / "there").write_text("now")
    assert await (await maker.create(template)).read("there") == b"now"


async def test_lower_directories_are_counted_before_they_are_copied(maker, tmp_path):
    lower = tmp_path / "lower"
    lower.mkdir()
    with open(lower / "sparse", "wb") as f:
        f.truncate(1 << 40)  # which nobody reads
    with pytest.raises(SandboxError, match="layer_bytes=16777216"):
        await asyncio.wait_for(maker.create(Template("sparse", lowers=(str(lower),), layer_bytes=16 * MIB)), 5)
    os.unlink(lower / "sparse")
    with pytest.raises(SandboxError, match="overlap"):
        await maker.create(Template("itself", lowers=(str(tmp_path),)))
    (tmp_path / "store/within").mkdir()
    with pytest.raises(SandboxError, match="overlap"):
        await maker.create(Template("within", lowers=(str(tmp_path / "store/within"),)))


@pytest.mark.parametrize("backend", MACHINES)
async def test_a_machine_whose_lower_was_mended_is_made(backend, tmp_path):
    (tmp_path / "lower").mkdir()
    template = Template("mended", lowers=(str(tmp_path / "lower"),), setup=("test -e there",), memory_bytes=96 << 20)
    async with machine_pool(backend, folder=tmp_path / "m") as pool:
        with pytest.raises(SandboxError, match="ended with 1"):
            await pool.create(template)
        os.mkfifo(tmp_path / "lower/pipe")
        with pytest.raises(SandboxError, match="is a FIFO"):
            await asyncio.wait_for(pool.create(template), 60)
        os.unlink(tmp_path / "lower/pipe")
        (tmp_path / "lower/there").write_text("now")
        assert await (await pool.create(template)).read("there") == b"now"

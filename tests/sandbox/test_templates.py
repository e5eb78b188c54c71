"""Conformance: files that are built once and shared, and that nobody can change for another."""

import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from venusrl.core.errors import ConfigError, SandboxError
from venusrl.sandbox import SandboxPool, Template
from venusrl.sandbox.layers import LayerStore

ROOT = str(Path(__file__).resolve().parents[2])
RANDOM = Template("random", setup=("head -c 16 /dev/urandom | od -An -tx1 > id; mkdir d; echo deep > d/f",))


@pytest.fixture
def store(tmp_path):
    return LayerStore(tmp_path / "templates")


@pytest.fixture
async def pool(store):
    async with SandboxPool(max_sandboxes=8, wait_s=10.0, templates=store.folder) as pool:
        yield pool


async def text(sandbox, script):
    return (await sandbox.exec(script)).text


async def test_it_is_built_once_whoever_asks(pool, store):
    sandboxes = await asyncio.gather(*(pool.create(RANDOM) for _ in range(4)))
    ids = {await text(sandbox, "cat id") for sandbox in sandboxes}
    assert len(ids) == 1 and pool.stats().created == 5
    async with SandboxPool(max_sandboxes=1, templates=store.folder) as other:
        assert {await text(await other.create(RANDOM), "cat id; ls d")} == {ids.pop() + "f\n"}
    [manifest] = store.list()
    assert (manifest.name, manifest.files, manifest.bytes) == ("random", 3, 54)
    assert os.listdir(store.folder) == [manifest.key]


async def test_files_of_the_template_come_on_top(pool):
    both = Template("both", setup=("echo built > a; echo built > b",), files={"b": b"given\n", "c": b"given\n"})
    assert await text(await pool.create(both), "cat a b c; stat -c %U a") == "built\ngiven\ngiven\nsandbox\n"
    assert await text(await pool.create(Template("both", setup=both.setup)), "cat b; ls") == "built\na\nb\n"


async def test_other_limits_share_and_other_set_ups_do_not(pool, store):
    a = await pool.create(RANDOM)
    same = await pool.create(Template("other name", setup=RANDOM.setup, memory_bytes=128 << 20))
    other = await pool.create(Template("random", setup=RANDOM.setup, tenant="b"))
    assert await text(a, "cat id") == await text(same, "cat id") != await text(other, "cat id")
    assert len(store.list()) == 2


async def test_lower_directories_are_copied(pool, store, tmp_path):
    for name in "ab":
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub/x").write_text(name)
        (tmp_path / name / name).write_text(name)
    (tmp_path / "a/link").symlink_to("/etc/shadow")
    lowers = (str(tmp_path / "a"), str(tmp_path / "b"))
    sandbox = await pool.create(Template("lowers", lowers=lowers, setup=("cat sub/x a > c; chmod +x c",)))
    (tmp_path / "a/a").write_text("changed")
    assert await text(sandbox, "cat sub/x a b c; readlink link; stat -c %A c") == "babba/etc/shadow\n-rwxr-xr-x\n"
    async with SandboxPool(max_sandboxes=2, templates=store.folder) as other:
        again = await other.create(Template("lowers", lowers=lowers))
        assert await text(again, "cat a") == "changed"
    with pytest.raises(SandboxError, match="is no directory"):
        await pool.create(Template("none", lowers=(str(tmp_path / "none"),)))


async def test_a_set_up_that_fails_says_so_and_leaves_nothing(pool, store):
    for setup, says in (("echo output; exit 3", "ended with 3: output"), ("sleep 30", "took too long")):
        with pytest.raises(SandboxError, match=says):
            await pool.create(Template("bad", setup=("true", setup), setup_s=0.5))
    assert os.listdir(store.folder) == [] and pool.alive == 0
    assert await text(await pool.create(RANDOM), "cat d/f") == "deep\n"


async def test_a_set_up_that_makes_too_much_is_stopped(pool, store):
    script = "for i in $(seq 100); do head -c 10000000 /dev/zero > $i; sleep 0.1; done"
    with pytest.raises(SandboxError, match="more than layer_bytes=30000000"):
        await pool.create(Template("big", setup=(script,), layer_bytes=30_000_000))
    assert os.listdir(store.folder) == []


async def test_what_nobody_uses_is_let_go(pool, store, monkeypatch):
    monkeypatch.setattr("venusrl.sandbox.making.LINGER_S", 0.3)
    first, second = await pool.create(RANDOM), await pool.create(RANDOM)
    await first.kill()
    await asyncio.sleep(0.6)
    with pytest.raises(SandboxError, match="is in use"):
        store.delete(store.find("random").key)
    await second.kill()
    await asyncio.sleep(0.6)
    store.delete(store.find("random").key)
    assert not [name for name in usage(pool) if name.startswith("layer-")]
    assert await text(await pool.create(RANDOM), "cat d/f") == "deep\n"  # and it is built again


async def test_two_pools_may_build_the_same_at_once(pool, store):
    async with SandboxPool(max_sandboxes=2, templates=store.folder) as other:
        a, b = await asyncio.gather(pool.create(RANDOM), other.create(RANDOM))
        assert await text(a, "cat id") == await text(b, "cat id")
    assert os.listdir(store.folder) == [store.find("random").key]


async def test_what_is_not_ours_stays(pool, store):
    """The folder may be one that has other things in it."""
    for name in ("photos", ".config.d", f".{'a' * 64}"):
        (store.folder / name).mkdir(parents=True)
        (store.folder / name / "mine").write_text("mine")
    await pool.create(RANDOM)
    assert all((store.folder / name / "mine").exists() for name in ("photos", ".config.d", f".{'a' * 64}"))
    assert [manifest.name for manifest in store.list()] == ["random"]


async def test_one_in_use_is_not_deleted(pool, store):
    await pool.create(RANDOM)
    manifest = store.find("random")
    with pytest.raises(SandboxError, match="is in use"):
        store.delete(manifest.key)
    await pool.close()
    store.delete(store.find(manifest.key[:8]).key)
    with pytest.raises(SandboxError, match=r"no template is called 'random'.*there is: none"):
        store.find("random")


async def test_a_damaged_one_is_refused(pool, store):
    await pool.create(RANDOM)
    await pool.close()
    key = store.find("random").key
    store.verify(key)
    (store.folder / key / "tree/d/f").write_text("DEEP\n")
    with pytest.raises(SandboxError, match="not those that were built"):
        store.verify(key)
    (store.folder / key / "tree/d/f").unlink()
    for damage, says in ((None, "2 files of"), ("{}", "format None"), ("[", "manifest of")):
        if damage is not None:
            (store.folder / key / "manifest.json").write_text(damage)
        async with SandboxPool(max_sandboxes=1, templates=store.folder) as other:
            with pytest.raises(SandboxError, match=says):
                await other.create(RANDOM)
            assert other.alive == 0
            assert await text(await other.create(Template("plain")), "echo fine") == "fine\n"


async def test_only_files_directories_and_links_stay(pool, store):
    script = "mkfifo pipe; echo x > s; chmod 6755 s; ln -s / root; ln -s ../../etc up; echo y > plain; ln plain hard"
    sandbox = await pool.create(Template("odd", setup=(script,)))
    assert await text(sandbox, "ls; stat -c %a s; cat hard") == "hard\nplain\nroot\ns\nup\n755\ny\n"
    tree = store.folder / store.find("odd").key / "tree"
    assert stat.S_ISLNK(os.lstat(tree / "root").st_mode)
    assert os.stat("/etc").st_uid == 0 and os.stat("/").st_uid == 0  # links were not followed when owners were set


WRITER = r"""
import mmap, os, random, sys
rng = random.Random(int(sys.argv[1]))
names = ["big", "d/f", "small"]
for _ in range(400):
    name, op = rng.choice(names), rng.randrange(9)
    try:
        if op == 0:
            with open(name, "r+b") as f: f.seek(rng.randrange(1 << 20)); f.write(rng.randbytes(rng.randrange(1, 9000)))
        elif op == 1: os.truncate(name, rng.randrange(1 << 20))
        elif op in (2, 3):
            with open(name, "r+b") as f:
                kind = mmap.MAP_SHARED if op == 2 else mmap.MAP_PRIVATE
                with mmap.mmap(f.fileno(), 0, flags=kind, prot=mmap.PROT_READ | mmap.PROT_WRITE) as m:
                    at = rng.randrange(len(m)); m[at] = rng.randrange(256)
        elif op == 4: os.unlink(name)
        elif op == 5:
            with open(name, "wb") as f: f.write(rng.randbytes(1 << 16))
        elif op == 6: os.rename(name, name + "2"); os.rename(name + "2", name)
        elif op == 7: os.chmod(name, rng.choice([0o600, 0o777])); os.utime(name, (1, 1))
        elif op == 8:
            fd = os.open(f"/proc/self/fd/{os.open(name, os.O_RDONLY)}", os.O_RDWR)
            os.pwrite(fd, b"through proc", rng.randrange(4096)); os.posix_fallocate(fd, 0, 1 << 16); os.close(fd)
    except (FileNotFoundError, ValueError): pass
print("done")
"""


async def test_what_one_writes_no_other_sees(pool, store):
    """Seeds of random writes through every door, in four sandboxes at once, one of them killed in the middle."""
    shared = Template("shared", setup=("head -c 1048576 /dev/urandom > big; mkdir d; echo f > d/f; echo s > small",))
    witness = await pool.create(shared)
    before = await text(witness, "sha1sum big d/f small; stat -c '%a %s %Y' big d/f small")
    writers = [await pool.create(shared) for _ in range(4)]
    for writer in writers:
        await writer.write("writer.py", WRITER.encode())
    calls = [asyncio.create_task(text(w, f"python3 -I -S writer.py {random.randrange(1 << 30)}")) for w in writers]
    await asyncio.sleep(0.15)
    await writers[0].kill()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results[1:] == ["done\n"] * 3
    for i, writer in enumerate(writers[1:]):  # each has its own, and sees it
        await writer.write("big", b"of %d" % i)
    assert [await text(writer, "cat big") for writer in writers[1:]] == ["of 0", "of 1", "of 2"]
    for sandbox in (witness, await pool.create(shared)):
        assert await text(sandbox, "sha1sum big d/f small; stat -c '%a %s %Y' big d/f small") == before
    store.verify(store.find("shared").key)


async def test_shared_pages_are_charged_to_no_sandbox(pool, needs_memory_cgroup):
    big = Template("big", setup=("head -c 50000000 /dev/urandom > big",), disk_bytes=16 << 20)
    sandboxes = [await pool.create(big) for _ in range(3)]
    for sandbox in sandboxes:
        assert (await sandbox.exec("cat big | wc -c")).text == "50000000\n"
    charged = usage(pool)
    holder = [name for name in charged if name.startswith("layer-")]
    assert len(holder) == 1 and charged[holder[0]] >= 50_000_000
    assert all(charged[sandbox.id] < 6_000_000 for sandbox in sandboxes)
    measured = await pool.usage()
    assert all(measured[sandbox.id].shared == 50_000_000 for sandbox in sandboxes)
    await sandboxes[0].exec("echo >> big", timeout_s=10)  # a private copy does not fit its disk
    assert (await sandboxes[0].exec("stat -c %s big")).text == "50000000\n"


def usage(pool):
    """Bytes charged, by name."""
    marker = f"venusrl-{os.stat('/proc/self/ns/pid').st_ino}-{pool.spawner_pid}-"
    found = {}
    for path in Path("/sys/fs/cgroup").rglob(f"{marker}*/*/memory.*"):
        if path.name in ("memory.usage_in_bytes", "memory.current"):
            found[path.parent.name] = int(path.read_text())
    return found


async def test_a_new_spawner_holds_again(pool):
    await pool.create(RANDOM)
    old = pool.spawner_pid
    os.kill(old, signal.SIGKILL)
    await asyncio.sleep(0.3)
    assert await text(await pool.create(RANDOM), "cat d/f") == "deep\n"
    assert pool.spawner_pid != old
    assert [name for name in usage(pool) if name.startswith("layer-")] or not pool.host["cgroups"]["memory"]


BUILDER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from venusrl.sandbox import SandboxPool, Template
async def main():
    async with SandboxPool(max_sandboxes=1, templates=sys.argv[2]) as pool:
        print("begun", flush=True)
        await pool.create(Template("random", setup=("echo half > half; sleep 974.5",)))
asyncio.run(main())
"""


async def test_a_builder_that_dies_leaves_nothing_for_long(pool, store):
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, ROOT, str(store.folder)], stdout=subprocess.PIPE, text=True
    )
    builder.stdout.readline()
    for _ in range(200):
        if list(store.folder.glob(".*/tree/half")):
            break
        await asyncio.sleep(0.02)
    builder.kill()
    builder.wait()
    builder.stdout.close()
    assert len(os.listdir(store.folder)) == 1 and store.list() == []
    await pool.create(RANDOM)
    assert os.listdir(store.folder) == [store.find("random").key]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (dict(setup=("",)), "Template.setup"),
        (dict(setup="make"), "Template.setup"),
        (dict(setup_s=0), "setup_s"),
        (dict(lowers=["x"]), "Template.lowers"),
    ],
)
def test_impossible_templates_are_refused(bad, says):
    with pytest.raises(ConfigError, match=says):
        Template("bad", **bad)

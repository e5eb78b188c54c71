"""Isolation of memory (I1 to I3): random writes through every kind of mapping, each sandbox held against a model of its
own; nothing of it is seen in another sandbox, in the template, or in one that comes later."""

import asyncio
import hashlib
import random

import pytest

from tests.sandbox.conftest import MACHINES
from venusrl.sandbox import SandboxPool, Template

SIZE = 64 * 4096
# Works on a file of the template, and on its copy in the sandbox; ends with a digest of what it has, or says at which
# operation something was there that it had not written.
DRIVER = r"""
import ctypes, errno, hashlib, mmap, os, random, sys
seed, count, name, hold = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], len(sys.argv) > 4
chance, page = random.Random(seed), mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
lower = os.open("warm", os.O_RDONLY)
template = os.pread(lower, 1 << 30, 0)
size = len(template)
private = mmap.mmap(lower, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
sealed = mmap.mmap(lower, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
address = ctypes.addressof(ctypes.c_char.from_buffer(private))
try:
    memory = os.open("/proc/self/mem", os.O_RDWR)
except PermissionError:  # gVisor has it for reading alone
    memory = None

def refused(numbers, work):
    try:
        work()
    except OSError as error:
        assert error.errno in numbers, error
    except (PermissionError, TypeError):
        pass
    else:
        raise AssertionError("it was not refused")

# What is the template's cannot be written.
refused({errno.EACCES}, lambda: mmap.mmap(lower, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE))
refused({errno.EBADF}, lambda: os.pwrite(lower, b"x", 0))
refused({errno.EBADF, errno.EINVAL}, lambda: os.ftruncate(lower, 1))
assert libc.fallocate(lower, 3, 0, page) != 0

own = os.open(name, os.O_RDWR)  # the sandbox's own from here on
shared = mmap.mmap(own, size)
mine, file = bytearray(template), bytearray(template)
again = os.open(f"/proc/self/fd/{own}", os.O_RDWR)

def at_most(longest):
    start = chance.randrange(size)
    return start, min(chance.randrange(1, longest), size - start)

def write_private():
    start, length = at_most(9000)
    mine[start : start + length] = private[start : start + length] = chance.randbytes(length)

def write_memory():
    start, length = at_most(500)
    data = chance.randbytes(length)
    os.pwrite(memory, data, address + start)
    mine[start : start + length] = data

def write_protected():
    start = chance.randrange(size // page) * page
    data = chance.randbytes(64)
    assert libc.mprotect(address + start, page, mmap.PROT_READ) == 0
    os.pwrite(memory, data, address + start + 100)
    assert libc.mprotect(address + start, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    mine[start + 100 : start + 164] = data

def give_back():
    start = chance.randrange(size // page) * page
    private.madvise(mmap.MADV_DONTNEED, start, page)
    mine[start : start + page] = template[start : start + page]

def write_shared():
    start, length = at_most(9000)
    file[start : start + length] = shared[start : start + length] = chance.randbytes(length)

def write_file():
    start, length = at_most(9000)
    data = chance.randbytes(length)
    os.pwrite(own, data, start)
    file[start : start + length] = data

def punch():
    start = chance.randrange(size // page) * page
    if libc.fallocate(own, 3, start, page) == 0:
        file[start : start + page] = bytes(page)

def cut():
    length = chance.randrange(size // 2, size)
    os.ftruncate(own, length)
    os.ftruncate(own, size)
    file[length:] = bytes(size - length)

def fork():
    pid = os.fork()
    if pid == 0:
        private[:page] = shared[: page] = bytes(shared[:page])
        private[page : 2 * page] = b"child" * (page // 5) + bytes(page % 5)
        os._exit(0)
    os.waitpid(pid, 0)

def look():
    start, length = at_most(20000)
    assert private[start : start + length] == mine[start : start + length], "private"
    assert shared[start : start + length] == file[start : start + length], "shared"
    assert os.pread(own, length, start) == file[start : start + length], "file"
    assert sealed[start : start + length] == template[start : start + length], "template"
    if memory is not None:
        assert os.pread(memory, length, address + start) == mine[start : start + length], "memory"

operations = [write_private, give_back, write_shared, write_file, look]
if memory is not None:
    operations += [write_memory, write_protected]
for number in range(count):
    operation = chance.choice(operations)
    if number % 500 == 0:
        operation = chance.choice([punch, cut, fork])
    try:
        operation()
    except AssertionError as error:
        raise SystemExit(f"operation {number}, {operation.__name__}: {error}")
assert private[:] == mine and shared[:] == file and sealed[:] == template
assert os.pread(again, size, 0) == file
assert os.pread(lower, size, 0) == (file if name == "warm" else template)  # a mapping is of what it was, not a file
print(hashlib.sha256(mine).hexdigest(), hashlib.sha256(file).hexdigest(), flush=True)
while hold:
    write_private(), write_shared()
"""

MAKE = f'import random; open("warm", "wb").write(random.Random(5).randbytes({SIZE}))'
SETUP = f"python3 -I -S -c '{MAKE}'; cp warm copy"


async def mapped(pool, boxes_count: int, operations: int, name: str = "warm") -> None:
    """Where a sandbox's files lie over the template's, its own is the template's one, opened to be written."""
    template = Template("mapped", setup=(SETUP,), files={"driver.py": DRIVER.encode()})
    boxes = [await pool.create(template) for _ in range(boxes_count)]
    tree = pool._layers[boxes[0].id].tree if hasattr(pool, "_layers") else None
    before = None if tree is None else hashlib.sha256((tree / "warm").read_bytes()).hexdigest()
    share = operations // boxes_count
    # One more writes for ever, and is killed while it does.
    doomed = await pool.create(template)
    writing = await doomed.start(f"exec python3 -I -S driver.py 99 20 {name} hold", timeout_s=None)
    assert b" " in (await anext(aiter(writing))).data
    runs = [
        box.exec(f"exec python3 -I -S driver.py {seed} {share} {name}", timeout_s=170) for seed, box in enumerate(boxes)
    ]
    running = asyncio.gather(*runs)
    await asyncio.sleep(0.3)
    await doomed.kill()
    results = await running
    assert [result.exit_code for result in results] == [0] * boxes_count, [result.text[-300:] for result in results]
    own = {result.text for result in results}
    assert len(own) == boxes_count
    files = [(await box.exec(f"sha256sum < {name}")).text.split()[0] for box in boxes]
    assert files == [result.text.split()[1] for result in results]
    if before is not None:
        assert hashlib.sha256((tree / "warm").read_bytes()).hexdigest() == before
    await boxes[0].kill()
    fresh = await pool.create(template)
    original = hashlib.sha256(random.Random(5).randbytes(SIZE)).hexdigest()
    assert (await fresh.exec("sha256sum < warm")).text.split()[0] == original


@pytest.mark.parametrize("pool", ["process"], indirect=True)
async def test_writes_are_ones_own(pool):
    await mapped(pool, 3, 6_000)


@pytest.mark.slow
async def test_hundred_thousand_writes_are_ones_own(tmp_path):
    async with SandboxPool(max_sandboxes=9, templates=tmp_path) as pool:
        await mapped(pool, 8, 100_000)


@pytest.mark.parametrize("pool", MACHINES, indirect=True)
async def test_writes_in_machines_are_ones_own(pool):
    await mapped(pool, 2, 600, "copy")

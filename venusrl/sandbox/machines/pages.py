"""Pages of memory that a process has written over a file that it maps privately, and how another gets the same.

The kernel says of every page whether it is still the file's (Documentation/admin-guide/mm/pagemap.rst, bit 61). What
is saved is the number of pages, their places in the mapping, and what is in them.
"""

import mmap
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from venusrl.core.errors import SandboxError

PAGE = mmap.PAGESIZE
_MOST = (16 << 20) // PAGE  # pages in one call
_PRESENT, _SWAPPED, _FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


def mappings(pid: int, file: Path) -> list[tuple[int, int, int]]:
    """(start, end, offset in the file) of what a process maps of a file, in bytes, in the order of the offsets."""
    wanted = os.stat(file).st_ino
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if int(fields[4]) == wanted and os.path.basename(fields[-1]).startswith(file.name):
            start, end = (int(address, 16) for address in fields[0].split("-"))
            found.append((start, end, int(fields[2], 16)))
    return sorted(found, key=lambda part: part[2])


def save(pid: int, file: Path, target: Path) -> int:
    """Writes the pages that a process has of its own over a file; how many. It must stand still meanwhile."""
    places, pieces = [], []
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap, open(f"/proc/{pid}/mem", "rb", buffering=0) as mem:
        for start, end, offset in _all_of(pid, file):
            count = (end - start) // PAGE
            entries = np.frombuffer(os.pread(pagemap.fileno(), count * 8, start // PAGE * 8), np.uint64)
            own = ((entries & _PRESENT != 0) & (entries & _FILE == 0)) | (entries & _SWAPPED != 0)
            pages = np.flatnonzero(own)
            pieces += [(start + first * PAGE, length * PAGE) for first, length in _runs(pages)]
            places.append(pages + offset // PAGE)
        where = np.concatenate(places)
        _write(target, where, mem.fileno(), pieces)
    return len(where)


def load(pid: int, file: Path, source: Path) -> None:
    """Gives a process, which stands still, those pages over the same file. SandboxError where they do not fit."""
    with open(source, "rb") as f, open(f"/proc/{pid}/mem", "r+b", buffering=0) as mem:
        where = _places(f)
        if len(where) and where[-1] >= file.stat().st_size // PAGE:
            raise SandboxError(f"{source.name} is of a larger memory than this machine has")
        ours = _all_of(pid, file)
        for first, length in _runs(where):
            data = f.read(length * PAGE)
            for start, end, offset in ours:
                low, high = max(first * PAGE, offset), min((first + length) * PAGE, offset + end - start)
                if low < high:
                    piece = data[low - first * PAGE : high - first * PAGE]
                    if os.pwrite(mem.fileno(), piece, start + low - offset) != len(piece):
                        raise SandboxError(f"the memory of process {pid} could not be written")


def _all_of(pid: int, file: Path) -> list[tuple[int, int, int]]:
    """See mappings. SandboxError unless the process maps the file whole."""
    found = mappings(pid, file)
    if sum(end - start for start, end, _ in found) != file.stat().st_size:
        raise SandboxError(f"process {pid} does not map {file} whole, so far as the kernel says")
    return found


def pack(file: Path, target: Path) -> None:
    """Writes the pages of a file that are no holes; the last of it always, so that its size is known."""
    places = []
    with open(file, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        at = 0
        while at < size:
            try:
                start = os.lseek(f.fileno(), at, os.SEEK_DATA) // PAGE * PAGE
            except OSError:  # nothing but a hole comes
                start = size - PAGE
            end = max(os.lseek(f.fileno(), start, os.SEEK_HOLE), start + PAGE)
            at = min(-(-end // PAGE) * PAGE, size)
            places.append(np.arange(start // PAGE, at // PAGE))
        where = np.concatenate(places)
        _write(target, where, f.fileno(), [(first * PAGE, length * PAGE) for first, length in _runs(where)])


def unpack(source: Path, file: Path) -> None:
    """Makes the file again."""
    with open(source, "rb") as f, open(file, "wb") as target:
        for first, length in _runs(_places(f)):
            target.seek(first * PAGE)
            target.write(f.read(length * PAGE))


def _write(target: Path, where: np.ndarray, source: int, pieces: list[tuple[int, int]]) -> None:
    with open(target, "wb") as f:
        f.write(np.array([len(where)], np.int64).tobytes() + where.astype(np.int64).tobytes())
        for at, size in pieces:
            data = os.pread(source, size, at)
            if len(data) != size:
                raise SandboxError(f"{size} bytes at {at} could not be read")
            f.write(data)


def _places(f: BinaryIO) -> np.ndarray:
    """The beginning of what was saved. SandboxError where that cannot be."""
    size = os.fstat(f.fileno()).st_size
    count = int(np.frombuffer(f.read(8), np.int64)[0]) if size >= 8 else -1
    if count < 0 or size != 8 + count * (8 + PAGE):
        raise SandboxError(f"{f.name} is damaged: {size} bytes for {count} pages")
    where = np.frombuffer(f.read(count * 8), np.int64)
    if count and (where[0] < 0 or np.any(np.diff(where) <= 0)):
        raise SandboxError(f"{f.name} is damaged: its pages are not in order")
    return where


def _runs(pages: np.ndarray) -> list[tuple[int, int]]:
    """(first, length) of each run of pages one after the other, none longer than _MOST."""
    if not len(pages):
        return []
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    firsts = pages[np.concatenate([[0], cuts])].tolist()
    lengths = np.diff(np.concatenate([[0], cuts, [len(pages)]])).tolist()
    return [
        (first + at, min(length - at, _MOST))
        for first, length in zip(firsts, lengths, strict=True)
        for at in range(0, length, _MOST)
    ]

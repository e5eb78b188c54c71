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
    places, parts = [], []
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap, open(f"/proc/{pid}/mem", "rb", buffering=0) as mem:
        for start, end, offset in mappings(pid, file):
            count = (end - start) // PAGE
            entries = np.frombuffer(os.pread(pagemap.fileno(), count * 8, start // PAGE * 8), np.uint64)
            own = ((entries & _PRESENT != 0) & (entries & _FILE == 0)) | (entries & _SWAPPED != 0)
            pages = np.flatnonzero(own)
            for first, length in _runs(pages):
                parts.append(os.pread(mem.fileno(), length * PAGE, start + first * PAGE))
                if len(parts[-1]) != length * PAGE:
                    raise SandboxError(f"the memory of process {pid} could not be read")
            places.append(pages + offset // PAGE)
    where = np.concatenate(places) if places else np.zeros(0, np.int64)
    _write(target, where, parts)
    return len(where)


def load(pid: int, file: Path, source: Path) -> None:
    """Gives a process, which stands still, those pages over the same file. SandboxError where they do not fit."""
    with open(source, "rb") as f, open(f"/proc/{pid}/mem", "r+b", buffering=0) as mem:
        where = _places(f)
        ours = mappings(pid, file)
        for first, length in _runs(where):
            data = f.read(length * PAGE)
            for start, end, offset in ours:
                low, high = max(first * PAGE, offset), min((first + length) * PAGE, offset + end - start)
                if low < high:
                    os.pwrite(mem.fileno(), data[low - first * PAGE : high - first * PAGE], start + low - offset)
        inside = sum(
            int(np.count_nonzero((where >= offset // PAGE) & (where < (offset + end - start) // PAGE)))
            for start, end, offset in ours
        )
        if inside != len(where):
            raise SandboxError(f"{source.name} is of a larger memory than this machine has")


def pack(file: Path, target: Path) -> None:
    """Writes the pages of a file that are no holes; the last of it always, so that its size is known."""
    places, parts = [], []
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
            parts.append(os.pread(f.fileno(), at - start, start))
            places.append(np.arange(start // PAGE, at // PAGE))
    _write(target, np.concatenate(places), parts)


def unpack(source: Path, file: Path) -> None:
    """Makes the file again."""
    with open(source, "rb") as f, open(file, "wb") as target:
        for first, length in _runs(_places(f)):
            os.pwrite(target.fileno(), f.read(length * PAGE), first * PAGE)


def _write(target: Path, where: np.ndarray, parts: list[bytes]) -> None:
    with open(target, "wb") as f:
        f.write(np.array([len(where)], np.int64).tobytes() + where.astype(np.int64).tobytes())
        f.writelines(parts)


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
    """(first, length) of each run of pages one after the other."""
    if not len(pages):
        return []
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    firsts = pages[np.concatenate([[0], cuts])]
    lengths = np.diff(np.concatenate([[0], cuts, [len(pages)]]))
    return list(zip(firsts.tolist(), lengths.tolist(), strict=True))

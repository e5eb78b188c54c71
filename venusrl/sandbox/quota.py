"""Whether a template's set-up has taken more of the host's disk than it may, looked at while it runs.

Asking a file system how much is free costs microseconds, walking the files of a set-up seconds. So the first is asked
all the time, and only where it has lost a part of the quota the set-up is paused and its files are counted. What it can
write between two looks, some tens of megabytes, is the slack; space without writing (fallocate) is denied to set-ups.
"""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from venusrl.core.errors import SandboxLost
from venusrl.sandbox.layers import disk_use

if TYPE_CHECKING:
    from venusrl.sandbox.client import ProcessSandbox

_LOOK_S = 0.01
_COUNT_S = 5.0  # that files are counted at least every so often: the space may have been another's that is free again
_PART = 4  # of what is left of the quota: free space lost by that much has the files counted


async def watch(sandbox: ProcessSandbox, agent: int, tree: Path, most: int) -> None:
    """Returns when the set-up that writes `tree` has taken more than `most` bytes; it is paused then.

    Args:
      agent: its first process.
    """
    loop = asyncio.get_running_loop()
    used = await asyncio.to_thread(disk_use, tree)
    free, counted = _free(tree), loop.time()
    while used <= most:
        await asyncio.sleep(_LOOK_S)
        lost = free - _free(tree)
        if lost < (most - used) // _PART + 1 and loop.time() - counted < _COUNT_S:
            continue
        try:
            await sandbox.pause()
            used = await asyncio.to_thread(lambda: disk_use(tree) + _unlinked(agent, tree))
            free, counted = _free(tree), loop.time()
            if used <= most:
                await sandbox.resume()
        except SandboxLost:
            return


def _free(tree: Path) -> int:
    """Bytes, with 256 for every free inode where those are counted."""
    found = os.statvfs(tree)
    return found.f_bfree * found.f_frsize + (found.f_ffree * 256 if found.f_files else 0)


def _unlinked(agent: int, tree: Path) -> int:
    """Bytes of files on the same disk that processes have open, and that have no name any more."""
    device, found = os.stat(tree).st_dev, {}
    for pid in _family(agent):
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                info = os.stat(f"/proc/{pid}/fd/{descriptor}")
            except OSError:
                continue
            if stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and info.st_dev == device:
                found[info.st_ino] = info.st_blocks * 512
    return sum(found.values())


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found, new = [], [pid]
    while new:
        found.append(new.pop())
        for task in _listed(f"/proc/{found[-1]}/task"):
            try:
                with open(f"/proc/{found[-1]}/task/{task}/children") as f:
                    new += [int(word) for word in f.read().split()]
            except OSError:
                continue
    return found


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []

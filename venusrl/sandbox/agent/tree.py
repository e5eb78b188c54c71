"""Which processes of a sandbox belong to which command. For the agent, process 1 of the sandbox."""

import os

from venusrl.sandbox.agent.wire import patiently


def outside(roots: set[int]) -> list[int]:
    """Processes that belong to none of the commands whose shells are `roots`, this process excepted.

    A process belongs to a command when it is in the shell's session or descends from one that belongs. One that has
    left the session and whose parents have ended belongs to none.
    """
    parents, sessions = {}, {}
    for entry in patiently(os.listdir, "/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                fields = patiently(_stat_of, entry).rpartition(b")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != b"Z":
                parents[int(entry)], sessions[int(entry)] = int(fields[1]), int(fields[3])

    def belongs(pid: int) -> bool:
        while pid in parents:
            if pid in roots or sessions[pid] in roots:
                return True
            pid = parents[pid]
        return False

    return [pid for pid in parents if not belongs(pid)]


def exists(pid: int) -> bool:
    """It has not been collected yet."""
    try:
        patiently(os.stat, f"/proc/{pid}")
    except FileNotFoundError:
        return False
    return True


def _stat_of(pid: str) -> bytes:
    with open(f"/proc/{pid}/stat", "rb") as f:
        return f.read()

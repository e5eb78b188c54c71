"""Which processes of a sandbox belong to which command. For the agent, process 1 of the sandbox."""

import os


def outside(roots: set[int]) -> list[int]:
    """Processes that belong to none of the commands whose shells are `roots`, this process excepted.

    A process belongs to a command when it is in the shell's session or descends from one that belongs. One that has
    left the session and whose parents have ended belongs to none.
    """
    parents, sessions = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/stat", "rb") as f:
                    fields = f.read().rpartition(b")")[2].split()
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

"""What the kernel counts for a user or for the whole host, and how much of it one sandbox may have.

The users of a sandbox are counted twice: in its own user namespace, and, all sandboxes together, for the user who made
these namespaces, who is often root. So each has a small part of that. What has no bound of its own is denied by the
filter of system calls (seccomp.py). docs/sandbox.md has the list.
"""

import resource
from contextlib import suppress

SANDBOXES = 512  # that share what is counted for their maker
_INSTANCES, _WATCHES = 64, 8192  # of inotify, for a sandbox
_FEW_INSTANCES = 8  # where the host's own bound is what it is
_SIGNALS = 1024  # pending ones and timers, at most
_LOCKED_BYTES = 8 << 20  # of memory, for a process
OPEN_FILES, _FEW_FILES = 4096, 256  # of a process: at most, and whatever its sandbox
_FILES_PART = 4  # of the host's open files, one sandbox may have one in so many


def of_users() -> dict[str, int]:
    """What the users of a sandbox may have together, as files of /proc/sys/user (namespaces(7)).

    For their maker there is to be room for SANDBOXES of them: raises the host's bounds of inotify where these are lower
    and this process may. A host's usual 128 instances would be those of a few sandboxes and of every other program.
    """
    raised = True
    for name, most in (("instances", _INSTANCES), ("watches", _WATCHES)):
        path = f"/proc/sys/fs/inotify/max_user_{name}"
        with suppress(OSError, ValueError):
            with open(path) as f:
                now = int(f.read())
            if now < most * SANDBOXES:
                with open(path, "w") as f:
                    f.write(str(most * SANDBOXES))
            continue
        raised = False
    instances = _INSTANCES if raised else _FEW_INSTANCES
    return {"max_inotify_instances": instances, "max_inotify_watches": _WATCHES}


def host_files() -> int:
    """How many files may be open on this host, for all but its administrators (proc_sys_fs(5), file-max)."""
    with open("/proc/sys/fs/file-max") as f:
        return int(f.read())


def open_files(pids: int, of_host: int) -> int:
    """How many files a process may have open in a sandbox of so many processes.

    All of them together have a quarter of the host's at most, as long as that leaves each 256, which programs need.

    Args:
      of_host: host_files().
    """
    return min(OPEN_FILES, max(_FEW_FILES, of_host // _FILES_PART // pids))


def limit_process() -> None:
    """Limits of this process, and of what it starts, that the kernel counts for a user."""
    signals = _part_of(resource.RLIMIT_SIGPENDING)
    for what, most in (
        (resource.RLIMIT_SIGPENDING, signals), (resource.RLIMIT_MEMLOCK, _LOCKED_BYTES), (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NICE, 0), (resource.RLIMIT_RTPRIO, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _part_of(what: int) -> int:
    hard = resource.getrlimit(what)[1]
    return _SIGNALS if hard == resource.RLIM_INFINITY else max(32, min(_SIGNALS, hard // SANDBOXES))

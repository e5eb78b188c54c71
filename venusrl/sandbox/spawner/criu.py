"""The commands by which CRIU saves and restores process trees, and what its files say."""

import os
import re

# What CRIU itself makes in the sandbox; every other mount is put there from outside.
_ITS_OWN = ("/", "/proc", "/dev/pts")
_COMMON = ("--manage-cgroups=ignore", "--file-locks", "--tcp-established", "--empty-ns", "net", "-v2")
_NO_SOCKETS = "Can't get 1:16 opt"  # SO_PASSCRED, which that Linux has for other sockets alone
_ESCAPE = re.compile(r"\\([0-7]{3})")


def mounts(pid: int) -> list[str]:
    """Places of the mounts of process `pid` that come from outside, as it sees them."""
    with open(f"/proc/{pid}/mountinfo") as f:
        places = [_ESCAPE.sub(lambda code: chr(int(code[1], 8)), line.split()[4]) for line in f]
    return [place for place in places if place not in _ITS_OWN]


def dump_command(criu: str, pid: int, folder: str, places: list[str], ghost_bytes: int, freezer: str) -> list[str]:
    """Saves the tree of process `pid`, all of which is frozen in the group `freezer`, and is so afterwards."""
    command = [criu, "dump", "-t", str(pid), "-D", folder, "-o", "dump.log", "--leave-running"]
    command += ["--network-lock", "skip", "--ghost-limit", str(ghost_bytes), "--freeze-cgroup", freezer, *_COMMON]
    for number, place in enumerate(places):
        command += ["--external", f"mnt[{place}]:m{number}"]
    return command


def restore_command(criu: str, folder: str, root: str, parts: list[str], script: str) -> list[str]:
    """Restores it as a child of the parent of whoever runs this; its pid will be in the file `pid`.

    Args:
      parts: of `places`, what belongs there.
      script: path of one that CRIU runs at every step.
    """
    command = [criu, "restore", "-D", folder, "-o", "restore.log", "--root", root]
    command += ["--restore-detached", "--restore-sibling", "--pidfile", "pid", "--action-script", script, *_COMMON]
    for number, part in enumerate(parts):
        command += ["--external", f"mnt[m{number}]:{part}"]
    return command


def complaint(log: str) -> str:
    """The errors of a log, as far as they say something."""
    with open(log, errors="replace") as f:
        lines = [line.split("Error", 1)[1].strip() for line in f if "Error" in line]
    lines = [line.split(": ", 1)[-1] for line in lines if "RLIMIT_NOFILE" not in line and "FAILED" not in line]
    if any(_NO_SOCKETS in line for line in lines):
        return "a command has a socket of IP open, which this CRIU cannot save on Linux 6.16 or newer"
    return "; ".join(lines[:3])[:500] or "it does not say why"


def move_users(folder: str, old: int, new: int) -> None:
    """In an image of a tree, other users of the host for those of its user namespace, which begin at `old`.

    Both are numbers of five bytes, as every one from 2^28 to 2^35, so that nothing else moves.

    Raises:
      ValueError: the image does not name the old ones twice, once for users and once for groups.
    """
    [name] = [name for name in os.listdir(folder) if name.startswith("userns-")]
    with open(f"{folder}/{name}", "r+b") as f:
        data = f.read()
        if data.count(_varint(old)) != 2:
            raise ValueError(f"{name} is no user namespace that begins at {old}")
        f.seek(0)
        f.write(data.replace(_varint(old), _varint(new)))


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])

"""The freezer of one sandbox: a cgroup of its commands that stop together, whatever signals they send each other.

The agent is not in it while it works: it freezes and thaws its commands by descriptors that the spawner gives it, and
every shell moves itself in before it runs a script. While a sandbox is saved the agent is in it, too.

Version 1: a group of the freezer hierarchy; the agent stays in the spawner's own. A frozen process does not die of
SIGKILL before it is thawed. Version 2: a threaded group below the sandbox's own, so that a process moves itself without
a lock of the whole system's; what is frozen dies at once.
"""

import errno
import os
import signal
import time
from contextlib import suppress

FREEZE_S = 5.0  # that all processes may take to stop
_LOOK_S = 0.001
_AGAIN = 200  # looks, after which version 1 is told again: a fork may have kept it from finishing
_STATES = {1: ("THAWED", "FROZEN"), 2: ("0", "1")}
COMMANDS = "commands"  # of version 2, below the group of a sandbox


def freezer_files(version: int) -> tuple[str, str, str]:
    """Names of what freezes, what says that all are frozen, and what a thread moves itself in by."""
    if version == 1:
        return "freezer.state", "freezer.state", "tasks"
    return "cgroup.freeze", "cgroup.events", "cgroup.threads"


class Freezer:
    """Args:
    directory: of the group, which is there.
    version: of cgroups.
    outside: directory of the group where the agent is while it works.
    """

    def __init__(self, directory: str, version: int, outside: str):
        self.directory = directory
        self.version = version
        self._outside = outside

    def open_files(self) -> list[int]:
        """Descriptors for the agent: to freeze, to see whether all are frozen, and for its shells to join."""
        state, seen, join = (f"{self.directory}/{name}" for name in freezer_files(self.version))
        modes = ((state, os.O_RDWR), (seen, os.O_RDONLY), (join, os.O_WRONLY))
        opened: list[int] = []
        try:
            for path, mode in modes:
                opened.append(os.open(path, mode | os.O_CLOEXEC))
        except OSError:
            for fd in opened:
                os.close(fd)
            raise
        return opened

    @property
    def told(self) -> str:
        """The file by which it is told, and what freezes, for a shell script: `echo WORD > FILE`."""
        return f"echo {_STATES[self.version][1]} > {self.directory}/{freezer_files(self.version)[0]}"

    @property
    def members_file(self) -> str:
        """Where a thread's number is written to move it in."""
        return f"{self.directory}/{freezer_files(self.version)[2]}"

    def is_asked(self) -> bool:
        """It is frozen, or will be as soon as its processes leave the kernel."""
        return _read(f"{self.directory}/{freezer_files(self.version)[0]}").strip() not in ("THAWED", "0")

    def is_frozen(self) -> bool:
        """All of them stand still."""
        text = _read(f"{self.directory}/{freezer_files(self.version)[1]}")
        return text.startswith("FROZEN") if self.version == 1 else "frozen 1" in text

    def ask(self) -> None:
        """Has them stop, without waiting until they do."""
        write(f"{self.directory}/{freezer_files(self.version)[0]}", _STATES[self.version][1])

    def freeze(self, wait_s: float = FREEZE_S) -> None:
        """Returns when all stand still.

        Raises:
          OSError: EBUSY, one of them is in the kernel and does not come back.
        """
        self.ask()
        give_up, looks = time.monotonic() + wait_s, 0
        while not self.is_frozen():
            if time.monotonic() > give_up:
                raise OSError(errno.EBUSY, "its processes do not stand still")
            time.sleep(_LOOK_S)
            looks += 1
            if self.version == 1 and looks % _AGAIN == 0:
                self.ask()

    def thaw(self) -> None:
        """They go on."""
        write(f"{self.directory}/{freezer_files(self.version)[0]}", _STATES[self.version][0])

    def take(self, pids: list[int]) -> None:
        """Moves processes in, the agent among them; those that have ended do not matter."""
        for pid in pids:
            for thread in _threads(pid):
                with suppress(ProcessLookupError):
                    write(self.members_file, thread)

    def release(self, pid: int) -> None:
        """Moves the agent out, so that it goes on."""
        write(f"{self._outside}/{'tasks' if self.version == 1 else 'cgroup.procs'}", str(pid))

    def members(self) -> set[int]:
        """Threads that are in it."""
        return {int(line) for line in _read(self.members_file).split()}

    def let_die(self) -> None:
        """What is frozen and has been killed ends. Of version 1, all of it is killed first, so that none runs."""
        if self.version == 1 and self.is_asked():
            for thread in self.members():
                with suppress(ProcessLookupError):
                    os.kill(thread, signal.SIGKILL)
            self.thaw()


def thaw_left(directory: str) -> None:
    """In a group of version 1 that nobody owns any more, what has been killed ends."""
    with suppress(OSError):
        write(f"{directory}/freezer.state", _STATES[1][0])


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _read(path: str) -> str:
    with open(path) as f:
        return f.read()


def write(path: str, text: str) -> None:
    """In one call, as files of the kernel's want it."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)

"""The freezer of one sandbox: a cgroup of its commands that stop together, whatever signals they send each other.

It is a group below the sandbox's own, which the agent stays in: the agent freezes and thaws its commands by descriptors
that the spawner gives it, and every shell moves itself in before it runs a script. While a sandbox is saved its whole
group is frozen, the agent with it.

Version 1: a frozen process does not die of SIGKILL before it is thawed. Version 2: what is frozen dies at once; the
group of commands is threaded, so that a process moves itself in without a lock of the whole system's.
"""

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FREEZE_S = 5.0  # that all processes may take to stop
_LOOK_S = 0.001
_AGAIN = 200  # looks, after which version 1 is told again: a fork may have kept it from finishing
_STATES = {1: ("THAWED", "FROZEN"), 2: ("0", "1")}
_COMMANDS = "commands"


def freezer_files(version: int) -> tuple[str, str, str]:
    """Names of what freezes, what says that all are frozen, and what a thread moves itself in by."""
    if version == 1:
        return "freezer.state", "freezer.state", "tasks"
    return "cgroup.freeze", "cgroup.events", "cgroup.threads"


class Freezer:
    """Attributes: whole, directory: of the sandbox's group, and of the group of its commands; version: of cgroups."""

    def __init__(self, whole: str, version: int):
        """Makes the group of commands. OSError where the kernel refuses."""
        self.whole = whole
        self.version = version
        self.directory = f"{whole}/{_COMMANDS}"
        os.mkdir(self.directory)
        try:
            if version == 2:
                write(f"{self.directory}/cgroup.type", "threaded")
        except OSError:
            os.rmdir(self.directory)
            raise

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
    def freeze_command(self) -> str:
        """What `ask` does, for a shell script."""
        return f"echo {_STATES[self.version][True]} > {self._state(self.directory)}"

    @property
    def members_file(self) -> str:
        """Where a thread's number is written to move it in."""
        return f"{self.directory}/{freezer_files(self.version)[2]}"

    def is_asked(self) -> bool:
        """Its commands are frozen, or will be as soon as they leave the kernel."""
        name = "freezer.self_freezing" if self.version == 1 else "cgroup.freeze"  # apart from the whole's
        return _read(f"{self.directory}/{name}").strip() == "1"

    def ask(self) -> None:
        """Has its commands stop, without waiting until they do."""
        self._tell(self.directory, frozen=True)

    def thaw(self) -> None:
        """Its commands go on."""
        self._tell(self.directory, frozen=False)

    def freeze(self, whole: bool = False) -> None:
        """Returns when all commands stand still, or the whole sandbox does.

        Raises:
          OSError: EBUSY, one of them is in the kernel and does not come back.
        """
        directory = self.whole if whole else self.directory
        self._tell(directory, frozen=True)
        give_up, looks = time.monotonic() + FREEZE_S, 0
        while not self._is_frozen(directory):
            if time.monotonic() > give_up:
                raise OSError(errno.EBUSY, "its processes do not stand still")
            time.sleep(_LOOK_S)
            looks += 1
            if self.version == 1 and looks % _AGAIN == 0:
                self._tell(directory, frozen=True)

    @contextmanager
    def whole_frozen(self) -> Iterator[None]:
        """The whole sandbox stands still, by its own group alone, which may be thawed and frozen meanwhile; afterwards
        its commands still do.

        Raises:
          OSError: EBUSY, a process does not come back from the kernel.
        """
        self.freeze()
        self.freeze(whole=True)
        self.thaw()  # as far as the whole lets them
        try:
            yield
        finally:
            self._tell(self.whole, frozen=True)
            self.ask()
            self._tell(self.whole, frozen=False)

    def _state(self, directory: str) -> str:
        return f"{directory}/{freezer_files(self.version)[0]}"

    def _tell(self, directory: str, frozen: bool) -> None:
        write(self._state(directory), _STATES[self.version][frozen])

    def _is_frozen(self, directory: str) -> bool:
        text = _read(f"{directory}/{freezer_files(self.version)[1]}")
        return text.startswith("FROZEN") if self.version == 1 else "frozen 1" in text

    def members(self) -> set[int]:
        """Threads that are in it."""
        return {int(line) for line in _read(self.members_file).split()}

    def let_die(self) -> None:
        """What is frozen and has been killed ends. Of version 1, all of it is killed first, so that none runs."""
        if self.version == 1 and "THAWED" not in _read(self._state(self.directory)):  # the whole's counts, too
            for thread in self.members():
                with suppress(ProcessLookupError):
                    os.kill(thread, signal.SIGKILL)
            self.thaw()
            self._tell(self.whole, frozen=False)


def thaw_left(directory: str) -> None:
    """In a group of version 1 that nobody owns any more, what has been killed ends."""
    with suppress(OSError):
        write(f"{directory}/freezer.state", _STATES[1][0])


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

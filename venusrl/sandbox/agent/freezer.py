"""How the agent has its commands stand still: by the freezer cgroup that they are in, or, without one, by signals.

A process can undo SIGSTOP (a timer of its own sends SIGCONT); nothing in the sandbox can undo the freezer.
"""

import errno
import fcntl
import os
import signal
import time

from venusrl.sandbox.agent.wire import patiently

FREEZE_S = 5.0  # that all processes may take to stop
_AGAIN = 200  # looks, after which version 1 is told again: a fork may have kept it from finishing
_LEAST_FD = 10  # above all that a shell is given


def signal_all(number: int) -> None:
    """To every process but this one. The kernel holds off forks meanwhile, so none escapes."""
    try:
        os.kill(-1, number)
    except ProcessLookupError:
        return


class CommandFreezer:
    """Args:
    fds: that freeze, that tell whether all are frozen, and that shells join by (spawner/freezer.py); none: signals.

    Attributes:
      join: descriptor that a shell writes "0" to, to be frozen with the others.
    """

    def __init__(self, fds: list[int]):
        self._state, self._seen = fds[:2] if fds else (-1, -1)
        join = fds[2] if fds else os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        self.join = fcntl.fcntl(join, fcntl.F_DUPFD_CLOEXEC, _LEAST_FD)
        os.close(join)
        self._is_first = bool(fds) and os.pread(self._state, 1, 0).isalpha()

    @property
    def holds(self) -> bool:
        """Nothing in the sandbox can undo it."""
        return self._state >= 0

    def freeze(self) -> bool:
        """Returns when all stand still; False where one does not come back from the kernel."""
        if not self.holds:
            signal_all(signal.SIGSTOP)
            return True
        self._tell(b"FROZEN" if self._is_first else b"1")
        give_up, looks = time.monotonic() + FREEZE_S, 0
        while not self._is_frozen():
            if time.monotonic() > give_up:
                return False
            time.sleep(0.0005)
            looks += 1
            if self._is_first and looks % _AGAIN == 0:
                self._tell(b"FROZEN")
        return True

    def thaw(self) -> None:
        """They go on."""
        if self.holds:
            self._tell(b"THAWED" if self._is_first else b"0")
        else:
            signal_all(signal.SIGCONT)

    def close(self) -> None:
        """Lets go of it; what is frozen stays so."""
        for fd in {self._state, self._seen, self.join} - {-1}:
            os.close(fd)
        self._state = self._seen = self.join = -1

    def _tell(self, word: bytes) -> None:
        patiently(os.pwrite, self._state, word, 0)

    def _is_frozen(self) -> bool:
        text = patiently(os.pread, self._seen, 4096, 0)
        return text.startswith(b"FROZEN") if self._is_first else b"frozen 1" in text


def must_hold(freezer: CommandFreezer, is_frozen: bool) -> None:
    """Before the agent can be looked into. OSError where a command could run meanwhile."""
    if not freezer.holds:
        raise OSError(errno.ENOTSUP, "there is no freezer cgroup")
    if not is_frozen:
        raise OSError(errno.EBUSY, "a command does not stand still")

"""One command as the agent sees it: its shell, its pipes or terminal, its deadlines, what is kept of its output."""

import errno
import fcntl
import os
import signal
import struct
import termios
import time

from venusrl.sandbox.agent.output import Capture, beginning
from venusrl.sandbox.agent.wire import patiently

SHELL = "/bin/bash"
# The shell first limits its processes, and makes itself the kernel's choice, before the agent, when memory runs out.
# The script comes as descriptor 3, for argv is limited to 128 KiB. eval keeps the messages of a plain `bash -c` (a
# sourced file would put its name into them), and descriptor 3 is closed while the script runs. Before that the shell
# moves itself, and with it all that it will start, to where the agent can freeze it: into the group of descriptor 4.
_BOOT = (
    "echo 0 >&4 || exit 126; exec 4>&-; ulimit -u %d; echo 1000 >/proc/self/oom_score_adj; "
    'eval -- "$(</proc/self/fd/3)" 3<&-'
)
_BOOT_IN = 'cd -- "$1" || exit; shift; ' + _BOOT
READ_BYTES = 64 * 1024
_SHOWN_BYTES = 80  # of a script, in the list of processes
SPARE_SCRIPT_BYTES = 32 * 1024


class Spare:
    """A shell that has started and waits for its script: most of what a short command takes is the start of bash.

    Attributes: pid; output: descriptor of its stdout and stderr.
    """

    def __init__(self, process_limit: int, environment: dict, join: int):
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self.output, write = os.pipe2(os.O_CLOEXEC)
        script, self._script = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._script, False)
        try:
            targets = ((null, 0), (write, 1), (write, 2), (script, 3), (join, 4))
            actions = [(os.POSIX_SPAWN_DUP2, source, target) for source, target in targets]
            self.pid = _spawn(_BOOT % process_limit, [], environment, actions)
        except OSError:
            self.close()
            raise
        finally:
            for fd in (null, write, script):
                os.close(fd)

    @staticmethod
    def fits(header: dict, body: bytes) -> bool:
        """Whether a request is for the plain kind of shell that this is, with a script that its pipe holds."""
        plain = header["op"] == "exec" and not header["env"] and header["cwd"] is None
        return plain and len(body) == header["script_bytes"] <= SPARE_SCRIPT_BYTES

    def begin(self, script: bytes) -> None:
        """OSError where it has ended, or does not take its script."""
        if os.write(self._script, script) < len(script):
            os.kill(self.pid, signal.SIGKILL)  # or it would run half of the script
            raise OSError(errno.EAGAIN, "its pipe is full")
        os.close(self._script)
        self._script = -1

    def close(self) -> None:
        """It ends, for its script is empty."""
        for fd in {self.output, self._script} - {-1}:
            os.close(fd)


class Job:
    """Attributes:
    number: of the request that started it.
    attached: the request is answered when it ends; else it was answered at the start.
    pid: of the shell, whose session the command is.
    outputs: what is still open of "output", "stdout", "stderr" or "pty", by descriptor.
    stdin: descriptor that its input goes to, or -1.
    unsent: input that did not fit the pipe yet, each with the request that brought it; None is the end of it.
    window: bytes of output that the owner still takes; None where it follows none.
    oom_kills: of the sandbox, before it started.
    status: of waitpid, once the shell has ended.
    """

    def __init__(
        self,
        header: dict,
        body: bytes,
        process_limit: int,
        environment: dict,
        output_bytes: int,
        join: int,
        spare: Spare | None = None,
    ):
        self.number = header["id"]
        self.attached = header["op"] == "exec"
        self.started = self.last_output = time.monotonic()
        self.timeout_s, self.silent_s = header["timeout_s"], header["silent_s"]
        self.capture = Capture(output_bytes)
        self.window: int | None = header["window"]
        self.oom_kills = 0
        self.status: int | None = None
        self.timed_out: str | None = None
        self.outputs: dict[int, str] = {}
        self.stdin = -1
        self.unsent: list[tuple[int, bytes | None]] = []
        self.script = beginning(body[: header["script_bytes"]], _SHOWN_BYTES)
        if spare is not None:
            spare.begin(body)
            self.outputs[spare.output], self.pid = "output", spare.pid
            os.set_blocking(spare.output, False)
            return
        cut = header["script_bytes"]
        opened: list[int] = []
        try:
            script = _memfd("script", body[:cut], opened)
            if header["pty"] is not None:
                actions = self._terminal(header["pty"], opened)
            else:
                actions = self._pipes(header, body[cut:], opened)
            boot, cwd = (_BOOT, []) if header["cwd"] is None else (_BOOT_IN, ["bash", _directory(header["cwd"])])
            actions += [(os.POSIX_SPAWN_DUP2, script, 3), (os.POSIX_SPAWN_DUP2, join, 4)]
            self.pid = _spawn(boot % process_limit, cwd, {**environment, **header["env"]}, actions)
        except BaseException:  # a field of the wrong kind, too
            self.close()
            raise
        finally:
            for fd in opened:
                os.close(fd)
        for fd in self.outputs:
            os.set_blocking(fd, False)

    def _pipes(self, header: dict, stdin: bytes, opened: list[int]) -> list[tuple]:
        if header["stdin"] == "pipe":
            source, self.stdin = os.pipe2(os.O_CLOEXEC)
            opened.append(source)
            os.set_blocking(self.stdin, False)
        elif stdin:
            source = _memfd("stdin", stdin, opened)
        else:
            source = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            opened.append(source)
        actions = [(os.POSIX_SPAWN_DUP2, source, 0)]
        for name, targets in (("output", (1, 2)),) if header["merged"] else (("stdout", (1,)), ("stderr", (2,))):
            read, write = os.pipe2(os.O_CLOEXEC)
            opened.append(write)
            self.outputs[read] = name
            actions += [(os.POSIX_SPAWN_DUP2, write, target) for target in targets]
        return actions

    def _terminal(self, size: list[int], opened: list[int]) -> list[tuple]:
        """A new terminal; the shell, which leads a session, takes it as its own by opening it."""
        master, slave = os.openpty()
        opened.append(slave)
        self.outputs[master], self.stdin = "pty", master
        self.resize(*size)
        path = os.ttyname(slave)
        return [
            (os.POSIX_SPAWN_OPEN, 0, path, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]

    @property
    def has_terminal(self) -> bool:
        return self.stdin in self.outputs

    @property
    def held(self) -> bool:
        """The owner follows its output and takes no more now."""
        return self.window is not None and self.window <= 0

    def resize(self, rows: int, columns: int) -> None:
        """OSError where it has no terminal."""
        if not self.has_terminal:
            raise OSError(errno.ENOTTY, "the process has no terminal")
        fcntl.ioctl(self.stdin, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    # Deadlines

    def due(self) -> float | None:
        """When a deadline passes, by time.monotonic; None where there is none."""
        times = [] if self.timeout_s is None else [self.started + self.timeout_s]
        if self.silent_s is not None and not self.held:
            times.append(self.last_output + self.silent_s)
        return min(times, default=None)

    def delay(self, seconds: float) -> None:
        """Deadlines come later: it was paused."""
        self.started += seconds
        self.last_output += seconds

    # Input and output

    def read(self, fd: int) -> bytes | None:
        """What there is; b"" at the end, when the descriptor is closed; None where there is nothing now."""
        try:
            data = patiently(os.read, fd, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:  # a terminal that nobody has open any more
                raise
            data = b""
        if data:
            self.capture.add(data)
            self.last_output = time.monotonic()
        else:
            del self.outputs[fd]
            if fd == self.stdin:
                self.stdin = -1
            os.close(fd)
        return data

    def write(self) -> list[tuple[int, int | None]]:
        """Writes what fits; (request, errno or None) of those that are done."""
        done: list[tuple[int, int | None]] = []
        while self.unsent:
            request, data = self.unsent[0]
            failed = None if self.stdin >= 0 else errno.EPIPE
            if failed is None:
                try:
                    left = self._end_input() if data is None else data[patiently(os.write, self.stdin, data) :]
                except BlockingIOError:
                    return done
                except OSError as error:
                    failed, left = error.errno, b""
                if left:
                    self.unsent[0] = (request, left)
                    continue
            del self.unsent[0]
            done.append((request, failed))
        return done

    def _end_input(self) -> bytes:
        """What is left of that: nothing."""
        if self.has_terminal:
            patiently(os.write, self.stdin, b"\x04")
        else:
            os.close(self.stdin)
            self.stdin = -1
        return b""

    def close(self) -> None:
        """Closes what is open of its input and output."""
        for fd in {*self.outputs, self.stdin} - {-1}:
            os.close(fd)
        self.outputs, self.stdin = {}, -1


def _spawn(boot: str, arguments: list[str], environment: dict, actions: list[tuple]) -> int:
    """Starts a shell without copying this process (vfork); every other descriptor closes on exec."""
    return os.posix_spawn(
        SHELL,
        ["bash", "-c", boot, *arguments],
        environment,
        file_actions=actions,
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
    )


def _directory(path: str) -> str:
    if not os.path.isdir(path):
        os.stat(path)
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
    return path


def _memfd(name: str, data: bytes, opened: list[int]) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    opened.append(fd)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd

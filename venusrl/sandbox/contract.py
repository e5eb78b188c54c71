"""What every sandbox backend promises: Template, ExecResult, FileInfo and the Sandbox protocol.

A sandbox is one private machine-like place with a writable `/workspace`. Each `exec` is a new shell; the working
directory and shell variables do not persist, files and background processes do.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from venusrl.core.errors import ConfigError
from venusrl.sandbox import bounds
from venusrl.sandbox.bounds import MIB

WORKSPACE = "/workspace"
_EMPTY: Mapping = MappingProxyType({})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_TEMPLATE_WHOLE = ("memory_bytes", "pids", "file_bytes", "disk_bytes", "output_bytes", "layer_bytes")


@dataclass(frozen=True)
class Template:
    """The recipe of a sandbox: its first files and its limits.

    Numbers are within the bounds of sandbox/bounds.py. What `lowers` and `setup` make is built once, and shared:
    sandboxes of one template have the same pages in memory, until they write.

    Attributes:
      name: a label for reports.
      files: bytes by path relative to `/workspace`, written at creation.
      lowers: directories of the host that are copied into /workspace when it is built, later ones over earlier.
      setup: commands that then run there, in a sandbox of these limits.
      setup_s: seconds that each of those may take.
      layer_bytes: most bytes of what is built; that is on the host's disk, not in disk_bytes.
      oom: what happens when memory_bytes are used up: "kill", the kernel kills a process, and the command's result says
        so; or "hold" (cgroups of version 1), the sandbox stands still for `oom_wait_s` seconds, in which its owner may
        give it more (SandboxPool.resize), and else ends with the reason "oom".
      tenant: sandboxes of different tenants share nothing, even where all else is equal.
      memory_bytes: limit of all processes, files and kernel objects of the sandbox together (where the host has a
        writable memory cgroup; otherwise a limit of each process's private data).
      pids: processes and threads that may exist at once.
      file_bytes: largest single file.
      disk_bytes: size of the private file system holding /workspace, /tmp and /dev/shm. It is memory, so it counts
        towards memory_bytes and must be smaller.
      output_bytes: most output kept of one exec: the first half and the last half of it.
      start_s: seconds that it may take to be there, once it has a place and its template is built; else it is lost with
        reason "start".
      ttl_s: seconds after creation at which the sandbox is killed with reason "ttl".
      env: variables every command sees, on top of PATH, HOME, USER, LANG and TERM.

    Raises:
      ConfigError: a field is out of range.
    """

    name: str
    files: Mapping[str, bytes] = field(default_factory=lambda: _EMPTY)
    memory_bytes: int = 512 * MIB
    pids: int = 64
    file_bytes: int = 64 * MIB
    disk_bytes: int = 64 * MIB
    output_bytes: int = 64 * 1024
    ttl_s: float = 1800.0
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    lowers: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    setup_s: float = 600.0
    layer_bytes: int = 4096 * MIB
    oom: str = "kill"
    oom_wait_s: float = 10.0
    tenant: str = ""
    start_s: float = 60.0

    def __post_init__(self):
        for name in ("name", "tenant"):
            bounds.text(f"Template.{name}", getattr(self, name))
        for name in _TEMPLATE_WHOLE:
            self._set(name, bounds.whole(f"Template.{name}", name, getattr(self, name)))
        for name in ("ttl_s", "setup_s", "oom_wait_s", "start_s"):
            self._set(name, bounds.seconds(f"Template.{name}", getattr(self, name)))
        if self.disk_bytes >= self.memory_bytes:
            raise ConfigError(
                f"Template.disk_bytes={self.disk_bytes}: the disk lives in memory, give less than "
                f"memory_bytes={self.memory_bytes}"
            )
        if self.oom not in ("kill", "hold"):
            raise ConfigError(f"Template.oom={bounds.shown(self.oom)}: give 'kill' or 'hold'")
        for name, most in (("lowers", bounds.MOST_PATH), ("setup", bounds.MOST_TEXT)):
            bounds.texts(f"Template.{name}", getattr(self, name), most)
        self._set("files", MappingProxyType(bounds.entries("Template.files", self.files, self._file)))
        env = check_env("Template.env", self.env)
        for key, value in env.items():
            bounds.text(f"Template.env[{key!r}]", value, bounds.MOST_TEXT)
        self._set("env", MappingProxyType(env))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _file(self, what: str, path: object, data: object) -> bytes:
        parts = bounds.text(what, path, bounds.MOST_PATH).split("/")
        if not path or parts[0] == "" or parts[-1] == "" or ".." in parts:
            raise ConfigError(f"{what}: give a path relative to {WORKSPACE} without '..'")
        if not isinstance(data, bytes):
            raise ConfigError(f"{what} is {type(data).__name__}: give bytes")
        if len(data) > self.file_bytes:
            raise ConfigError(f"{what} has {len(data)} bytes: raise file_bytes={self.file_bytes}")
        return data

    @property
    def is_built(self) -> bool:
        """Its sandboxes begin with files that are made once."""
        return bool(self.lowers or self.setup)


def check_env(what: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables; raises ConfigError unless every entry can be one."""

    def check(entry: str, key: object, value: object) -> str:
        if not isinstance(key, str) or not isinstance(value, str) or not _NAME.fullmatch(key) or "\0" in value:
            raise ConfigError(
                f"{entry}={bounds.shown(value)}: give strings, without NUL; a name is letters, digits and _"
            )
        if len(value) > bounds.MOST_TEXT:
            raise ConfigError(f"{entry} has {len(value)} characters: give at most {bounds.MOST_TEXT}")
        return value

    checked = bounds.entries(what, env, check)
    if sum(len(key) + len(value) for key, value in checked.items()) > bounds.MOST_TEXT:
        raise ConfigError(f"{what} has more than {bounds.MOST_TEXT} characters; give less")
    return checked


@dataclass(frozen=True)
class ExecResult:
    """What one exec did.

    Attributes:
      exit_code: of the shell, or -signal if a signal ended it.
      output: stdout and stderr in the order written. Where it was longer than the template's `output_bytes`, the
        middle is replaced by one line saying how many bytes were elided.
      output_total: bytes the command wrote.
      timed_out: a deadline passed, or it was killed, and with it every process of the sandbox that belongs to no other
        running command.
      silent: it was the deadline for output.
      seconds: wall time of the exec, without time spent paused.
      oom: the kernel killed a process of this sandbox for its memory limit while the exec ran.
    """

    exit_code: int
    output: bytes
    output_total: int
    timed_out: bool
    seconds: float
    oom: bool = False
    silent: bool = False

    @property
    def text(self) -> str:
        """The output as UTF-8, undecodable bytes replaced."""
        return self.output.decode("utf-8", "replace")


@dataclass(frozen=True)
class FileInfo:
    """One directory entry. `type` is "file", "dir", "link" or "other"; size in bytes; mode is the permission bits;
    modified is in seconds since 1970."""

    name: str
    type: str
    size: int
    mode: int
    modified: float = 0.0


@dataclass(frozen=True)
class Output:
    """Bytes that a command wrote to `stream`: "stdout", "stderr", "pty", or "kept", what is kept of all before."""

    stream: str
    data: bytes


@dataclass(frozen=True)
class ProcessInfo:
    """One command that runs: its id, the pid of its shell inside, the beginning of its script, seconds since then."""

    id: int
    pid: int
    script: str
    seconds: float


@dataclass(frozen=True)
class FileChange:
    """One change of a watched path: `kind` is "create", "write", "chmod", "remove", "move_from", "move_to", or "lost"
    where changes were missed or the path is gone; `name` is the entry's, or empty for the path itself."""

    kind: str
    name: str


@runtime_checkable
class Process(Protocol):
    """A command started by `Sandbox.start`. Iterating gives its `Output` as it comes, up to its end.

    A follower that takes nothing stops the command after 1 MiB, as a full pipe does. Methods raise SandboxLost once the
    sandbox is gone, and OSError ESRCH once the command has ended (EPIPE where only its input is closed).
    """

    id: int
    pid: int

    def __aiter__(self) -> AsyncIterator[Output]: ...

    async def wait(self) -> ExecResult:
        """Its end. Output that nobody iterates over is no longer followed; what is kept of it is in the result."""

    async def send(self, data: bytes) -> None:
        """Input; returns when it has been written."""

    async def close_stdin(self) -> None:
        """The end of its input; on a terminal, Ctrl-D."""

    async def signal(self, number: int) -> None:
        """To the process group of its shell."""

    async def resize(self, rows: int, columns: int) -> None:
        """Of its terminal; OSError ENOTTY where it has none."""

    async def kill(self) -> ExecResult:
        """Ends it as a deadline does, and returns its end."""


@runtime_checkable
class Sandbox(Protocol):
    """One sandbox. Every method raises SandboxLost, promptly, once the sandbox is gone; also calls in flight."""

    id: str
    template: Template

    async def exec(
        self,
        script: str | bytes,
        *,
        timeout_s: float = 30.0,
        silent_s: float | None = None,
        user: str = "",
        cwd: str | None = None,
        user_env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Runs a bash script of any size and returns when the shell exits.

        Background processes live on. When a deadline passes, every process in the sandbox that belongs to no other
        running command is killed, those that earlier commands left behind too. A cancelled exec ends like a deadline.

        Args:
          timeout_s: seconds it may take.
          silent_s: seconds it may go on without output.
          user: one that the backend has; empty is its ordinary one, "sandbox".
          cwd: relative to /workspace, which is the default.

        Raises:
          OSError: the sandbox has no room for the script (larger than file_bytes: EFBIG) or for a process; no cwd.
          ConfigError: an argument is out of range, the user is unknown.
        """

    async def start(
        self,
        script: str | bytes,
        *,
        timeout_s: float | None = None,
        silent_s: float | None = None,
        user: str = "",
        cwd: str | None = None,
        user_env: Mapping[str, str] | None = None,
        stdin: bytes | None = b"",
        pty: tuple[int, int] | None = None,
        follow: bool = True,
    ) -> Process:
        """Starts a command beside others; it is listed by `processes` until it ends. See exec.

        Args:
          stdin: all of its input; None: what `Process.send` brings.
          pty: rows and columns of a terminal that it runs on, with input by `Process.send`.
          follow: its output comes to the Process; else only what is kept of it is in its result.
        """

    async def processes(self) -> list[ProcessInfo]:
        """The commands that run."""

    async def connect(self, process: int) -> Process:
        """A started command again, by its id: iterating gives what is kept of its output, and what follows.

        The last 32 that have ended can be connected, too. OSError ESRCH for others.
        """

    async def read(self, path: str, max_bytes: int = 16 * MIB) -> bytes:
        """The bytes of a regular file. OSError with the sandbox's errno; EFBIG if larger than max_bytes."""

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Writes a file, making its parents. OSError with the sandbox's errno (ENOSPC, EFBIG, EACCES, ...).

        Args:
          mode: permission bits that it has then; None: those that it had, and 0o644 where it is new.
        """

    async def stat(self, path: str) -> FileInfo:
        """What a path is; a link is not followed. OSError with the sandbox's errno."""

    def watch(self, path: str) -> AsyncIterator[FileChange]:
        """Changes of a file, or of a directory's entries, from the first `anext` on. OSError with its errno."""

    async def list(self, path: str) -> list[FileInfo]:
        """The entries of a directory, by name. OSError with the sandbox's errno."""

    async def pause(self) -> None:
        """Stops every process; exec deadlines stand still, the ttl does not. Idempotent."""

    async def resume(self) -> None:
        """Undoes pause. Idempotent."""

    async def snapshot(self) -> str:
        """Saves the sandbox, which goes on, and returns the snapshot's id, for `restore` of who made it.

        Saved are memory, processes, open files, terminals and files; connections among them, too. What is random
        within a process is as random in every copy; what the kernel gives differs.

        Raises:
          SandboxUnsupported: the host or the backend cannot; the message says what would make it work.
          SandboxError: it holds something that cannot be saved.
        """

    async def fork(self) -> Sandbox:
        """Another sandbox that is as this one is now, both going on from here; its commands that run are listed by
        `processes`, and can be connected to."""

    async def migrate(self, node: str) -> None:
        """Moves it to another node, given by its daemon's address, where it goes on; for its users nothing changes, but
        that it stands still for a moment. It is never in two places, whoever fails meanwhile.

        Raises:
          SandboxUnsupported: the host or the backend cannot; the message says what would make it work.
          SandboxError: the node is not there, has no place, or lacks what the sandbox needs; it goes on where it is.
        """

    async def kill(self, reason: str = "killed") -> None:
        """Ends the sandbox; when it returns, none of its processes exists. Idempotent."""

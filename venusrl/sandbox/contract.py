"""What every sandbox backend promises: Template, ExecResult, FileInfo and the Sandbox protocol.

A sandbox is one private machine-like place with a writable `/workspace`. Each `exec` is a new shell; the working
directory and shell variables do not persist, files and background processes do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from venusrl.core.errors import ConfigError

WORKSPACE = "/workspace"
MIB = 1 << 20
_EMPTY: Mapping = MappingProxyType({})


@dataclass(frozen=True)
class Template:
    """The recipe of a sandbox: its first files and its limits.

    Attributes:
      name: a label for reports.
      files: bytes by path relative to `/workspace`, written at creation.
      memory_bytes: limit of all processes, files and kernel objects of the sandbox together (where the host has a
        writable memory cgroup; otherwise a limit of each process's private data).
      pids: processes and threads that may exist at once.
      file_bytes: largest single file.
      disk_bytes: size of the private file system holding /workspace, /tmp and /dev/shm. It is memory, so it counts
        towards memory_bytes and must be smaller.
      output_bytes: most output kept of one exec: the first half and the last half of it.
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

    def __post_init__(self):
        lowest = {"memory_bytes": 16 * MIB, "pids": 2, "file_bytes": 4096, "disk_bytes": MIB, "output_bytes": 256}
        for name, low in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"Template.{name}={value!r}: give an integer of at least {low}")
        if self.disk_bytes >= self.memory_bytes:
            raise ConfigError(
                f"Template.disk_bytes={self.disk_bytes}: the disk lives in memory, give less than "
                f"memory_bytes={self.memory_bytes}"
            )
        if not self.ttl_s > 0:
            raise ConfigError(f"Template.ttl_s={self.ttl_s!r}: give a positive number of seconds")
        for path, data in self.files.items():
            parts = path.split("/")
            if not path or "\0" in path or parts[0] == "" or parts[-1] == "" or ".." in parts:
                raise ConfigError(f"Template.files[{path!r}]: give a path relative to {WORKSPACE} without '..'")
            if not isinstance(data, bytes):
                raise ConfigError(f"Template.files[{path!r}] is {type(data).__name__}: give bytes")
            if len(data) > self.file_bytes:
                raise ConfigError(f"Template.files[{path!r}] has {len(data)} bytes: raise file_bytes={self.file_bytes}")
        check_env("Template.env", self.env)
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))


def check_env(what: str, env: Mapping[str, str]) -> None:
    """Raises ConfigError unless every entry can be an environment variable."""
    for key, value in env.items():
        if not isinstance(key, str) or not isinstance(value, str) or not key or "=" in key or "\0" in key + value:
            raise ConfigError(f"{what}[{key!r}]={value!r}: give strings, without NUL, and no '=' in the name")


@dataclass(frozen=True)
class ExecResult:
    """What one exec did.

    Attributes:
      exit_code: of the shell, or -signal if a signal ended it.
      output: stdout and stderr in the order written. Where it was longer than the template's `output_bytes`, the
        middle is replaced by one line saying how many bytes were elided.
      output_total: bytes the command wrote.
      timed_out: the deadline passed; every process in the sandbox was killed.
      seconds: wall time of the exec, without time spent paused.
      oom: the kernel killed a process of this sandbox for its memory limit while the exec ran.
    """

    exit_code: int
    output: bytes
    output_total: int
    timed_out: bool
    seconds: float
    oom: bool = False

    @property
    def text(self) -> str:
        """The output as UTF-8, undecodable bytes replaced."""
        return self.output.decode("utf-8", "replace")


@dataclass(frozen=True)
class FileInfo:
    """One directory entry. `type` is "file", "dir", "link" or "other"; size in bytes; mode is the permission bits."""

    name: str
    type: str
    size: int
    mode: int


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
        user_env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Runs a bash script of any size in /workspace and returns when the shell exits.

        Background processes live on. At the deadline every process in the sandbox is killed, background ones of
        earlier execs too. One exec runs at a time; others wait for it. A cancelled exec ends like a deadline.
        OSError if the sandbox has no room for the script (larger than file_bytes: EFBIG) or for a process.
        """

    async def read(self, path: str, max_bytes: int = 16 * MIB) -> bytes:
        """The bytes of a regular file. OSError with the sandbox's errno; EFBIG if larger than max_bytes."""

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file, making its parents. OSError with the sandbox's errno (ENOSPC, EFBIG, EACCES, ...)."""

    async def list(self, path: str) -> list[FileInfo]:
        """The entries of a directory, by name. OSError with the sandbox's errno."""

    async def pause(self) -> None:
        """Stops every process; exec deadlines stand still, the ttl does not. Idempotent."""

    async def resume(self) -> None:
        """Undoes pause. Idempotent."""

    async def snapshot(self) -> str:
        """Saves the sandbox and returns the snapshot's id, or raises SandboxUnsupported."""

    async def migrate(self, node: str) -> None:
        """Moves the sandbox to another node, or raises SandboxUnsupported."""

    async def kill(self, reason: str = "killed") -> None:
        """Ends the sandbox; when it returns, none of its processes exists. Idempotent."""

"""Sandboxes of gVisor's: a kernel in user space, which runsc runs, between what is in them and the host's.

The agent is the container's first process; its owner's socket is its standard input, and its standard output a pipe
that ends with the owner. A container is saved whole, and made again from that with another socket. There is nothing
to clone: making a new one takes less time than restoring one, and shares as much.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from venusrl.core.errors import SandboxError, SandboxUnsupported
from venusrl.sandbox.contract import MIB, Template
from venusrl.sandbox.machines.backend import Program, Streams
from venusrl.sandbox.places import variables
from venusrl.sandbox.programs import agent_key, agent_program, default_folder
from venusrl.sandbox.spawner import rootfs
from venusrl.sandbox.spawner.budgets import OPEN_FILES
from venusrl.sandbox.spawner.limits import Group

RUNSC = "runsc/runsc"  # below the folder of programs
LEAST_RUNSC = 20230000  # the first with the platform systrap
# What runsc takes of the host's memory besides what is in the sandbox.
HOST_MIB = 128
_FLAGS = ("--network=none", "--ignore-cgroups", "--overlay2=none", "--platform=systrap", "--host-uds=none")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_WAIT_S = 60.0


@functools.cache
def find_runsc() -> tuple[str | None, str, int]:
    """(its path or None, why there is none that will do, its version as a date)."""
    why = "runsc (gVisor) is not installed: python -m launchers.install runsc"
    for path in filter(None, (shutil.which("runsc"), str(default_folder() / RUNSC))):
        if Path(path).exists():
            try:
                said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
            except (OSError, subprocess.TimeoutExpired):
                said = ""
            found = re.search(r"(20\d{6})", said)
            version = int(found[1]) if found else 0
            if version >= LEAST_RUNSC:
                return path, "", version
            why = f"{path} is of {version or 'an unknown date'}, and has no systrap: python -m launchers.install runsc"
    return None, why, 0


class Gvisor:
    """The backend. Args: python_prefix: directory of the interpreter that `python3` is inside."""

    name = "gvisor"
    clones = False

    def __init__(self, python_prefix: str = sys.base_prefix):
        self._prefix = str(Path(python_prefix).resolve())
        self._runsc = ""
        self._version = 0
        self._folder = Path()
        self._binds: list[tuple[str, str, int]] = []
        self._life = (-1, -1)

    async def open(self, folder: Path) -> None:
        """See Backend.open."""
        if os.geteuid() != 0:
            raise SandboxUnsupported("runsc needs root to make sandboxes")
        path, why, self._version = await asyncio.to_thread(find_runsc)
        if path is None:
            raise SandboxUnsupported(why)
        agent, why = await asyncio.to_thread(agent_program)
        if agent is None:
            raise SandboxUnsupported(f"gVisor's sandboxes need the agent's program: {why}")
        self._runsc, self._folder = path, folder
        self._life = os.pipe()
        own = None if self._prefix == "/usr" or self._prefix.startswith("/usr/") else self._prefix
        python = rootfs.Host(own, agent)
        binds = python.binds(str(folder))
        self._binds = [bind for bind in binds if not bind[0].startswith("/dev/")]  # runsc has its own
        for name in ("root", "empty", "state"):
            (folder / name).mkdir(mode=0o755)
        folder.chmod(0o711)
        await asyncio.to_thread(rootfs.fill, str(folder / "root"), python, self._binds)

    def close(self) -> None:
        """Its sandboxes end, as far as they have not."""
        for fd in self._life:
            os.close(fd)

    @property
    def key(self) -> str:
        return f"{agent_key()}-{self._version}"

    @property
    def host(self) -> dict:
        return {
            "mode": "gvisor",
            "runsc": self._version,
            "cgroups": {"memory": None, "pids": "guest", "cpu": None, "freezer": None},
        }

    def ceiling(self, template: Template) -> int:
        """See Backend.ceiling."""
        return template.memory_bytes + HOST_MIB * MIB

    async def boot(self, folder: Path, group: Group, template: Template) -> Container:
        """See Backend.boot."""
        container = self._container(folder, group, template)
        await container.start("run")
        return container

    async def restore(
        self, folder: Path, group: Group, template: Template, saved: Path, base: Path | None
    ) -> Container:
        """See Backend.restore."""
        return self._container(folder, group, template, saved)

    def _container(self, folder: Path, group: Group, template: Template, saved: Path | None = None) -> Container:
        (folder / "config.json").write_text(json.dumps(self._config(template)))
        command = [self._runsc, "--root", str(self._folder / "state"), *_FLAGS]
        return Container(command, folder, group, self._life[0], saved)

    def _config(self, template: Template) -> dict:
        own = f"{rootfs.PYTHON_HOME}/bin:" if any(bind[0] == rootfs.PYTHON_HOME for bind in self._binds) else ""
        env = variables(template, f"{own}{_PATH}")
        limits = [("RLIMIT_CORE", 1), ("RLIMIT_FSIZE", template.file_bytes), ("RLIMIT_NOFILE", OPEN_FILES)]
        limits += [("RLIMIT_DATA", template.memory_bytes)]
        arguments = ["0", "1", "-1", "-1", "-1", "-1", str(template.pids), str(template.output_bytes)]
        # The agent begins as another user than commands; what it may do for that, it gives up (agent.c, stand_apart).
        capabilities = {kind: ["CAP_SETUID", "CAP_SETGID"] for kind in ("bounding", "effective", "permitted")}
        return {
            "ociVersion": "1.0.2",
            "hostname": rootfs.HOSTNAME,
            "root": {"path": str(self._folder / "root"), "readonly": True},
            "process": {
                "args": [rootfs.AGENT, *arguments],
                "env": [f"{name}={value}" for name, value in env.items()],
                "cwd": "/workspace",
                "user": {"uid": 0, "gid": 0, "umask": 0o022},
                "noNewPrivileges": True,
                "capabilities": capabilities,
                "rlimits": [{"type": kind, "soft": most, "hard": most} for kind, most in limits],
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "dev", "source": "dev"},
                {"destination": "/sys", "type": "tmpfs", "source": "tmpfs", "options": ["ro", "size=4096"]},
                *(self._bind(target, source) for target, source, _ in self._binds),
                *(self._own(target, mode, template.disk_bytes) for target, _, mode in rootfs.OWN),
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
        }

    def _bind(self, target: str, source: str) -> dict:
        return {"destination": target, "source": source, "type": "bind", "options": ["bind", "ro", "nosuid", "nodev"]}

    def _own(self, target: str, mode: int, size: int) -> dict:
        options = [f"mode={mode:o}", f"uid={rootfs.USER_ID}", f"gid={rootfs.USER_ID}", f"size={size}", "nosuid"]
        return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": options}


class Container:
    """See Machine."""

    agent: Streams

    def __init__(self, command: list[str], folder: Path, group: Group, life: int, saved: Path | None):
        self._command = command
        self._folder = folder
        self._group = group
        self._life = life
        self._id = f"c{secrets.token_hex(8)}"
        self._program: Program | None = None
        self._stands = False
        self._saved = saved

    async def start(self, what: str, *options: str) -> None:
        """Has runsc run it; what becomes of that, its agent says, or its end."""
        ours, theirs = socket.socketpair()
        command = [*self._command, what, "-bundle", str(self._folder), *options, self._id]
        with theirs:
            complaints = self._folder / "complaints"
            self._program = Program(command, self._group, complaints, theirs.fileno(), self._life)
        ours.setblocking(False)
        self.agent = await asyncio.open_connection(sock=ours)

    async def save(self, folder: Path) -> None:
        """See Machine.save."""
        await self._ask("pause")
        self._stands = True
        await self._ask("checkpoint", "-leave-running", "-compression=none", f"-image-path={folder}")

    async def keep(self, folder: Path) -> None:
        """See Machine.keep."""
        await self.save(folder)
        await self.kill()

    async def go_on(self) -> None:
        """See Machine.go_on. Its clock and what is random come from the host."""
        if self._program is None:
            await self.start("restore", f"-image-path={self._saved}")
        elif self._stands:
            await self._ask("resume")
            self._stands = False

    async def ended(self) -> None:
        """See Machine.ended."""
        await self._program.wait()

    async def kill(self) -> None:
        """See Machine.kill."""
        if self._program is None:
            return
        await self._program.kill()
        if not self._group.exists:
            with suppress(SandboxError):
                await self._ask("delete", "-force")
        if hasattr(self, "agent"):
            self.agent[1].close()
        for path in Path(self._command[2]).glob(f"{self._id}*"):
            path.unlink(missing_ok=True)

    def private_bytes(self) -> int:
        """See Machine.private_bytes."""
        used = self._group.usage()
        return 0 if used is None else used[0]

    def complaint(self) -> str:
        """See Machine.complaint."""
        return "runsc did not start" if self._program is None else self._program.complaint()

    async def _ask(self, what: str, *options: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command, what, *options, self._id, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(_WAIT_S):
                said, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            raise SandboxError(f"runsc {what} took more than {_WAIT_S} s") from None
        if process.returncode != 0:
            raise SandboxError(f"runsc {what} ended with {process.returncode}: {said.decode(errors='replace')[-500:]}")

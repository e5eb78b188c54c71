"""What kinds of machines have in common, for MachinePool: how they are made, saved, and made again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from venusrl.core.errors import SandboxError
from venusrl.sandbox.contract import Template
from venusrl.sandbox.spawner.limits import Group

MEMORY, STATE, PAGES = "memory", "state", "pages"  # files of a machine that is kept, or saved
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_END_S = 10.0


class Machine(Protocol):
    """One machine.

    Attributes:
      agent: reader and writer of the agent in it, once it runs.
    """

    agent: Streams

    async def save(self, folder: Path) -> None:
        """Writes what it takes to make it again, beside its template, into a folder. It stands still from then on."""

    async def keep(self, folder: Path) -> None:
        """Ends it, and leaves in a folder what clones of it begin with."""

    async def go_on(self) -> None:
        """Runs it, which stands still: saved, or made again. It has the time, and randomness of its own."""

    async def ended(self) -> None:
        """Returns when it has ended by itself, or was killed."""

    async def kill(self) -> None:
        """Ends it; when this returns, nothing of it is left but its folder. Idempotent."""

    def private_bytes(self) -> int:
        """Memory that is this machine's alone, what runs it among it."""

    def complaint(self) -> str:
        """What it last said, for who asks why it ended."""


class Backend(Protocol):
    """One kind of machine, on this host.

    Attributes:
      name: "qemu", "firecracker" or "gvisor".
      clones: every sandbox is a clone of its template's machine; else one of a template without set-up is made anew.
      key: what saved machines need to be as it was.
      host: what SandboxPool.host has.
    """

    name: str
    clones: bool
    key: str
    host: dict

    def close(self) -> None:
        """Its machines have ended."""

    async def open(self, folder: Path) -> None:
        """Finds what it takes. SandboxUnsupported where something is missing; the message says what would bring it.

        Args:
          folder: of this backend's, as long as its pool lives.
        """

    def ceiling(self, template: Template) -> int:
        """Bytes that a machine may take of the host."""

    async def boot(self, folder: Path, group: Group, template: Template) -> Machine:
        """A new one, which runs.

        Args:
          folder: of the machine.
          group: that its processes are to be in.
        """

    async def restore(self, folder: Path, group: Group, template: Template, saved: Path, base: Path | None) -> Machine:
        """One that is as it was when it was saved, and stands still.

        Args:
          saved: folder that Machine.save has written, or Machine.keep.
          base: folder of its template, where it was saved by Machine.save.
        """


class Program:
    """A program in a group of its own, in a session of its own.

    It is born in its group, where that is possible: to move another process there takes the kernel up to 20 ms.

    Args:
      command: what is run.
      group: that it is to be in.
      complaints: file that its error output goes to.
      stdin, stdout: descriptors; by default it has no input, and what it says goes to the complaints.
      folder: that it is to be in.
    """

    def __init__(
        self,
        command: Sequence[str],
        group: Group,
        complaints: Path,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        folder: Path | None = None,
    ):
        self._group = group
        self._complaints = complaints
        self._ended = asyncio.Event()
        with open(complaints, "wb") as said:
            options = {"stdin": stdin, "stdout": said if stdout is None else stdout, "stderr": said, "cwd": folder}
            try:
                group.enter()
                self._process = subprocess.Popen(command, start_new_session=True, **options)
            finally:
                group.leave()
        try:
            group.join(self.pid)
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._collect)

    def _collect(self) -> None:
        if self._process.poll() is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._ended.set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> int:
        """Its exit status."""
        await self._ended.wait()
        return self._process.returncode

    async def kill(self) -> None:
        """Ends it and all that it has started, as far as a group has it. Idempotent."""
        if not self.has_ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        give_up = asyncio.get_running_loop().time() + _END_S
        while self._group.kill() and asyncio.get_running_loop().time() < give_up:
            await asyncio.sleep(0.002)
        await self._ended.wait()

    def private_bytes(self) -> int:
        """Memory that is this process's alone."""
        with suppress(OSError), open(f"/proc/{self.pid}/smaps_rollup") as f:
            fields = dict(line.split(":", 1) for line in f if ":" in line)
            return 1024 * sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
        return 0

    def complaint(self) -> str:
        """The end of what it said."""
        with suppress(OSError):
            return self._complaints.read_text(errors="replace").strip()[-500:] or "it does not say why"
        return "it does not say why"


def move(source: Path, target: Path) -> None:
    """A file of memory, most of which may be holes, to where it is kept."""
    try:
        os.rename(source, target)
    except OSError:  # another file system
        done = subprocess.run(["cp", "--sparse=always", source, target], capture_output=True, text=True)
        if done.returncode != 0:
            raise SandboxError(f"the memory of a machine cannot be kept: {done.stderr.strip()[-300:]}") from None
        source.unlink()

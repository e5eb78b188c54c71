"""Virtual machines of Firecracker's, each a process that is told what to do over its API socket.

As with QEMU a machine is booted, kept, and cloned: Firecracker maps the memory file of a snapshot privately, so that
clones share what none has written, and what a clone has written is found and put back through /proc (see pages.py).
The guest's ports are vsock ones, which it listens on; a connection ends whenever the machine is saved, and the guest,
and the agent in it, take the next.

Source of the requests: src/firecracker/swagger/firecracker.yaml, docs/snapshotting and docs/vsock.md of Firecracker
1.8, the first whose devices a kernel finds without its own command line (ACPI).
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import httpx

from venusrl.core.calls import client
from venusrl.core.errors import SandboxError, SandboxUnsupported
from venusrl.sandbox.contract import MIB, Template
from venusrl.sandbox.machines import pages
from venusrl.sandbox.machines.backend import MEMORY, PAGES, STATE, Program, Streams, move
from venusrl.sandbox.machines.guest import CGROUPS, find_accelerator, introduce, memory_mib, refresh
from venusrl.sandbox.machines.image import Image, find_image, find_vmlinux
from venusrl.sandbox.programs import default_folder
from venusrl.sandbox.spawner.limits import Group

FIRECRACKER = "firecracker/firecracker"  # below the folder of programs
LEAST_FIRECRACKER = (1, 8)
CONTROL_PORT, AGENT_PORT = 1, 2  # as in guest.c
HOST_MIB = 64  # of the host's memory that it takes besides the guest's, which is there twice while it is saved
_API, _VSOCK = "api", "vsock"  # relative to the machine's folder: a clone's are its own
_ARGUMENTS = "console=ttyS0 quiet panic=-1 reboot=k random.trust_cpu=on mitigations=off ports=vsock"
_WAIT_S = 60.0
_POLL_S = 0.002


def find_firecracker() -> str:
    """Its path. SandboxUnsupported where there is none that will do."""
    path = shutil.which("firecracker") or str(default_folder() / FIRECRACKER)
    if not os.path.exists(path):
        raise SandboxUnsupported(
            "firecracker is not installed, and Debian has no package of it: take the program of a release of 1.8 or "
            f"newer from its makers (github.com/firecracker-microvm/firecracker/releases), as {path}"
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    found = re.search(r"v(\d+)\.(\d+)", said)
    version = tuple(map(int, found.groups())) if found else (0, 0)
    if version < LEAST_FIRECRACKER:
        raise SandboxUnsupported(f"{path} is version {'.'.join(map(str, version))}; 1.8 or newer is needed")
    return path


class Firecracker:
    """The backend. Args: needs_kvm: without KVM it cannot run anything, and says so at once."""

    name = "firecracker"
    clones = True
    _image: Image

    def __init__(self, needs_kvm: bool = True):
        self._needs_kvm = needs_kvm
        self._program, self._kernel = "", Path()

    async def open(self, folder: Path) -> None:
        """See Backend.open."""
        self._program = await asyncio.to_thread(find_firecracker)
        if self._needs_kvm and find_accelerator() != "kvm":
            raise SandboxUnsupported(
                "firecracker needs /dev/kvm, readable and writable, of a host that is no virtual machine of the PVM "
                "kind; without it, use qemu"
            )
        self._image = await asyncio.to_thread(find_image)
        self._kernel = await asyncio.to_thread(find_vmlinux, self._image.kernel)

    def close(self) -> None:
        """See Backend.close."""

    @property
    def key(self) -> str:
        return f"{self._image.key}-{platform.machine()}"

    @property
    def host(self) -> dict:
        return {"mode": "machine", "accelerator": "kvm", "image": self._image.key, "cgroups": CGROUPS}

    def ceiling(self, template: Template) -> int:
        """See Backend.ceiling."""
        return (2 * memory_mib(template) + HOST_MIB) * MIB

    async def boot(self, folder: Path, group: Group, template: Template) -> FirecrackerMachine:
        """See Backend.boot."""
        machine = await self._start(folder, group)
        try:
            await machine.ask("PUT", "/machine-config", vcpu_count=1, mem_size_mib=memory_mib(template))
            kernel = {"kernel_image_path": str(self._kernel), "initrd_path": str(self._image.initramfs)}
            await machine.ask("PUT", "/boot-source", **kernel, boot_args=_ARGUMENTS)
            await machine.ask("PUT", "/vsock", guest_cid=3, uds_path=_VSOCK)
            await machine.ask("PUT", "/actions", action_type="InstanceStart")
            await machine.connect("control")
            await introduce(machine, template)
            await machine.connect("agent")
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def restore(
        self, folder: Path, group: Group, template: Template, saved: Path, base: Path | None
    ) -> FirecrackerMachine:
        """See Backend.restore."""
        memory = (saved if base is None else base) / MEMORY
        machine = await self._start(folder, group)
        machine.memory = memory
        try:
            backend = {"backend_type": "File", "backend_path": str(memory)}
            state = str(saved / STATE)
            await machine.ask("PUT", "/snapshot/load", snapshot_path=state, mem_backend=backend, resume_vm=False)
            if base is not None:
                await asyncio.to_thread(pages.load, machine.program.pid, memory, saved / PAGES)
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def _start(self, folder: Path, group: Group) -> FirecrackerMachine:
        command = [self._program, "--api-sock", _API, "--id", folder.name.strip(".")]
        program = Program(command, group, folder / "complaints", folder=folder)
        machine = FirecrackerMachine(program, folder)
        try:
            await machine.until(lambda: (folder / _API).exists())
        except BaseException:
            await machine.kill()
            raise
        return machine


class FirecrackerMachine:
    """See Machine. Attributes: program: Firecracker. memory: file of its template's. control: the guest's port."""

    agent: Streams
    control: Streams

    def __init__(self, program: Program, folder: Path):
        self.program = program
        self.memory: Path | None = None
        self._folder = folder
        transport = httpx.AsyncHTTPTransport(uds=str(folder / _API))
        self._http = client("http://firecracker", transport=transport, timeout=_WAIT_S)

    async def save(self, folder: Path) -> None:
        """See Machine.save. Only of what is a clone."""
        whole = self._folder / "whole"
        await self._stop(folder / STATE, whole)
        whole.unlink()
        await asyncio.to_thread(pages.save, self.program.pid, self.memory, folder / PAGES)

    async def keep(self, folder: Path) -> None:
        """See Machine.keep."""
        await self._stop(folder / STATE, self._folder / MEMORY)
        await self.kill()
        await asyncio.to_thread(move, self._folder / MEMORY, folder / MEMORY)

    async def _stop(self, state: Path, memory: Path) -> None:
        await self.ask("PATCH", "/vm", state="Paused")
        files = {"snapshot_path": str(state), "mem_file_path": str(memory)}
        await self.ask("PUT", "/snapshot/create", snapshot_type="Full", **files)

    async def go_on(self) -> None:
        """See Machine.go_on."""
        await self.ask("PATCH", "/vm", state="Resumed")
        await self.connect("control")
        await refresh(self)
        await self.connect("agent")

    async def ended(self) -> None:
        """See Machine.ended."""
        await self.program.wait()

    async def kill(self) -> None:
        """See Machine.kill."""
        await self.program.kill()
        for name in ("control", "agent"):
            if hasattr(self, name):
                getattr(self, name)[1].close()
        await self._http.aclose()

    def private_bytes(self) -> int:
        """See Machine.private_bytes."""
        return self.program.private_bytes()

    def complaint(self) -> str:
        """See Machine.complaint."""
        return self.program.complaint()

    async def ask(self, method: str, path: str, **body) -> None:
        """SandboxError where it refuses, or has ended."""
        try:
            answer = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise SandboxError(f"firecracker does not answer {path} ({error!r}): {self.program.complaint()}") from None
        if not answer.is_success:
            raise SandboxError(f"firecracker refuses {path}: {answer.text[:500]}")

    async def until(self, holds) -> None:
        """SandboxError where it ends before, or takes too long."""
        give_up = time.monotonic() + _WAIT_S
        while not holds():
            if self.program.has_ended or time.monotonic() > give_up:
                raise SandboxError(f"firecracker did not start: {self.program.complaint()}")
            await asyncio.sleep(_POLL_S)

    async def connect(self, name: str) -> None:
        """To a port of the guest's, once it listens."""
        port = CONTROL_PORT if name == "control" else AGENT_PORT
        if hasattr(self, name):
            getattr(self, name)[1].close()
        give_up = time.monotonic() + _WAIT_S
        while True:
            with suppress(ConnectionError, FileNotFoundError):
                reader, writer = await asyncio.open_unix_connection(str(self._folder / _VSOCK))
                writer.write(f"CONNECT {port}\n".encode())
                if (await reader.readline()).startswith(b"OK "):
                    setattr(self, name, (reader, writer))
                    return
                writer.close()
            if self.program.has_ended or time.monotonic() > give_up:
                raise SandboxError(f"the guest does not listen on port {port}: {self.program.complaint()}")
            await asyncio.sleep(_POLL_S)

"""Virtual machines of QEMU's, each a process that is told what to do over its QMP socket.

A machine is booted, stopped, and cloned. Its memory is a file: a clone maps that privately, so that clones share what
none of them has written. Beside the memory there is the state of the devices alone, which QEMU saves for Xen's sake
(xen-save-devices-state). What a clone has written is found and put back through /proc (see pages.py): saved are the
pages that it has of its own, and what it never wrote is shared again where it is restored.
"""

from __future__ import annotations

import asyncio
import json
import platform
import shlex
import time
from contextlib import suppress
from pathlib import Path

from venusrl.core.errors import ConfigError, SandboxError
from venusrl.sandbox.contract import MIB, Template
from venusrl.sandbox.machines import pages
from venusrl.sandbox.machines.backend import MEMORY, PAGES, STATE, Program, Streams, move
from venusrl.sandbox.machines.guest import CGROUPS, WAIT_S, find_accelerator, introduce, memory_mib, refresh
from venusrl.sandbox.machines.image import QEMU, Image, find_image, find_qemu
from venusrl.sandbox.spawner.limits import Group

HOST_MIB = 192  # of the host's memory that QEMU takes besides the guest's
# Without hardware virtualization: 32 MiB of translated code a machine.
ACCELERATORS = {"kvm": "kvm", "tcg": "tcg,thread=single,tb-size=32"}
_CONSOLE_CHARS = 2000  # of the end of what a guest says: a kernel that panics traces its calls after why
_POLL_S = 0.002


class Qemu:
    """The backend. Args: accelerator: "kvm", "tcg", or "auto"."""

    name = "qemu"
    clones = True
    _image: Image

    def __init__(self, accelerator: str = "auto"):
        if accelerator not in ("auto", *ACCELERATORS):
            raise ConfigError(f"accelerator={accelerator!r}: give 'auto', 'kvm' or 'tcg'")
        self.accelerator = find_accelerator() if accelerator == "auto" else accelerator

    async def open(self, folder: Path) -> None:
        """See Backend.open."""
        await asyncio.to_thread(find_qemu)
        self._image = await asyncio.to_thread(find_image)

    def close(self) -> None:
        """See Backend.close."""

    @property
    def key(self) -> str:
        return f"{self._image.key}-{self.accelerator}-{platform.machine()}"

    @property
    def host(self) -> dict:
        return {"mode": "machine", "accelerator": self.accelerator, "image": self._image.key, "cgroups": CGROUPS}

    def ceiling(self, template: Template) -> int:
        """See Backend.ceiling."""
        return (memory_mib(template) + HOST_MIB) * MIB

    async def boot(self, folder: Path, group: Group, template: Template) -> QemuMachine:
        """See Backend.boot."""
        memory = folder / MEMORY
        machine = await self._start(folder, group, template, memory, "on")
        try:
            await introduce(machine, template)
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def restore(
        self, folder: Path, group: Group, template: Template, saved: Path, base: Path | None
    ) -> QemuMachine:
        """See Backend.restore."""
        memory = (saved if base is None else base) / MEMORY
        machine = await self._start(folder, group, template, memory, "off", "-S", "-incoming", "defer")
        try:
            if base is not None:  # first: devices look at their queues, which are in the memory, when they are loaded
                await asyncio.to_thread(pages.load, machine.program.pid, memory, saved / PAGES)
            await machine.load(saved / STATE)
        except BaseException:
            await machine.kill()
            raise
        return machine

    async def _start(
        self, folder: Path, group: Group, template: Template, memory: Path, share: str, *more: str
    ) -> QemuMachine:
        mib = memory_mib(template)
        command = [QEMU, "-accel", ACCELERATORS[self.accelerator], "-cpu", "max", "-display", "none", "-nodefaults"]
        command += ["-no-reboot", "-no-user-config", "-m", f"{mib}"]
        command += ["-machine", "q35,memory-backend=memory,suppress-vmdesc=on"]
        backend = f"memory-backend-file,id=memory,size={mib}M,mem-path={memory},share={share}"
        command += ["-object", backend, "-kernel", str(self._image.kernel), "-initrd", str(self._image.initramfs)]
        command += ["-append", "console=ttyS0 quiet panic=-1 random.trust_cpu=on mitigations=off"]
        command += ["-device", "virtio-serial-pci", "-serial", f"file:{folder / 'console'}"]
        command += ["-global", "migration.send-configuration=off"]  # neither it nor a vmdesc is in devices' state
        for name in ("control", "agent"):
            command += ["-chardev", f"socket,id={name},path={folder / name},server=on,wait=off"]
            command += ["-device", f"virtserialport,chardev={name},name={name}"]
        command += ["-qmp", f"unix:{folder / 'qmp'},server=on,wait=off", *more]
        program = Program(command, group, folder / "complaints")
        machine = QemuMachine(program, folder, memory)
        try:
            await machine.connect()
        except BaseException:
            await machine.kill()
            raise
        return machine


class QemuMachine:
    """See Machine. Attributes: program: QEMU. control: reader and writer of the port "control"."""

    agent: Streams
    control: Streams
    _qmp: Streams

    def __init__(self, program: Program, folder: Path, memory: Path):
        self.program = program
        self._folder = folder
        self._memory = memory
        self._streams: list[Streams] = []

    async def connect(self) -> None:
        """To QEMU, and through it to the guest's ports."""
        self._qmp = await self._connect("qmp")
        await self._qmp[0].readline()
        await self.ask("qmp_capabilities")
        self.control, self.agent = await self._connect("control"), await self._connect("agent")

    async def load(self, state: Path) -> None:
        """The state of the devices."""
        await self.ask("migrate-incoming", uri=f"exec:cat {shlex.quote(str(state))}")
        while (status := (await self.ask("query-migrate")).get("status")) != "completed":
            if status == "failed":
                raise SandboxError(f"QEMU could not restore the machine: {self.complaint()}")
            await asyncio.sleep(_POLL_S)

    async def save(self, folder: Path) -> None:
        """See Machine.save. Only of what is a clone: the memory of another is not its own."""
        await self.ask("stop")
        await self.ask("xen-save-devices-state", filename=str(folder / STATE), live=False)
        await asyncio.to_thread(pages.save, self.program.pid, self._memory, folder / PAGES)

    async def keep(self, folder: Path) -> None:
        """See Machine.keep."""
        await self.ask("stop")
        await self.ask("xen-save-devices-state", filename=str(folder / STATE), live=False)
        await self.kill()
        await asyncio.to_thread(move, self._memory, folder / MEMORY)

    async def go_on(self) -> None:
        """See Machine.go_on."""
        await self.ask("cont")
        await refresh(self)

    async def ended(self) -> None:
        """See Machine.ended."""
        await self.program.wait()

    async def kill(self) -> None:
        """See Machine.kill."""
        await self.program.kill()
        for _, writer in self._streams:
            writer.close()

    def private_bytes(self) -> int:
        """See Machine.private_bytes; QEMU's own is among it."""
        return self.program.private_bytes()

    async def _connect(self, name: str) -> Streams:
        give_up = time.monotonic() + WAIT_S
        while True:
            try:
                streams = await asyncio.open_unix_connection(str(self._folder / name))
            except (FileNotFoundError, ConnectionRefusedError):
                if self.program.has_ended or time.monotonic() > give_up:
                    raise SandboxError(f"QEMU did not start: {self.complaint()}") from None
                await asyncio.sleep(_POLL_S)
            else:
                self._streams.append(streams)
                return streams

    async def ask(self, command: str, **arguments) -> dict:
        """What QEMU returns. SandboxError where it refuses, or has ended."""
        reader, writer = self._qmp
        writer.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while line := await _line(reader):
            answer = json.loads(line)
            if "error" in answer:
                raise SandboxError(f"QEMU refuses {command}: {answer['error'].get('desc')}")
            if "return" in answer:
                return answer["return"]
        raise SandboxError(f"QEMU ended: {self.complaint()}")

    def complaint(self) -> str:
        """See Machine.complaint."""
        with suppress(OSError):
            said = (self._folder / "console").read_text(errors="replace").strip()
            if said:
                return said[-_CONSOLE_CHARS:]
        return self.program.complaint()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Nothing where the other side has ended."""
    try:
        return await reader.readline()
    except ConnectionError:
        return b""

"""One virtual machine: a QEMU process, told what to do over its QMP socket.

A machine is booted, saved while it stands still, and cloned. Its memory is a file: a clone maps that privately, so
that clones share what none of them has written; what is saved beside it is the devices' state alone (QEMU's
x-ignore-shared).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path

from venusrl.core.errors import SandboxError
from venusrl.sandbox.microvm.image import QEMU, Image

ENTROPY_BYTES = 32
_WAIT_S = 120.0  # for a boot; without hardware virtualization it takes seconds
_POLL_S = 0.002


class Machine:
    """One QEMU process. Make it with `Machine.boot` or `Machine.clone`.

    Attributes:
      process: of QEMU.
      agent: reader and writer of the port "agent".
    """

    process: asyncio.subprocess.Process
    agent: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    def __init__(self, folder: Path):
        self._folder = folder
        self._qmp: tuple[asyncio.StreamReader, asyncio.StreamWriter]
        self._control: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    @classmethod
    async def boot(
        cls, folder: Path, image: Image, accelerator: str, memory_mib: int, configuration: list[str]
    ) -> Machine:
        """A machine whose agent runs. Its memory is the file `memory` in the folder.

        Args:
          configuration: see guest.c.
        """
        machine = cls(folder)
        await machine._start(image, accelerator, memory_mib, folder / "memory", "on", [])
        up = await asyncio.wait_for(machine._control[0].readexactly(2), _WAIT_S)
        if up != b"up":
            raise SandboxError(f"the guest says {up!r}")
        data = b"".join(text.encode() + b"\0" for text in configuration)
        machine._control[1].write(struct.pack("<I", len(data)) + data)
        return machine

    @classmethod
    async def clone(cls, folder: Path, image: Image, accelerator: str, memory_mib: int, saved: Path) -> Machine:
        """A machine that is as the one was that is saved in the folder `saved`, with the time and randomness of now."""
        machine = cls(folder)
        incoming = ["-incoming", "defer"]
        await machine._start(image, accelerator, memory_mib, saved / "memory", "off", incoming)
        await machine._ignore_shared()
        await machine.ask("migrate-incoming", uri=f"exec:cat {saved / 'state'}")
        await machine._migrated()
        await machine.ask("cont")
        await machine.refresh()
        return machine

    async def refresh(self) -> None:
        """Gives the guest the time, and entropy of its own."""
        self._control[1].write(struct.pack("<Q", time.time_ns()) + os.urandom(ENTROPY_BYTES))
        if await asyncio.wait_for(self._control[0].readexactly(2), _WAIT_S) != b"ok":
            raise SandboxError("the guest did not take the time")

    async def save(self) -> None:
        """Writes `state` beside `memory`; the machine stands still from then on, and is to be killed."""
        await self.ask("stop")
        await self._ignore_shared()
        await self.ask("migrate", uri=f"exec:cat > {self._folder / 'state'}")
        await self._migrated()

    async def _ignore_shared(self) -> None:
        await self.ask("migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}])

    async def _migrated(self) -> None:
        while True:
            status = (await self.ask("query-migrate")).get("status")
            if status == "completed":
                return
            if status == "failed":
                raise SandboxError(f"QEMU could not save or restore the machine; {self._complaint()}")
            await asyncio.sleep(_POLL_S)

    async def _start(self, image: Image, accelerator: str, memory_mib: int, memory: Path, share: str, more: list[str]):
        command = [QEMU, "-accel", accelerator, "-cpu", "max", "-display", "none", "-nodefaults", "-no-reboot"]
        command += ["-no-user-config", "-m", f"{memory_mib}", "-machine", "q35,memory-backend=memory"]
        backend = f"memory-backend-file,id=memory,size={memory_mib}M,mem-path={memory},share={share}"
        command += ["-object", backend, "-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
        command += ["-append", "console=ttyS0 quiet panic=-1 random.trust_cpu=on mitigations=off"]
        command += ["-device", "virtio-serial-pci", "-serial", f"file:{self._folder / 'console'}"]
        for name in ("control", "agent"):
            command += ["-chardev", f"socket,id={name},path={self._folder / name},server=on,wait=off"]
            command += ["-device", f"virtserialport,chardev={name},name={name}"]
        command += ["-qmp", f"unix:{self._folder / 'qmp'},server=on,wait=off", *more]
        with open(self._folder / "complaints", "wb") as complaints:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=complaints, stderr=complaints, start_new_session=True
            )
        self._qmp = await self._connect("qmp")
        await self._qmp[0].readline()
        await self.ask("qmp_capabilities")
        self._control, self.agent = await self._connect("control"), await self._connect("agent")

    async def _connect(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        give_up = time.monotonic() + _WAIT_S
        while True:
            try:
                return await asyncio.open_unix_connection(str(self._folder / name))
            except (FileNotFoundError, ConnectionRefusedError):
                if self.process.returncode is not None or time.monotonic() > give_up:
                    raise SandboxError(f"QEMU did not start: {self._complaint()}") from None
                await asyncio.sleep(_POLL_S)

    async def ask(self, command: str, **arguments) -> dict:
        """What QEMU returns. SandboxError where it refuses, or has ended."""
        reader, writer = self._qmp
        writer.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while line := await reader.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise SandboxError(f"QEMU refuses {command}: {answer['error'].get('desc')}")
            if "return" in answer:
                return answer["return"]
        raise SandboxError(f"QEMU ended: {self._complaint()}")

    def _complaint(self) -> str:
        with suppress(OSError):
            text = (self._folder / "complaints").read_text(errors="replace") + (self._folder / "console").read_text(
                errors="replace"
            )
            return text.strip()[-500:] or "it does not say why"
        return "it does not say why"

    def private_bytes(self) -> int:
        """Memory that is this machine's alone, QEMU's own among it."""
        with suppress(OSError), open(f"/proc/{self.process.pid}/smaps_rollup") as f:
            fields = dict(line.split(":", 1) for line in f if ":" in line)
            return 1024 * sum(int(fields[name].split()[0]) for name in ("Private_Clean", "Private_Dirty"))
        return 0

    async def kill(self) -> None:
        """Ends it; its folder goes, too."""
        await self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def stop(self) -> None:
        """Ends it, and leaves what it has saved."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        for reader_writer in (self._qmp, self._control, self.agent):
            reader_writer[1].close()

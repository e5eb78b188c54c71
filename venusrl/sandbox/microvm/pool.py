"""MachinePool: sandboxes that are virtual machines, with the contract of the others.

The first sandbox of a template boots a machine, runs the template's set-up in it and one command, and saves it; every
other is a clone. The agent in the guest is the one of process sandboxes, so commands and files are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import secrets
import shutil
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Self

from venusrl.core.errors import ConfigError, SandboxCapacity, SandboxError, SandboxUnsupported
from venusrl.sandbox.accounting import Usage
from venusrl.sandbox.client import RANGE, ProcessSandbox
from venusrl.sandbox.codec import to_json
from venusrl.sandbox.contract import MIB, Template
from venusrl.sandbox.gate import Gate
from venusrl.sandbox.making import PoolStats, variables
from venusrl.sandbox.microvm.image import Image, find_image, why_not
from venusrl.sandbox.microvm.machine import Machine

# What the guest's kernel and its file system take of its memory.
GUEST_MIB = 288
# Without hardware virtualization: 32 MiB of translated code a machine.
ACCELERATORS = {"kvm": "kvm", "tcg": "tcg,thread=single,tb-size=32"}
_SPARE_S = 0.3  # until the agent has a shell ready, which every clone then begins with


def find_accelerator() -> str:
    """It is "kvm" where this host lets machines have it, else "tcg", which runs them in software.

    KVM that is itself within a virtual machine of the PVM kind runs kernels that are made for it alone.
    """
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK) and not os.path.isdir("/sys/module/kvm_pvm")
    return "kvm" if usable else "tcg"


class MachinePool:
    """Makes sandboxes that are virtual machines, at most `max_sandboxes` at once. For one event loop; `async with`.

    Args:
      wait_s: seconds a create call waits for a place before SandboxCapacity.
      accelerator: "kvm", "tcg", or "auto".
      folder: where machines keep their memory; by default in memory, /dev/shm.
      templates: folder of saved machines that outlive the pool, and that pools may share; by default they end with it.
    """

    def __init__(
        self,
        *,
        max_sandboxes: int,
        wait_s: float = 60.0,
        accelerator: str = "auto",
        folder: str | os.PathLike | None = None,
        templates: str | os.PathLike | None = None,
    ):
        if max_sandboxes < 1:
            raise ConfigError(f"MachinePool.max_sandboxes={max_sandboxes}: give at least 1")
        if accelerator not in ("auto", *ACCELERATORS):
            raise ConfigError(f"MachinePool.accelerator={accelerator!r}: give 'auto', 'kvm' or 'tcg'")
        self.accelerator = find_accelerator() if accelerator == "auto" else accelerator
        self._wait_s = wait_s
        self._gate = Gate(max_sandboxes)
        self._top = str(folder) if folder is not None else "/dev/shm" if os.path.isdir("/dev/shm") else None
        self._templates = None if templates is None else Path(templates)
        self._folder: Path | None = None
        self._image: Image | None = None
        self._saved: dict[str, asyncio.Task[Path]] = {}  # folders of saved machines, by what they are of
        self._machines: dict[str, Machine] = {}
        self._sandboxes: dict[str, ProcessSandbox] = {}
        self._watching: set[asyncio.Task] = set()
        self._created = 0
        self._ended: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        why = why_not()
        if why:
            raise SandboxUnsupported(f"no sandbox can be a virtual machine here: {why}")
        self._image = await asyncio.to_thread(find_image)
        self._folder = Path(tempfile.mkdtemp(prefix="venusrl-machines-", dir=self._top))
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    @property
    def host(self) -> dict:
        """What machines have: the accelerator, and the image they boot."""
        cgroups = {"memory": "guest", "pids": "guest", "cpu": None}  # the guest's kernel limits all of it together
        image = self._image.key if self._image else None
        return {"mode": "machine", "accelerator": self.accelerator, "image": image, "cgroups": cgroups}

    @property
    def alive(self) -> int:
        """Sandboxes that exist."""
        return len(self._machines)

    def stats(self) -> PoolStats:
        """Counts since the pool was made."""
        return PoolStats(self.alive, self._gate.waiting, self._created, dict(self._ended))

    async def create(self, template: Template) -> ProcessSandbox:
        """A clone of the template's machine, which is booted and set up where there is none yet.

        Raises:
          SandboxCapacity: no place within wait_s.
          SandboxError: a command of the set-up fails, or QEMU does; the message says how.
        """
        try:
            await self._gate.enter(self._wait_s)
        except TimeoutError:
            raise SandboxCapacity(
                f"no place for {template.name!r} within wait_s={self._wait_s}: {self.alive} sandboxes alive; "
                "kill some, wait, or raise max_sandboxes"
            ) from None
        try:
            saved = await self._template(template)
            machine = await self._new(lambda folder: Machine.clone(folder, *self._kind(template), saved))
        except BaseException:
            self._gate.leave()
            raise
        self._created += 1
        sandbox_id = f"vm-{secrets.token_hex(6)}"
        sandbox = self._begin(sandbox_id, template, machine)
        try:
            await sandbox.open(template.files)
        except BaseException:
            await sandbox.kill()
            raise
        asyncio.get_running_loop().call_later(min(template.ttl_s, 1e7), self._expire, sandbox)
        return sandbox

    def _begin(self, sandbox_id: str, template: Template, machine: Machine) -> ProcessSandbox:
        """The agent of a clone has been ready since before the machine was saved."""
        sandbox = ProcessSandbox(sandbox_id, template, machine.agent, self, first_id=RANGE)
        sandbox.is_ready()
        self._machines[sandbox_id], self._sandboxes[sandbox_id] = machine, sandbox
        self._spawn(self._watch(sandbox_id, machine))
        return sandbox

    def _kind(self, template: Template) -> tuple[Image, str, int]:
        return self._image, ACCELERATORS[self.accelerator], template.memory_bytes // MIB + GUEST_MIB

    async def _new(self, make) -> Machine:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            return await make(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    # Templates

    async def _template(self, template: Template) -> Path:
        """The folder of the template's saved machine."""
        fields = {name: value for name, value in to_json(template).items() if name not in ("name", "files", "ttl_s")}
        key = hashlib.sha256(json.dumps([self._image.key, fields], sort_keys=True).encode()).hexdigest()
        if key in self._saved and self._saved[key].done() and self._saved[key].exception() is not None:
            del self._saved[key]
        if key not in self._saved:
            self._saved[key] = asyncio.create_task(self._find(template, key[:32]))
        return await asyncio.shield(self._saved[key])

    async def _find(self, template: Template, key: str) -> Path:
        """A saved machine is whole once it has its name."""
        top = self._templates or self._folder
        top.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (top / key).is_dir():
            built = await self._build(template, Path(tempfile.mkdtemp(prefix=".", dir=top)))
            try:
                built.rename(top / key)
            except OSError:  # another pool was faster
                shutil.rmtree(built)
        return top / key

    async def boot(self, template: Template, folder: Path | None = None) -> Machine:
        """A machine that is no clone, and that the caller ends."""
        if folder is None:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
        numbers = (template.disk_bytes, template.pids, template.file_bytes, template.output_bytes)
        env = variables(template, "/usr/local/bin:/usr/bin:/bin")
        configuration = [*map(str, numbers), *(f"{name}={value}" for name, value in env.items())]
        image, accelerator, memory_mib = self._kind(template)
        try:
            return await Machine.boot(folder, image, accelerator, memory_mib, configuration)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def _build(self, template: Template, folder: Path) -> Path:
        machine = await self.boot(template, folder)
        sandbox = ProcessSandbox("template", template, machine.agent, self)
        try:
            await sandbox.open({})
            if template.lowers:
                archive = await asyncio.to_thread(_pack, template.lowers)
                await sandbox.write("/tmp/lowers.tar", archive)
                await self._run(sandbox, template, "tar -xf /tmp/lowers.tar && rm /tmp/lowers.tar")
            for command in template.setup:
                await self._run(sandbox, template, command)
            await sandbox.exec("true", timeout_s=60.0)  # what a first command touches is there for all
            await asyncio.sleep(_SPARE_S)
            await machine.save()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            sandbox.mark_lost("closed")
            await machine.stop()
        return folder

    async def _run(self, sandbox: ProcessSandbox, template: Template, command: str) -> None:
        result = await sandbox.exec(command, timeout_s=template.setup_s)
        if result.exit_code != 0:
            why = "took too long" if result.timed_out else f"ended with {result.exit_code}"
            raise SandboxError(f"template {template.name!r}: {command!r} {why}: {result.text[-2000:].strip()}")

    # Life and death

    async def usage(self) -> dict[str, Usage]:
        """Memory of every sandbox, by id: what is its machine's alone, QEMU's own among it."""
        return {name: Usage(machine.private_bytes(), 0, 0) for name, machine in self._machines.items()}

    async def end(self, sandbox_id: str, reason: str) -> None:
        """Kills one for a reason; when it returns, its machine is gone."""
        machine = self._machines.get(sandbox_id)
        if machine is not None:
            self._reasons.setdefault(sandbox_id, reason)
            await machine.kill()
            self._gone(sandbox_id)

    async def _watch(self, sandbox_id: str, machine: Machine) -> None:
        await machine.process.wait()
        self._gone(sandbox_id)
        await machine.kill()

    def _gone(self, sandbox_id: str) -> None:
        if self._machines.pop(sandbox_id, None) is None:
            return
        sandbox = self._sandboxes.pop(sandbox_id)
        sandbox.mark_lost(self._reasons.pop(sandbox_id, "killed"))
        self._ended[sandbox.lost] += 1
        self._gate.leave()

    def _expire(self, sandbox: ProcessSandbox) -> None:
        if sandbox.lost is None:
            self._spawn(sandbox.kill("ttl"))

    def _spawn(self, work) -> None:
        task = asyncio.create_task(work)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def snapshot(self, sandbox: ProcessSandbox) -> str:
        """Always SandboxUnsupported."""
        raise SandboxUnsupported(f"{sandbox.id}: virtual machines are not saved yet; use process sandboxes for that")

    async def fork(self, sandbox: ProcessSandbox) -> ProcessSandbox:
        """Always SandboxUnsupported."""
        raise SandboxUnsupported(f"{sandbox.id}: virtual machines are not forked yet; use process sandboxes for that")

    async def migrate(self, sandbox: ProcessSandbox, node: str) -> None:
        """Always SandboxUnsupported."""
        raise SandboxUnsupported(f"{sandbox.id}: virtual machines do not move yet; use process sandboxes for that")

    async def close(self) -> None:
        """Ends every machine with reason "closed". Idempotent."""
        self._gate.refuse_all(SandboxError("the pool is closed"))
        for sandbox_id in list(self._machines):
            await self.end(sandbox_id, "closed")
        for saved in self._saved.values():
            saved.cancel()
        await asyncio.gather(*self._saved.values(), *self._watching, return_exceptions=True)
        self._saved.clear()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, True)


def _pack(lowers: tuple[str, ...]) -> bytes:
    """The directories, later ones over earlier, as one archive."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for lower in lowers:
            if not os.path.isdir(lower):
                raise SandboxError(f"Template.lowers: {lower!r} is no directory; fix the path")
            tar.add(lower, arcname=".")
    return archive.getvalue()

"""MachinePool: sandboxes that are machines of their own, virtual ones or gVisor's, with the contract of the others.

Where sandboxes are clones, the first of a template boots a machine, runs the template's set-up in it and one command,
and keeps it (kept.py); the others begin with what it was then. The agent in a machine is the one of process sandboxes,
so that commands and files are the same.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from venusrl.core.errors import ConfigError, SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox.accounting import Usage
from venusrl.sandbox.client import RANGE, ProcessSandbox
from venusrl.sandbox.contract import Template
from venusrl.sandbox.machines.backend import Backend, Machine
from venusrl.sandbox.machines.firecracker import Firecracker
from venusrl.sandbox.machines.gvisor import Gvisor
from venusrl.sandbox.machines.kept import Base, Kept, prepare
from venusrl.sandbox.machines.qemu import Qemu
from venusrl.sandbox.saving import Saving, Standstill
from venusrl.sandbox.snapshots import Snapshot, machine, new_id
from venusrl.sandbox.spawner import limits
from venusrl.sandbox.staging import Staging

BACKENDS: dict[str, type] = {"qemu": Qemu, "firecracker": Firecracker, "gvisor": Gvisor}
# Not the processors': in a group of its own a virtual machine's first command came 40 ms later (215 ms, and 260).
_CONTROLLERS = ("memory", "pids")
_PIDS = 4096  # of the host's, that a machine may have
_SPARE_S = 0.3  # until the agent has a shell ready, which every clone then begins with
_LONGEST_S = 1e7


class MachinePool(Saving):
    """Makes sandboxes that are machines, at most `max_sandboxes` at once. For one event loop; `async with`.

    Args:
      backend: "qemu", "firecracker", "gvisor", or one that is made.
      folder: where machines keep their memory; by default in memory, /dev/shm.
      templates: folder in which kept machines outlive the pool, and that pools may share; by default they end with it,
        and then no other pool can restore what is saved of their clones.
      options: see Saving and Places.
    """

    def __init__(
        self,
        backend: str | Backend = "qemu",
        *,
        folder: str | os.PathLike | None = None,
        templates: str | os.PathLike | None = None,
        **options,
    ):
        super().__init__(**options)
        if isinstance(backend, str) and backend not in BACKENDS:
            raise ConfigError(f"MachinePool.backend={backend!r}: give one of {', '.join(BACKENDS)}")
        self.backend: Backend = BACKENDS[backend]() if isinstance(backend, str) else backend
        top = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
        self._runs = Staging(Path(top) / f"venusrl-machines-{os.geteuid()}" if folder is None else folder)
        self._templates = None if templates is None else Path(templates)
        self._folder: Path | None = None
        self._kept: Kept
        self._cgroups = limits.Cgroups([])
        self._machines: dict[str, _Place] = {}
        self._tasks: set[asyncio.Task] = set()

    async def open(self) -> None:
        """See Places.open."""
        self._folder = await asyncio.to_thread(self._runs.stage)
        try:
            (self._folder / "backend").mkdir()
            await self.backend.open(self._folder / "backend")
        except BaseException as error:
            await asyncio.to_thread(self._runs.discard, self._folder)
            self._folder = None
            if isinstance(error, SandboxUnsupported):
                raise SandboxUnsupported(f"no sandbox can be made with {self.backend.name} here: {error}") from None
            raise
        self._kept = Kept(self.backend, (self._templates or self._folder) / "machines", self._build)
        with open("/proc/self/mountinfo") as mounts, open("/proc/self/cgroup") as own:
            mountinfo = mounts.read()
            limits.reap(mountinfo)
            self._cgroups = limits.detect(mountinfo, own.read(), secrets.token_hex(3), _CONTROLLERS)

    @property
    def host(self) -> dict:
        """What machines have, and what they are made with."""
        return self.backend.host

    async def create(self, template: Template) -> ProcessSandbox:
        """A new sandbox; where the template has no machine to be cloned yet, it is booted and set up first.

        Raises:
          SandboxCapacity: no place within wait_s.
          SandboxError: a command of the set-up fails, or the backend does; the message says how.
        """
        sandbox_id = await self._enter(template)
        try:
            if self.backend.clones or template.is_built:
                base = await self._kept.of(template)
                place = await self._made(sandbox_id, template, base.folder, None)
                place.base = base if self.backend.clones else None
                sandbox = await self._woken(sandbox_id, template, place, RANGE, waits=not self.backend.clones)
            else:
                place = await self._booted(sandbox_id, template)
                sandbox = await self._opened(self._begin(sandbox_id, template, place, 0, paused=False), place)
            await sandbox.open(template.files)
        except BaseException:
            await self._abandon(sandbox_id)
            raise
        return sandbox

    async def _woken(
        self, sandbox_id: str, template: Template, place: _Place, first_id: int, waits: bool = True
    ) -> ProcessSandbox:
        """One with an owner that knows nothing of it; who need not wait for what it says to that."""
        await place.machine.go_on()
        sandbox = self._begin(sandbox_id, template, place, first_id, paused=waits)
        sandbox.wake(is_new=True)
        if not waits:
            sandbox.is_ready()
        return await self._opened(sandbox, place)

    async def _opened(self, sandbox: ProcessSandbox, place: _Place) -> ProcessSandbox:
        try:
            await sandbox.open({})
        except SandboxLost as error:
            if place.complaint:
                raise SandboxError(f"{self.backend.name} ended at once: {place.complaint}") from error
            raise
        return sandbox

    def _begin(
        self,
        sandbox_id: str,
        template: Template,
        place: _Place,
        first_id: int,
        ttl_s: float | None = None,
        paused: bool = True,
    ) -> ProcessSandbox:
        if self._machines.get(sandbox_id) is not place:
            raise SandboxError("the pool is closed")
        sandbox = ProcessSandbox(sandbox_id, template, place.machine.agent, self, first_id, paused=paused)
        self._alive[sandbox_id] = sandbox
        self._spawn(self._watch(sandbox_id, place))
        loop, ttl_s = asyncio.get_running_loop(), template.ttl_s if ttl_s is None else ttl_s
        self._ends[sandbox_id] = loop.time() + ttl_s
        place.expiry = loop.call_later(min(ttl_s, _LONGEST_S), self._expire, sandbox)
        return sandbox

    # Machines

    async def boot(self, template: Template) -> tuple[Machine, Callable[[], Awaitable[None]]]:
        """A machine that is no clone, and what ends it."""
        name = f"booted-{secrets.token_hex(4)}"
        try:
            place = await self._booted(name, template)
        except BaseException:
            await self._clear(name)
            raise
        return place.machine, lambda: self._clear(name)

    async def _booted(self, name: str, template: Template) -> _Place:
        return await self._placed(name, template, lambda folder, group: self.backend.boot(folder, group, template))

    async def _made(self, name: str, template: Template, saved: Path, base: Base | None) -> _Place:
        """Of a kept machine, or of what was saved beside a base."""
        beside = None if base is None else base.folder
        place = await self._placed(
            name, template, lambda folder, group: self.backend.restore(folder, group, template, saved, beside)
        )
        place.base = base
        return place

    async def _placed(
        self, name: str, template: Template, make: Callable[[Path, limits.Group], Awaitable[Machine]]
    ) -> _Place:
        """A machine with a folder and a group of its own."""
        if self._closed:
            raise SandboxError("the pool is closed")
        place = self._machines[name] = _Place(self._folder / name)
        place.folder.mkdir(mode=0o700)
        try:
            place.group = self._cgroups.make(name, self.backend.ceiling(template), _PIDS)
        except OSError as error:
            raise SandboxUnsupported(f"no group of processes for a machine: {error}") from None
        made = await make(place.folder, place.group)
        if self._machines.get(name) is not place:
            await made.kill()
            raise SandboxError("the pool is closed")
        place.machine = made
        return place

    async def _clear(self, sandbox_id: str) -> None:
        """Ends a machine; when this returns, nothing of it is left."""
        place = self._machines.get(sandbox_id)
        if place is None:
            return
        async with place.ending:
            if self._machines.get(sandbox_id) is not place:
                return
            if place.expiry is not None:
                place.expiry.cancel()
            if place.machine is not None:
                await place.machine.kill()
            place.group.kill()
            while not place.group.remove():
                place.group.kill()
                await asyncio.sleep(0.002)
            await asyncio.to_thread(shutil.rmtree, place.folder, True)
            del self._machines[sandbox_id]

    async def _build(self, template: Template, target: Path) -> None:
        """Boots a machine, sets it up, and keeps it in a folder."""
        name = f"template-{secrets.token_hex(4)}"
        try:
            place = await self._booted(name, template)
            sandbox = ProcessSandbox(name, template, place.machine.agent, self)
            watching = asyncio.create_task(self._mourn(sandbox, place))
            try:
                await prepare(sandbox)
                await sandbox.exec("true", timeout_s=60.0)  # what a first command touches is there for all
                await asyncio.sleep(_SPARE_S)
                await sandbox.park(stays=True)
                await place.machine.keep(target)
            except SandboxLost as error:
                why = f"{error.reason} {place.complaint}".strip()
                raise SandboxError(f"template {template.name!r}: its machine ended in the set-up: {why}") from error
            finally:
                watching.cancel()
                sandbox.mark_lost("closed")
        finally:
            await self._clear(name)

    async def _mourn(self, sandbox: ProcessSandbox, place: _Place) -> None:
        await place.machine.ended()
        place.complaint = place.machine.complaint()
        sandbox.mark_lost("oom" if place.group.oom_kills() else "killed")

    # Saving and restoring

    def saver(self) -> str:
        """See Saving.saver."""
        return self.backend.name

    def _standstill(self, sandbox: ProcessSandbox, folder: Path) -> Standstill:
        return _Standstill(self, sandbox, folder)

    def _template_of(self, sandbox: ProcessSandbox) -> tuple[str, str] | None:
        place = self._machines.get(sandbox.id)
        return None if place is None or place.base is None else (place.base.key, place.base.identity)

    def _pack_template(self, key: str, folder: Path) -> None:
        self._kept.pack(key, folder)

    def template_digest(self, key: str) -> str | None:
        """See Saving.template_digest: machines of the same recipe differ, and are known by a name of their own."""
        known = self._kept.known(key)
        return None if known is None else known.identity

    def take_template(self, key: str, digest: str, folder: Path) -> None:
        """See Saving.take_template."""
        self._kept.take(key, digest, folder)

    def describe(self, sandbox: ProcessSandbox) -> Snapshot:
        """What is saved of a sandbox."""
        template, base = sandbox.template, self._template_of(sandbox) or ("", "")
        names = (new_id(), template, self.backend.key, machine())
        return Snapshot(*names, 0, "", sandbox.ranges, template.memory_bytes, *base, kind=self.backend.name)

    def _base(self, snapshot: Snapshot) -> Base | None:
        """What it was cloned from. SandboxError where that is not here."""
        snapshot.check(self.backend.name, self.backend.key)
        if not snapshot.layer:
            return None
        base, of = self._kept.known(snapshot.layer), f"the machine that {snapshot.template.name!r} is cloned from"
        if base is None:
            raise SandboxError(
                f"snapshot {snapshot.id}: {of} is not here; keep machines in a folder (MachinePool(templates=...)), "
                "and bring it from where the snapshot was made"
            )
        if base.identity != snapshot.layer_digest:
            raise SandboxError(f"snapshot {snapshot.id}: {of} is another here; bring the one of where it was made")
        return base

    async def _restore(self, snapshot: Snapshot) -> ProcessSandbox:
        base = await asyncio.to_thread(self._base, snapshot)
        async with self._snapshots.folder_of(lambda: self._snapshots.check_out(snapshot)) as folder:
            sandbox_id = await self._enter(snapshot.template)
            try:
                place = await self._made(sandbox_id, snapshot.template, folder, base)
                return await self._woken(sandbox_id, snapshot.template, place, snapshot.ranges * RANGE)
            except BaseException:
                await self._abandon(sandbox_id)
                raise

    async def arrive(self, sandbox_id: str, snapshot: Snapshot, folder: Path, ttl_s: float) -> None:
        """See Saving.arrive."""
        if sandbox_id in self._alive:
            raise SandboxError(f"sandbox {sandbox_id} is here already")
        base = await asyncio.to_thread(self._base, snapshot)
        await self._enter(snapshot.template, sandbox_id, wait_s=0.0)
        try:
            place = await self._made(sandbox_id, snapshot.template, folder, base)
        except BaseException:
            await self._abandon(sandbox_id)
            raise
        place.ttl_s = ttl_s

    async def activate(
        self, sandbox_id: str, snapshot: Snapshot, begin: Callable[[ProcessSandbox], None]
    ) -> ProcessSandbox:
        """See Saving.activate."""
        place = self._machines.get(sandbox_id)
        if place is None:
            raise SandboxError(f"sandbox {sandbox_id} has not arrived here")
        await place.machine.go_on()
        sandbox = self._begin(sandbox_id, snapshot.template, place, snapshot.ranges * RANGE, place.ttl_s)
        begin(sandbox)
        sandbox.wake(is_new=False)
        await sandbox.open({})
        return sandbox

    async def resize(self, sandbox: ProcessSandbox, memory_bytes: int) -> None:
        """Always SandboxUnsupported: a machine has the memory that it was made with."""
        raise SandboxUnsupported(f"{sandbox.id}: the memory of a machine cannot be changed; use process sandboxes")

    # Life and death

    async def usage(self) -> dict[str, Usage]:
        """Memory of every sandbox, by id: what is its machine's alone, what runs it among it."""
        places = [(name, place.machine) for name, place in self._machines.items() if self._alive.get(name) is not None]
        sizes = await asyncio.to_thread(lambda: [machine.private_bytes() for _, machine in places])
        found = {name: Usage(size, 0, 0) for (name, _), size in zip(places, sizes, strict=True) if name in self._alive}
        for name, used in found.items():
            self._remember(name, used.private)
        return found

    async def _finish(self, sandbox_id: str, reason: str) -> None:
        place = self._machines.get(sandbox_id)
        if place is not None:
            place.reason = place.reason or reason
            await self._clear(sandbox_id)
            if sandbox_id not in self._machines:  # and it has not come back
                self._leave(sandbox_id, place.reason)

    async def _watch(self, sandbox_id: str, place: _Place) -> None:
        await place.machine.ended()
        place.complaint = place.machine.complaint()
        if self._machines.get(sandbox_id) is place:
            await self._finish(sandbox_id, "oom" if place.group.oom_kills() else "killed")

    async def _abandon(self, sandbox_id: str) -> None:
        """After a failed or cancelled create."""
        await self._clear(sandbox_id)
        self._leave(sandbox_id, "killed")

    def _expire(self, sandbox: ProcessSandbox) -> None:
        if sandbox.lost is None and self._alive.get(sandbox.id) is sandbox:
            self._spawn(sandbox.kill("ttl"))

    def _spawn(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """See Places.close."""
        if self._closed or self._folder is None:
            return
        self._closed = True
        self._gate.refuse_all(SandboxError("the pool is closed"))
        await self._kept.close()
        for sandbox_id, sandbox in list(self._alive.items()):
            if sandbox is not None:
                sandbox.mark_lost("closed")
            await self.end(sandbox_id, "closed")
        for name in list(self._machines):
            await self._clear(name)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.backend.close()
        self._cgroups.close()
        await asyncio.to_thread(self._runs.discard, self._folder)


class _Place:
    """A machine, and what it has of the host."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.group = limits.Group([], [], None)
        self.machine: Machine | None = None  # while it is being made
        self.base: Base | None = None  # that it was cloned from
        self.reason = ""  # why it is being ended
        self.complaint = ""  # what it said when it ended
        self.expiry: asyncio.TimerHandle | None = None
        self.ttl_s: float | None = None
        self.ending = asyncio.Lock()


class _Standstill(Standstill):
    """Of a machine, whose agent stays where it is."""

    def __init__(self, pool: MachinePool, sandbox: ProcessSandbox, folder: Path):
        super().__init__(sandbox)
        self._pool, self._folder = pool, folder
        self._machine = pool._machines[sandbox.id].machine
        self._stands = False

    async def stop(self) -> Snapshot:
        await self.sandbox.park(stays=True)
        self._stands = True
        await self._machine.save(self._folder)
        return await asyncio.to_thread(self._pool.describe, self.sandbox)

    async def unpark(self) -> None:
        if not self._stands:
            return
        self._stands = False
        try:
            await self._machine.go_on()
        except (SandboxError, OSError) as error:
            self.sandbox.mark_lost("node-lost")
            await self._pool._clear(self.sandbox.id)
            raise SandboxLost(self.sandbox.id, self.sandbox.lost or "node-lost") from error
        self.sandbox.unpark(self._machine.agent, stayed=True)

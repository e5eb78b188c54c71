"""MachinePool: sandboxes that are machines of their own, virtual ones or gVisor's, with the contract of the others.

Where sandboxes are clones, the first of a template boots a machine, runs the template's set-up in it and one command,
and keeps it; the others begin with what it was then. The agent in a machine is the one of process sandboxes, so that
commands and files are the same.
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
from collections.abc import Awaitable, Callable
from pathlib import Path

from venusrl.core.errors import ConfigError, SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox.accounting import Usage
from venusrl.sandbox.client import RANGE, ProcessSandbox
from venusrl.sandbox.codec import to_json
from venusrl.sandbox.contract import Template
from venusrl.sandbox.layers import layer_key
from venusrl.sandbox.machines import pages
from venusrl.sandbox.machines.backend import MEMORY, PAGES, STATE, Backend, Machine
from venusrl.sandbox.machines.firecracker import Firecracker
from venusrl.sandbox.machines.gvisor import Gvisor
from venusrl.sandbox.machines.qemu import Qemu
from venusrl.sandbox.places import set_up
from venusrl.sandbox.saving import MOVED, Saving, Standstill
from venusrl.sandbox.snapshots import Snapshot, machine, new_id
from venusrl.sandbox.spawner import limits
from venusrl.sandbox.spawner.sharing import LOOK_S, Sharing
from venusrl.sandbox.staging import Staging

BACKENDS: dict[str, type] = {"qemu": Qemu, "firecracker": Firecracker, "gvisor": Gvisor}
_PIDS = 4096  # of the host's, that a machine may have
_SPARE_S = 0.3  # until the agent has a shell ready, which every clone then begins with
_LONGEST_S = 1e7
_IDENTITY = "identity"


class MachinePool(Saving):
    """Makes sandboxes that are machines, at most `max_sandboxes` at once. For one event loop; `async with`.

    Args:
      backend: "qemu", "firecracker", "gvisor", or one that is made.
      folder: where machines keep their memory; by default in memory, /dev/shm.
      templates: folder of kept machines that outlive the pool, and that pools may share; by default they end with it,
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
        self._given_templates = templates
        self._folder: Path | None = None
        self._templates: Staging
        self._cgroups = limits.Cgroups([])
        self._keys: dict[str, str] = {}  # by what is asked of a machine
        self._kept: dict[str, asyncio.Task[Path]] = {}  # folders of kept machines, by the key of their template
        self._machines: dict[str, _Place] = {}
        self._tasks: set[asyncio.Task] = set()

    async def open(self) -> None:
        """See Places.open."""
        self._folder = await asyncio.to_thread(self._runs.stage)
        self._templates = Staging(self._given_templates or self._folder / "templates")
        (self._folder / "backend").mkdir()
        try:
            await self.backend.open(self._folder / "backend")
        except SandboxUnsupported as error:
            await asyncio.to_thread(self._runs.discard, self._folder)
            raise SandboxUnsupported(f"no sandbox can be made with {self.backend.name} here: {error}") from None
        with open("/proc/self/mountinfo") as mounts, open("/proc/self/cgroup") as own:
            mountinfo = mounts.read()
            limits.reap(mountinfo)
            self._cgroups = limits.detect(mountinfo, own.read(), secrets.token_hex(3))
        self._spawn(self._share())

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
                kept = await self._template(template)
                place = await self._made(sandbox_id, template, kept, None)
                await place.machine.go_on()
                sandbox = self._begin(sandbox_id, template, place, RANGE)
                sandbox.wake(is_new=True)
            else:
                place = await self._booted(sandbox_id, template)
                sandbox = self._begin(sandbox_id, template, place, 0)
            await sandbox.open(template.files)
        except BaseException:
            await self._abandon(sandbox_id)
            raise
        return sandbox

    def _begin(
        self, sandbox_id: str, template: Template, place: _Place, first_id: int, ttl_s: float | None = None
    ) -> ProcessSandbox:
        sandbox = ProcessSandbox(sandbox_id, template, place.machine.agent, self, first_id, paused=first_id > 0)
        self._alive[sandbox_id] = sandbox
        self._spawn(self._watch(sandbox_id, place))
        loop, ttl_s = asyncio.get_running_loop(), template.ttl_s if ttl_s is None else ttl_s
        self._ends[sandbox_id] = loop.time() + ttl_s
        loop.call_later(min(ttl_s, _LONGEST_S), self._expire, sandbox)
        return sandbox

    # Machines

    async def _booted(self, sandbox_id: str, template: Template) -> _Place:
        return await self._placed(
            sandbox_id, template, lambda folder, group: self.backend.boot(folder, group, template)
        )

    async def _made(self, sandbox_id: str, template: Template, saved: Path, base: Path | None) -> _Place:
        return await self._placed(
            sandbox_id, template, lambda folder, group: self.backend.restore(folder, group, template, saved, base)
        )

    async def _placed(
        self, name: str, template: Template, make: Callable[[Path, limits.Group], Awaitable[Machine]]
    ) -> _Place:
        """A machine with a folder and a group of its own."""
        folder = self._folder / name
        folder.mkdir(mode=0o700)
        try:
            group = self._cgroups.make(name, self.backend.ceiling(template), _PIDS)
        except OSError as error:
            raise SandboxUnsupported(f"no group of processes for a machine: {error}") from None
        place = self._machines[name] = _Place(folder, group)
        place.machine = await make(folder, group)
        return place

    async def _clear(self, sandbox_id: str) -> None:
        """Ends a machine; when this returns, nothing of it is left."""
        place = self._machines.get(sandbox_id)
        if place is None:
            return
        async with place.ending:
            if sandbox_id not in self._machines:
                return
            if place.machine is not None:
                await place.machine.kill()
            else:
                place.group.kill()
            while not place.group.remove():
                place.group.kill()
                await asyncio.sleep(0.002)
            await asyncio.to_thread(shutil.rmtree, place.folder, True)
            del self._machines[sandbox_id]

    # Templates

    def _template_key(self, template: Template) -> str:
        """Names what the template's machine is made of; its lower directories as they were when it was first asked."""
        fields = {name: value for name, value in to_json(template).items() if name not in ("name", "files", "ttl_s")}
        record = json.dumps(fields, sort_keys=True)
        if record not in self._keys:
            parts = json.dumps([self.backend.name, self.backend.key, record, layer_key(template)])
            self._keys[record] = hashlib.sha256(parts.encode()).hexdigest()
        return self._keys[record]

    async def _template(self, template: Template) -> Path:
        """The folder of the template's kept machine."""
        key = await asyncio.to_thread(self._template_key, template)
        if key in self._kept and self._kept[key].done() and self._kept[key].exception() is not None:
            del self._kept[key]
        if key not in self._kept:
            self._kept[key] = asyncio.create_task(self._find(template, key))
        return await asyncio.shield(self._kept[key])

    async def _find(self, template: Template, key: str) -> Path:
        """What is kept is whole once it has its name."""
        folder = self._templates.folder / key
        if not folder.is_dir():
            staged = await asyncio.to_thread(self._templates.stage)
            try:
                await self._build(template, staged)
                (staged / _IDENTITY).write_text(secrets.token_hex(32))
                self._templates.publish(staged, key)
            except OSError:
                if not folder.is_dir():  # else another pool was faster
                    raise
            finally:
                await asyncio.to_thread(self._templates.discard, staged)
        return folder

    async def boot(self, template: Template) -> tuple[Machine, Callable[[], Awaitable[None]]]:
        """A machine that is no clone, and what ends it."""
        name = f"booted-{secrets.token_hex(4)}"
        place = await self._booted(name, template)
        return place.machine, lambda: self._clear(name)

    async def _build(self, template: Template, target: Path) -> None:
        name = f"template-{secrets.token_hex(4)}"
        try:
            place = await self._placed(name, template, lambda folder, group: self.backend.boot(folder, group, template))
            sandbox = ProcessSandbox(name, template, place.machine.agent, self)
            try:
                await sandbox.open({})
                if template.lowers:
                    await sandbox.write("/tmp/lowers.tar", await asyncio.to_thread(_pack, template.lowers))
                    await set_up(sandbox, template, ("tar -xf /tmp/lowers.tar && rm /tmp/lowers.tar",))
                await set_up(sandbox, template, template.setup)
                await sandbox.exec("true", timeout_s=60.0)  # what a first command touches is there for all
                await asyncio.sleep(_SPARE_S)
                await sandbox.park(stays=True)
                await place.machine.keep(target)
            finally:
                sandbox.mark_lost("closed")
        finally:
            await self._clear(name)

    # Saving and restoring

    def saver(self) -> str:
        """See Saving.saver."""
        return self.backend.name

    def _standstill(self, sandbox: ProcessSandbox, folder: Path) -> Standstill:
        return _Standstill(self, sandbox, folder)

    def _template_of(self, sandbox: ProcessSandbox) -> tuple[str, str] | None:
        if not self.backend.clones:
            return None  # what is saved is whole
        key = self._template_key(sandbox.template)
        return key, (self._templates.folder / key / _IDENTITY).read_text()

    def _pack_template(self, key: str, folder: Path) -> None:
        kept = self._templates.folder / key
        for name in (STATE, _IDENTITY):
            shutil.copyfile(kept / name, folder / name)
        pages.pack(kept / MEMORY, folder / PAGES)

    def template_digest(self, key: str) -> str | None:
        """See Saving.template_digest: machines of the same recipe differ, and are known by a name of their own."""
        try:
            return (self._templates.folder / key / _IDENTITY).read_text()
        except FileNotFoundError:
            return None

    def take_template(self, key: str, digest: str, folder: Path) -> None:
        """See Saving.take_template."""
        if (folder / _IDENTITY).read_text() != digest:
            raise SandboxError(f"template {key[:12]} has not come as it was sent; it is not kept")
        staged = self._templates.stage()
        try:
            for name in (STATE, _IDENTITY):
                shutil.copyfile(folder / name, staged / name)
            pages.unpack(folder / PAGES, staged / MEMORY)
            self._templates.publish(staged, key)
        except OSError:
            if self.template_digest(key) != digest:  # else it has come twice
                raise
        finally:
            self._templates.discard(staged)

    def describe(self, sandbox: ProcessSandbox) -> Snapshot:
        """What is saved of a sandbox."""
        template, base = sandbox.template, self._template_of(sandbox) or ("", "")
        names = (new_id(), template, self.backend.key, machine())
        return Snapshot(*names, 0, "", sandbox.ranges, template.memory_bytes, *base, kind=self.backend.name)

    def _base(self, snapshot: Snapshot) -> Path | None:
        """The folder of its template. SandboxError where it is not here."""
        snapshot.check(self.backend.name, self.backend.key)
        if not snapshot.layer:
            return None
        folder = self._templates.folder / snapshot.layer
        try:
            identity = (folder / _IDENTITY).read_text()
        except FileNotFoundError:
            raise SandboxError(
                f"snapshot {snapshot.id}: the machine that {snapshot.template.name!r} is cloned from is not here; "
                "keep machines in a folder (MachinePool(templates=...)), and bring it from where the snapshot was made"
            ) from None
        if identity != snapshot.layer_digest:
            raise SandboxError(
                f"snapshot {snapshot.id}: the machine that {snapshot.template.name!r} is cloned from is another here; "
                f"bring {snapshot.layer[:12]} from where it was made"
            )
        return folder

    async def _restore(self, snapshot: Snapshot) -> ProcessSandbox:
        base = await asyncio.to_thread(self._base, snapshot)
        folder = await asyncio.to_thread(self._snapshots.check_out, snapshot)
        try:
            sandbox_id = await self._enter(snapshot.template)
            try:
                place = await self._made(sandbox_id, snapshot.template, folder, base)
                await place.machine.go_on()
                sandbox = self._begin(sandbox_id, snapshot.template, place, snapshot.ranges * RANGE)
                sandbox.wake(is_new=True)
                await sandbox.open({})
            except BaseException:
                await self._abandon(sandbox_id)
                raise
            return sandbox
        finally:
            await asyncio.to_thread(self._snapshots.discard, folder)

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
        found = {}
        for name, place in self._machines.items():
            if self._alive.get(name) is not None and place.machine is not None:
                found[name] = Usage(place.machine.private_bytes(), 0, 0)
                self._remember(name, found[name].private)
        return found

    async def end(self, sandbox_id: str, reason: str) -> None:
        """See Places.end."""
        place = self._machines.get(sandbox_id)
        if place is not None:
            place.reason = place.reason or reason
            await self._finish(sandbox_id)
        moving = self._moving.get(sandbox_id)
        if moving is not None:
            await asyncio.wait({moving})

    async def _finish(self, sandbox_id: str) -> None:
        place = self._machines.get(sandbox_id)
        if place is not None:
            place.reason = place.reason or MOVED
            await self._clear(sandbox_id)
            self._leave(sandbox_id, place.reason)

    async def _watch(self, sandbox_id: str, place: _Place) -> None:
        await place.machine.ended()
        if not place.reason:
            place.reason = "oom" if place.group.oom_kills() else "killed"
        await self._finish(sandbox_id)

    async def _abandon(self, sandbox_id: str) -> None:
        """After a failed or cancelled create."""
        await self._clear(sandbox_id)
        self._leave(sandbox_id, "killed")

    async def _share(self) -> None:
        """Keeps a processor free, as for process sandboxes."""
        sharing = Sharing()
        while not self._closed and sharing.due is not None:
            rows = [(name, 0, place.group) for name, place in self._machines.items() if place.group.exists]
            await asyncio.to_thread(sharing.look, rows)
            await asyncio.sleep(LOOK_S)

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
        for kept in self._kept.values():
            kept.cancel()
        await asyncio.gather(*self._kept.values(), return_exceptions=True)
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

    def __init__(self, folder: Path, group: limits.Group):
        self.folder = folder
        self.group = group
        self.machine: Machine | None = None  # while it is being made
        self.reason = ""  # why it is being ended
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


def _pack(lowers: tuple[str, ...]) -> bytes:
    """The directories, later ones over earlier, as one archive."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for lower in lowers:
            if not os.path.isdir(lower):
                raise SandboxError(f"Template.lowers: {lower!r} is no directory; fix the path")
            tar.add(lower, arcname=".")
    return archive.getvalue()

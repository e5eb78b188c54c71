"""SandboxPool: the process sandboxes of one owner on this host, made, saved, and moved to other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from venusrl.core.errors import SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.layers import Layer
from venusrl.sandbox.making import Making, Restored
from venusrl.sandbox.places import PoolStats
from venusrl.sandbox.programs import agent_key, find_criu
from venusrl.sandbox.saving import Saving, Standstill
from venusrl.sandbox.snapshots import Snapshot, machine, new_id

__all__ = ["PoolStats", "SandboxPool"]

_LENT_BYTES = 64 << 20  # for a moment, to one that stands still for want of memory


class SandboxPool(Saving, Making):
    """Makes process sandboxes, at most `max_sandboxes` at once. Belongs to one event loop; use `async with`.

    Args: see Making, Saving and Places.
    """

    def saver(self) -> str:
        """The path of CRIU; SandboxUnsupported where this host cannot save sandboxes."""
        criu, why = find_criu()
        if self.host.get("mode") != "range":
            why = "it needs root"
        elif self.host.get("agent") != "native":
            why = "it needs the agent's program, which needs a C compiler"
        elif self.host["cgroups"]["freezer"] is None:
            why = "it needs a freezer cgroup, of version 1 or 2, in which this process can make groups"
        if why:
            raise SandboxUnsupported(f"sandboxes cannot be saved and restored here: {why}")
        return criu

    def _standstill(self, sandbox: ProcessSandbox, folder: Path) -> Standstill:
        return _Standstill(self, sandbox, folder)

    async def _finish(self, sandbox_id: str, reason: str) -> None:
        await Making.end(self, sandbox_id, reason)

    # Restoring

    async def _restore(self, snapshot: Snapshot) -> ProcessSandbox:
        criu, layer = await self._what_it_takes(snapshot)
        async with self._snapshots.folder_of(lambda: self._snapshots.check_out(snapshot)) as folder:
            restored = Restored(snapshot, str(folder), criu)
            sandbox = await self._create(snapshot.template, layer, restored=restored)
            try:
                await sandbox.resume()
            except BaseException:
                await sandbox.kill()
                raise
            return sandbox

    async def _what_it_takes(self, snapshot: Snapshot) -> tuple[str, Layer | None]:
        criu = await asyncio.to_thread(self.saver)
        snapshot.check("process", agent_key())
        layer = None
        if snapshot.layer:
            layer = await self._shelf.known(snapshot.layer) or await self._shelf.layer(snapshot.template)
            if layer.manifest.digest != snapshot.layer_digest:
                raise SandboxError(
                    f"snapshot {snapshot.id}: template {snapshot.template.name!r} has other files here than it had "
                    f"then; bring {snapshot.layer[:12]} from where it was made"
                )
        return criu, layer

    # Moving

    def _template_of(self, sandbox: ProcessSandbox) -> tuple[str, str] | None:
        layer = self._layers.get(sandbox.id)
        return None if layer is None else (layer.manifest.key, layer.manifest.digest)

    def _pack_template(self, key: str, folder: Path) -> None:
        self._shelf.store.pack(key, folder)

    def template_digest(self, key: str) -> str | None:
        """See Saving.template_digest."""
        layer = self._shelf.store.open(key)
        if layer is None:
            return None
        layer.close()
        return layer.manifest.digest

    def take_template(self, key: str, digest: str, folder: Path) -> None:
        """See Saving.take_template."""
        self._shelf.store.adopt(key, digest, folder)

    async def arrive(self, sandbox_id: str, snapshot: Snapshot, folder: Path, ttl_s: float) -> None:
        """See Saving.arrive."""
        if sandbox_id in self._alive:
            raise SandboxError(f"sandbox {sandbox_id} is here already")
        if snapshot.layer and await self._shelf.known(snapshot.layer) is None:
            raise SandboxError(
                f"template {snapshot.template.name!r} ({snapshot.layer[:12]}) is not on this node: build it here first"
            )
        criu, layer = await self._what_it_takes(snapshot)
        await self._enter(snapshot.template, sandbox_id, wait_s=0.0)
        self._use(sandbox_id, layer)
        try:
            restored = Restored(snapshot, str(folder), criu, parked=True, ttl_s=ttl_s)
            await self._ask(sandbox_id, snapshot.template, layer, False, restored)
        except BaseException:
            await self._abandon(sandbox_id, None)
            raise

    async def activate(
        self, sandbox_id: str, snapshot: Snapshot, begin: Callable[[ProcessSandbox], None]
    ) -> ProcessSandbox:
        """See Saving.activate."""
        agent = await self._link.meet(sandbox_id, snapshot.berth)
        sandbox = await self._begin(sandbox_id, snapshot.template, agent, Restored(snapshot, "", ""))
        begin(sandbox)
        await sandbox.open({})
        return sandbox


class _Standstill(Standstill):
    """Of a process sandbox, whose agent lets go of everything outside of it."""

    def __init__(self, pool: SandboxPool, sandbox: ProcessSandbox, folder: Path):
        super().__init__(sandbox)
        self._pool, self._folder = pool, folder
        self._berth: str | None = None
        self._has_lent = False

    async def stop(self) -> Snapshot:
        sandbox, link = self.sandbox, self._pool._link
        if sandbox.id in self._pool.short_of_memory:  # else its agent could not even say that it parks
            self._has_lent = True
            await self._pool.lend(sandbox, _LENT_BYTES)
        try:
            self._berth = await sandbox.park()
        except OSError as error:
            raise SandboxError(f"sandbox {sandbox.id} cannot be saved: {error.strerror}; try again") from error
        await link.save(sandbox.id, str(self._folder), self._pool.saver(), sandbox.template.disk_bytes)
        return await asyncio.to_thread(self._describe)

    async def unpark(self) -> None:
        berth, self._berth = self._berth, None
        if berth is not None:
            try:
                agent = await self._pool._link.meet(self.sandbox.id, berth)
            except SandboxError as error:
                await self.sandbox.mourn()
                # Not the pool's `end`: that waits for the move.
                await Making.end(self._pool, self.sandbox.id, "node-lost")
                raise SandboxLost(self.sandbox.id, self.sandbox.lost or "node-lost") from error
            self.sandbox.unpark(await asyncio.open_connection(sock=agent))
        if self._has_lent:
            with suppress(SandboxError):
                await self._pool.lend(self.sandbox, 0)

    async def go_on(self) -> None:
        """See Standstill.go_on."""
        if self._has_lent:
            self.sandbox.resume_soon()
        else:
            await self.sandbox.resume()

    def _describe(self) -> Snapshot:
        sandbox = self.sandbox
        pid = self._pool._link.agent_pids.get(sandbox.id)
        try:
            base = int(Path(f"/proc/{pid}/uid_map").read_text().split()[1])
        except FileNotFoundError:
            raise SandboxLost(sandbox.id, sandbox.lost or "killed") from None
        of_layer = self._pool._template_of(sandbox) or ("", "")
        names = (new_id(), sandbox.template, agent_key(), machine())
        memory_bytes = self._pool.memory_limit(sandbox)
        if sandbox.id in self._pool.short_of_memory:  # so that it goes on with all that its template grants
            memory_bytes = max(memory_bytes, sandbox.template.memory_bytes)
        return Snapshot(*names, base, self._berth, sandbox.ranges, memory_bytes, *of_layer)

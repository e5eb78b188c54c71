"""SandboxPool: the sandboxes of one owner on this host, made, saved, and moved to other nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path

from venusrl.core.errors import SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.layers import Layer
from venusrl.sandbox.making import Making, PoolStats, Restored
from venusrl.sandbox.programs import agent_key, find_criu
from venusrl.sandbox.snapshots import Snapshot, SnapshotStore, default_folder, machine, new_id

__all__ = ["PoolStats", "SandboxPool"]

MOVED = "moved"
_LEAST_TTL_S = 0.1
_LENT_BYTES = 64 << 20  # for a moment, to one that stands still for want of memory


class SandboxPool(Making):
    """Makes process sandboxes, at most `max_sandboxes` at once. Belongs to one event loop; use `async with`.

    Args:
      snapshots: folder of saved sandboxes, which pools may share; by default one of this user's.
      key: what nodes show each other before one takes a sandbox of the other's.
      options: see Making.
    """

    def __init__(self, *, snapshots: str | os.PathLike | None = None, key: str = "", **options):
        super().__init__(**options)
        self._key = key
        self._snapshots = SnapshotStore(default_folder() if snapshots is None else snapshots)
        self._moving: dict[str, asyncio.Task] = {}
        self._locks: dict[str, asyncio.Lock] = {}  # of those that are saved or moved, or have been

    # Saving

    async def snapshot(self, sandbox: ProcessSandbox) -> str:
        """See Sandbox.snapshot."""
        return (await self._save(sandbox)).id

    async def fork(self, sandbox: ProcessSandbox) -> ProcessSandbox:
        """See Sandbox.fork."""
        snapshot = await self._save(sandbox)
        try:
            return await self._restore(snapshot)
        finally:
            await asyncio.to_thread(self._snapshots.delete, snapshot.id)

    async def snapshots(self) -> list[Snapshot]:
        """Those that there are, the oldest first."""
        return await asyncio.to_thread(self._snapshots.list)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """SandboxError where there is none."""
        await asyncio.to_thread(self._snapshots.delete, snapshot_id)

    async def _save(self, sandbox: ProcessSandbox) -> Snapshot:
        async def work() -> Snapshot:
            staged = await asyncio.to_thread(self._snapshots.stage)
            try:
                async with _Standstill(self, sandbox, staged) as still:
                    await still.unpark()
                return await asyncio.to_thread(self._snapshots.finish, staged, still.snapshot)
            except BaseException:
                await asyncio.to_thread(self._snapshots.discard, staged)
                raise

        return await self._to_the_end(sandbox, work)

    async def _to_the_end(self, sandbox: ProcessSandbox, work: Callable[[], Coroutine]):
        """One at a time; a caller who gives up must not leave it parked."""
        await asyncio.to_thread(self.saver)

        async def locked():
            async with self._locks.setdefault(sandbox.id, asyncio.Lock()):
                if self._alive.get(sandbox.id) is not sandbox:
                    raise SandboxLost(sandbox.id, sandbox.lost or MOVED)
                return await work()

        task = asyncio.create_task(locked())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # seen
            raise

    def saver(self) -> str:
        """The path of CRIU; SandboxUnsupported where this host cannot save sandboxes."""
        criu, why = find_criu()
        if self.host.get("mode") != "range":
            why = "it needs root"
        elif self.host.get("agent") != "native":
            why = "it needs the agent's program, which needs a C compiler"
        if why:
            raise SandboxUnsupported(f"sandboxes cannot be saved and restored here: {why}")
        return criu

    # Restoring

    async def restore(self, snapshot_id: str) -> ProcessSandbox:
        """A sandbox that is as the saved one was, and goes on from there; again and again, if wanted.

        Raises:
          SandboxError: there is no such snapshot, it is damaged, or was made with other programs than this host has.
          SandboxUnsupported: this host cannot restore any.
          SandboxCapacity: as for `create`.
        """
        return await self._restore(await asyncio.to_thread(self._snapshots.open, snapshot_id))

    async def _restore(self, snapshot: Snapshot) -> ProcessSandbox:
        criu, layer = await self._what_it_takes(snapshot)
        folder = await asyncio.to_thread(self._snapshots.check_out, snapshot)
        try:
            restored = Restored(snapshot, str(folder), criu)
            sandbox = await self._create(snapshot.template, layer, restored=restored)
            try:
                await sandbox.resume()
            except BaseException:
                await sandbox.kill()
                raise
            return sandbox
        finally:
            await asyncio.to_thread(self._snapshots.discard, folder)

    async def _what_it_takes(self, snapshot: Snapshot) -> tuple[str, Layer | None]:
        criu = await asyncio.to_thread(self.saver)
        for what, theirs, ours in (("agent", snapshot.agent, agent_key()), ("machine", snapshot.machine, machine())):
            if theirs != ours:
                raise SandboxError(f"snapshot {snapshot.id} was made with {what} {theirs}, and this host has {ours}")
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

    async def migrate(
        self, sandbox: ProcessSandbox, node: str, clients: dict | None = None, lease_s: float = 60.0
    ) -> None:
        """See Sandbox.migrate.

        It stands still, is saved, and restored there, where it does not run yet. From then on the node decides: told to
        commit, it lets it run. This pool ends its own only when it knows that the other runs, and has its own go on
        only when it knows that the other does not and will not; as long as it knows neither, it stands still.

        Args:
          node: address of its daemon.
          clients: of the sandbox, other than this pool (Hub.state).
          lease_s: seconds that it is to outlive its clients there.
        """
        from venusrl.sandbox.daemon.client import Node

        async def work() -> None:
            target = Node(node, key=self._key)
            staged = await asyncio.to_thread(self._snapshots.stage)
            try:
                await target.health()
                async with _Standstill(self, sandbox, staged) as still:
                    snapshot = await asyncio.to_thread(self._snapshots.describe, staged, still.snapshot)
                    left_s = max(_LEAST_TTL_S, self._ends[sandbox.id] - asyncio.get_running_loop().time())
                    told = sandbox.interests(clients or {})
                    told |= {"paused": still.was_paused, "lease_s": lease_s, "ttl_s": left_s}
                    await target.arrive(sandbox.id, snapshot, staged, told)
                    runs_there = await target.commit(sandbox.id, lambda: sandbox.lost is not None)
                    if sandbox.lost is not None:  # it was killed meanwhile
                        await target.drop(sandbox.id)
                        raise SandboxLost(sandbox.id, sandbox.lost)
                    if not runs_there:
                        raise SandboxError(f"node {node} ended before {sandbox.id} ran there; it goes on here")
                    still.is_gone = True
                    if sandbox.id in self._alive:
                        self._alive[sandbox.id] = None
                    try:
                        await target.take(sandbox)
                    except SandboxError:  # it runs there, and cannot be reached
                        sandbox.mark_lost("node-lost")
                    finally:
                        await Making.end(self, sandbox.id, MOVED)
            except BaseException:
                await target.close()
                raise
            finally:
                await asyncio.to_thread(self._snapshots.discard, staged)

        moving = self._moving[sandbox.id] = asyncio.create_task(self._to_the_end(sandbox, work))
        try:
            await asyncio.shield(moving)
        finally:
            if moving.done():
                self._moving.pop(sandbox.id, None)
            else:
                moving.add_done_callback(lambda task: self._moving.pop(sandbox.id, None))

    async def end(self, sandbox_id: str, reason: str) -> None:
        """Kills one for a reason; when it returns, its processes are gone, also where it was just moving to."""
        await super().end(sandbox_id, reason)
        moving = self._moving.get(sandbox_id)
        if moving is not None:
            await asyncio.wait({moving})

    async def arrive(self, sandbox_id: str, snapshot: Snapshot, folder: Path, ttl_s: float) -> None:
        """Restores one of another node's, which does not run until `activate`, and ends after `ttl_s` seconds.

        Raises:
          SandboxError: it is here already, or cannot be restored.
        """
        if sandbox_id in self._alive:
            raise SandboxError(f"sandbox {sandbox_id} is here already")
        if snapshot.layer and await self._shelf.known(snapshot.layer) is None:
            raise SandboxError(
                f"template {snapshot.template.name!r} ({snapshot.layer[:12]}) is not on this node: build it here first"
            )
        criu, layer = await self._what_it_takes(snapshot)
        await self._enter(snapshot.template, layer, sandbox_id, wait_s=0.0)
        try:
            restored = Restored(snapshot, str(folder), criu, parked=True, ttl_s=ttl_s)
            await self._ask(sandbox_id, snapshot.template, layer, False, restored)
        except BaseException:
            await self._abandon(sandbox_id, None)
            raise

    async def activate(
        self, sandbox_id: str, snapshot: Snapshot, begin: Callable[[ProcessSandbox], None]
    ) -> ProcessSandbox:
        """One that has arrived; it is paused. `begin` is called with it before anything is heard of it."""
        agent = await self._link.meet(sandbox_id, snapshot.berth)
        sandbox = await self._begin(sandbox_id, snapshot.template, agent, Restored(snapshot, "", ""))
        begin(sandbox)
        await sandbox.open({})
        return sandbox

    def incoming(self) -> SnapshotStore:
        """Where what arrives is staged."""
        return self._snapshots

    def _on_gone(self, sandbox_id: str, reason: str) -> None:
        self._locks.pop(sandbox_id, None)
        super()._on_gone(sandbox_id, reason)


class _Standstill:
    """Within it a sandbox stands still and is saved in a folder; after it, it goes on, unless it `is_gone`.

    Attributes:
      snapshot: what was saved.
      was_paused: before.
    """

    snapshot: Snapshot

    def __init__(self, pool: SandboxPool, sandbox: ProcessSandbox, folder: Path):
        self._pool, self._sandbox, self._folder = pool, sandbox, folder
        self._berth: str | None = None
        self._has_lent = False
        self.was_paused = sandbox.paused
        self.is_gone = False

    async def __aenter__(self) -> _Standstill:
        sandbox, link = self._sandbox, self._pool._link
        try:
            parking = asyncio.create_task(sandbox.park())
            if sandbox.id in self._pool.short_of_memory:  # it stops once it has got what it waits for
                await asyncio.sleep(0)
                await self._pool.lend(sandbox, _LENT_BYTES)
                self._has_lent = True
            self._berth = await parking
            criu = self._pool.saver()
            await link.save(sandbox.id, str(self._folder), criu, sandbox.template.disk_bytes)
            self.snapshot = await asyncio.to_thread(self._describe)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info) -> None:
        if self.is_gone or self._sandbox.lost is not None:
            return
        await self.unpark()
        if self._has_lent:
            with suppress(SandboxError):
                await self._pool.lend(self._sandbox, 0)
        if not self.was_paused:
            await self._sandbox.resume()

    async def unpark(self) -> None:
        """The agent again, still paused. SandboxLost where it is gone."""
        berth, self._berth = self._berth, None
        if berth is None:
            return
        try:
            agent = await self._pool._link.meet(self._sandbox.id, berth)
        except SandboxError as error:
            self._sandbox.mark_lost("node-lost")
            await Making.end(self._pool, self._sandbox.id, "node-lost")  # not the pool's: that waits for the move
            raise SandboxLost(self._sandbox.id, self._sandbox.lost or "node-lost") from error
        self._sandbox.unpark(await asyncio.open_connection(sock=agent))

    def _describe(self) -> Snapshot:
        sandbox = self._sandbox
        pid = self._pool._link.agent_pids.get(sandbox.id)
        try:
            base = int(Path(f"/proc/{pid}/uid_map").read_text().split()[1])
        except FileNotFoundError:
            raise SandboxLost(sandbox.id, sandbox.lost or "killed") from None
        layer = self._pool._layers.get(sandbox.id)
        of_layer = ("", "") if layer is None else (layer.manifest.key, layer.manifest.digest)
        names = (new_id(), sandbox.template, agent_key(), machine())
        memory_bytes = self._pool.memory_limit(sandbox)
        if sandbox.id in self._pool.short_of_memory:  # so that it goes on with all that its template grants
            memory_bytes = max(memory_bytes, sandbox.template.memory_bytes)
        return Snapshot(*names, base, self._berth, sandbox.ranges, memory_bytes, *of_layer)

"""What pools have in common that can save their sandboxes: snapshots, forks, and moves to other nodes."""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Self

from venusrl.core.errors import SandboxError, SandboxLost
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.places import Places
from venusrl.sandbox.snapshots import Snapshot, SnapshotStore, default_folder

if TYPE_CHECKING:
    from venusrl.sandbox.daemon.client import Node

MOVED = "moved"
_LEAST_TTL_S = 0.1


class Standstill(ABC):
    """Within it a sandbox stands still and is saved in a folder; after it, it goes on, unless it `is_gone`.

    Attributes:
      snapshot: what was saved.
    """

    snapshot: Snapshot

    def __init__(self, sandbox: ProcessSandbox):
        self.sandbox = sandbox
        self.is_gone = False

    async def __aenter__(self) -> Self:
        try:
            self.snapshot = await self.stop()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info) -> None:
        if self.is_gone or self.sandbox.lost is not None:
            return
        await self.unpark()
        if not self.sandbox.pauses.asked:
            await self.go_on()

    async def go_on(self) -> None:
        """It runs again."""
        await self.sandbox.resume()

    @abstractmethod
    async def stop(self) -> Snapshot:
        """Stops and saves it."""

    @abstractmethod
    async def unpark(self) -> None:
        """The agent again, still paused. Idempotent. SandboxLost where it is gone."""


class Saving(Places):
    """Args:
    snapshots: folder of saved sandboxes, which pools may share; by default one of this user's.
    key: of nodes, which two of them prove to each other before one takes a sandbox of the other's (--peer_key_file).
    options: of the class beside this one.
    """

    def __init__(self, *, snapshots: str | os.PathLike | None = None, key: str = "", **options):
        super().__init__(**options)
        self._key = key
        self._snapshots = SnapshotStore(default_folder() if snapshots is None else snapshots)
        self._moving: dict[str, asyncio.Task] = {}
        self._locks: dict[str, asyncio.Lock] = {}  # of those that are saved or moved, or have been

    # What kinds of sandboxes differ in

    @abstractmethod
    def saver(self) -> str:
        """What saves them; SandboxUnsupported where this host cannot save sandboxes."""

    @abstractmethod
    def _standstill(self, sandbox: ProcessSandbox, folder: Path) -> Standstill:
        """Of a sandbox, to be saved in a folder."""

    @abstractmethod
    async def _restore(self, snapshot: Snapshot) -> ProcessSandbox: ...

    @abstractmethod
    async def _finish(self, sandbox_id: str, reason: str) -> None:
        """Ends one here; when this returns, nothing of it is left here."""

    @abstractmethod
    def _template_of(self, sandbox: ProcessSandbox) -> tuple[str, str] | None:
        """Key and digest of what it began with, where that is made once."""

    @abstractmethod
    def _pack_template(self, key: str, folder: Path) -> None:
        """Writes files of which another node's pool can make it."""

    @abstractmethod
    def template_digest(self, key: str) -> str | None:
        """Of what is here under the key of a template."""

    @abstractmethod
    def take_template(self, key: str, digest: str, folder: Path) -> None:
        """Makes it of what another pool has packed. SandboxError where that is not as it was sent."""

    @abstractmethod
    async def arrive(self, sandbox_id: str, snapshot: Snapshot, folder: Path, ttl_s: float) -> None:
        """Restores one of another node's, which does not run until `activate`, and ends after `ttl_s` seconds.

        Raises:
          SandboxError: it is here already, or cannot be restored.
        """

    @abstractmethod
    async def activate(
        self, sandbox_id: str, snapshot: Snapshot, begin: Callable[[ProcessSandbox], None]
    ) -> ProcessSandbox:
        """One that has arrived; it is paused. `begin` is called with it before anything is heard of it."""

    # Saved ones

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

    async def restore(self, snapshot_id: str) -> ProcessSandbox:
        """A sandbox that is as the saved one was, and goes on from there; again and again, if wanted.

        Raises:
          SandboxError: there is no such snapshot, it is damaged, or was made with other programs than this host has.
          SandboxUnsupported: this host cannot restore any.
          SandboxCapacity: as for `create`.
        """
        return await self._restore(await asyncio.to_thread(self._snapshots.open, snapshot_id))

    async def snapshots(self) -> list[Snapshot]:
        """Those that there are, the oldest first."""
        return await asyncio.to_thread(self._snapshots.list)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """SandboxError where there is none."""
        await asyncio.to_thread(self._snapshots.delete, snapshot_id)

    def incoming(self) -> SnapshotStore:
        """Where what arrives is staged."""
        return self._snapshots

    async def _save(self, sandbox: ProcessSandbox) -> Snapshot:
        async def work() -> Snapshot:
            async with self._snapshots.folder_of() as staged:
                async with self._standstill(sandbox, staged) as still:
                    if sandbox.lost is None:
                        await still.unpark()
                return await asyncio.to_thread(self._snapshots.finish, staged, still.snapshot)

        def undo(snapshot: Snapshot) -> None:  # nobody knows of it
            self._snapshots.delete(snapshot.id)

        return await self._to_the_end(sandbox, work, undo)

    async def _to_the_end(
        self, sandbox: ProcessSandbox, work: Callable[[], Coroutine], undo: Callable | None = None
    ) -> Snapshot | None:
        """One at a time; a caller who gives up must not leave it parked, and what came of it then is undone."""
        await asyncio.to_thread(self.saver)
        is_wanted = True

        async def locked():
            async with self._locks.setdefault(sandbox.id, asyncio.Lock()):
                if self._alive.get(sandbox.id) is not sandbox:
                    raise SandboxLost(sandbox.id, sandbox.lost or MOVED)
                done = await work()
            if undo is not None and not is_wanted:
                await asyncio.to_thread(undo, done)
            return done

        task = asyncio.create_task(locked())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            is_wanted = False
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
            await asyncio.wait({task})
            raise

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
            target = Node(node, peer_key=self._key)
            try:
                await target.health()
                await self._bring_template(sandbox, target)
                await move(target)
            except BaseException as error:
                await target.close()
                if isinstance(error, OSError):  # of a disk, here or there
                    raise SandboxError(f"sandbox {sandbox.id} cannot move to {node}: {error}") from error
                raise

        async def move(target: Node) -> None:
            async with self._snapshots.folder_of() as staged, self._standstill(sandbox, staged) as still:
                snapshot = await asyncio.to_thread(self._snapshots.describe, staged, still.snapshot)
                left_s = max(_LEAST_TTL_S, self._ends.get(sandbox.id, 0.0) - asyncio.get_running_loop().time())
                told = sandbox.interests(clients or {})
                told |= {"paused": sandbox.pauses.asked, "lease_s": lease_s, "ttl_s": left_s}
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
                    await self._let_go(sandbox)

        moving = self._moving[sandbox.id] = asyncio.create_task(self._to_the_end(sandbox, work))
        try:
            await asyncio.shield(moving)
        finally:
            if moving.done():
                self._moving.pop(sandbox.id, None)
            else:
                moving.add_done_callback(lambda task: self._moving.pop(sandbox.id, None))

    async def _let_go(self, sandbox: ProcessSandbox) -> None:
        """Of one that runs elsewhere, whatever becomes of what is left here."""
        try:
            await self._finish(sandbox.id, MOVED)
        except SandboxError as error:
            logging.warning("%s has moved, and what was here does not end: %s", sandbox.id, error)

    async def bring_template(self, sandbox: ProcessSandbox, node: str) -> None:
        """Has the node at an address know what a sandbox began with, before that moves there. See migrate."""
        from venusrl.sandbox.daemon.client import Node

        target = Node(node, peer_key=self._key)
        try:
            await self._bring_template(sandbox, target)
        finally:
            await target.close()

    async def _bring_template(self, sandbox: ProcessSandbox, target: Node) -> None:
        """What it began with goes first, while it still runs, where the node does not have it."""
        key, digest = self._template_of(sandbox) or ("", "")
        there = await target.template(key) if key else digest
        if there is not None and there != digest:
            raise SandboxError(
                f"template {sandbox.template.name!r} ({key[:12]}) has other files at {target.address}; delete it there"
            )
        if there is None:
            async with self._snapshots.folder_of() as staged:
                await asyncio.to_thread(self._pack_template, key, staged)
                await target.send_template(key, digest, staged)

    async def end(self, sandbox_id: str, reason: str) -> None:
        """Kills one for a reason; when it returns, its processes are gone, also where it was just moving to."""
        await self._finish(sandbox_id, reason)
        moving = self._moving.get(sandbox_id)
        if moving is not None:
            await asyncio.wait({moving})

    def _leave(self, sandbox_id: str, reason: str) -> bool:
        self._locks.pop(sandbox_id, None)
        return super()._leave(sandbox_id, reason)

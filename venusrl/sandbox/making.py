"""How the sandboxes of one owner on this host come to be, what they use, and how they end with their owner."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from venusrl.core.errors import ConfigError, SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox import bounds, quota
from venusrl.sandbox.accounting import Usage
from venusrl.sandbox.bounds import LONGEST_S
from venusrl.sandbox.client import RANGE, ProcessSandbox
from venusrl.sandbox.contract import MIB, Template
from venusrl.sandbox.layers import Layer, LayerStore, default_folder, disk_use
from venusrl.sandbox.link import SpawnerLink
from venusrl.sandbox.places import Places, set_up, variables
from venusrl.sandbox.programs import agent_program
from venusrl.sandbox.shelf import Shelf
from venusrl.sandbox.snapshots import Snapshot
from venusrl.sandbox.spawner.rootfs import PYTHON_HOME
from venusrl.sandbox.wire import read_frame

LINGER_S = 60.0  # that a layer without sandboxes stays in memory
HOLDER = "layer-"  # beginning of the id of a process that holds a layer
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _holder(layer: Layer) -> str:
    return f"{HOLDER}{layer.manifest.key[:12]}"


@dataclass(frozen=True)
class Restored:
    """What a sandbox is restored from: a snapshot, checked out in a folder, by the CRIU at a path.

    Attributes:
      parked: its agent is to wait, for an owner who is as before.
      ttl_s: seconds that it may live from now on; None: those of its template.
    """

    snapshot: Snapshot
    folder: str
    criu: str
    parked: bool = False
    ttl_s: float | None = None

    def request(self) -> dict:
        """What the spawner has to know of it."""
        fields = {"base": self.snapshot.base, "berth": self.snapshot.berth, "parked": self.parked}
        fields["memory_bytes"] = self.snapshot.memory_bytes
        if self.ttl_s is not None:
            fields["ttl_s"] = self.ttl_s
        return {"folder": self.folder, "criu": self.criu, **fields}


class Making(Places):
    """Makes process sandboxes: what SandboxPool is, but for saving them.

    Args:
      max_sandboxes, wait_s: see Places.
      python_prefix: directory of the interpreter that `python3` is inside; by default the owner's. One below /usr
        is there anyway and needs no bind.
      templates: folder of built templates, which pools may share; by default one of this user's.
      agent: "native", the program that is compiled from agent/native; "python"; or "auto", native where that works.
      on_pressure: called with a sandbox that stands still for want of memory (Template.oom="hold"); see resize.
    """

    def __init__(
        self,
        *,
        max_sandboxes: int,
        wait_s: float = 60.0,
        python_prefix: str = sys.base_prefix,
        templates: str | os.PathLike | None = None,
        agent: str = "auto",
        on_pressure: Callable[[ProcessSandbox], None] = lambda sandbox: None,
    ):
        super().__init__(max_sandboxes=max_sandboxes, wait_s=wait_s)
        if agent not in ("auto", "native", "python"):
            raise ConfigError(f"SandboxPool.agent={agent!r}: give 'auto', 'native' or 'python'")
        self._agent = agent
        prefix = str(Path(python_prefix).resolve())
        self._python_prefix = None if prefix == "/usr" or prefix.startswith("/usr/") else prefix
        self._python_bin = f"{prefix if self._python_prefix is None else PYTHON_HOME}/bin"
        self._shelf = Shelf(LayerStore(default_folder() if templates is None else templates), self._build)
        self._holders: dict[str, asyncio.StreamWriter] = {}
        self._hold_lock = asyncio.Lock()
        self._layers: dict[str, Layer] = {}
        self._uses: Counter[str] = Counter()  # sandboxes by the layer that they have
        self._link: SpawnerLink | None = None
        self._link_lock = asyncio.Lock()
        self._on_pressure = on_pressure
        self._limits: dict[str, int] = {}  # of memory, of those that have another than their template's
        self.short_of_memory: set[str] = set()  # those that have stood still for want of it, and got no more

    async def open(self) -> None:
        """Starts the spawner. SandboxUnsupported where the host cannot make sandboxes."""
        await self._spawner()

    @property
    def host(self) -> dict:
        """What the present spawner found: mode, cgroups, seccomp (see SpawnerLink.report)."""
        return {} if self._link is None else dict(self._link.report)

    @property
    def spawner_pid(self) -> int | None:
        """Process id of the present spawner."""
        return None if self._link is None else self._link.process_id

    async def create(self, template: Template) -> ProcessSandbox:
        """A new sandbox with the template's files in place, which are built first where they are not.

        Raises:
          SandboxCapacity: no place within wait_s.
          SandboxUnsupported: the host cannot make sandboxes; the message names the settings.
          SandboxError: a command of the set-up fails, what was built is damaged, or the pool is closed.
          SandboxLost: it ended before it was there: with reason "start" after Template.start_s seconds, "node-lost"
            where the spawner died (the next call starts another).
          OSError: a file of the template does not fit on its disk.
        """
        if self._closed:
            raise SandboxError("the pool is closed")
        if not template.is_built:
            return await self._create(template, None)
        return await self._create(template, await self._shelf.layer(template))

    def _part(self, layer: Layer) -> None:
        """One sandbox of the layer fewer; after a while without any, its pages and its files may go."""
        tree = str(layer.tree)
        self._uses[tree] -= 1
        if not self._uses[tree] and not self._closed:
            asyncio.get_running_loop().call_later(LINGER_S, self._release, layer)

    def _release(self, layer: Layer) -> None:
        tree = str(layer.tree)
        if not self._uses[tree] and not self._closed:
            del self._uses[tree]
            self._shelf.release(layer)
            holder = self._holders.pop(_holder(layer), None)
            if holder is not None:
                holder.close()

    async def usage(self) -> dict[str, Usage]:
        """Memory of every sandbox, by id; empty where no cgroup counts it. Cheap enough to be asked every second.

        Raises:
          SandboxError: the spawner died meanwhile.
        """
        if self._link is None or self._link.closed.is_set():
            return {}
        charged = await self._link.usage()
        found = {}
        for name, (private, kernel) in charged.items():
            if name in self._alive:
                layer = self._layers.get(name)
                found[name] = Usage(private, kernel, 0 if layer is None else layer.manifest.bytes)
                self._remember(name, private)
        return found

    async def resize(self, sandbox: ProcessSandbox, memory_bytes: int) -> None:
        """Another limit of a sandbox's memory; one that stood still goes on.

        Raises:
          SandboxError: the sandbox uses more than that, or is gone.
        """
        if self._link is None or self._link.closed.is_set():
            raise SandboxLost(sandbox.id, sandbox.lost or "node-lost")
        memory_bytes = bounds.whole("memory_bytes", "memory_bytes", memory_bytes)
        await self._link.resize(sandbox.id, memory_bytes)
        self._limits[sandbox.id] = memory_bytes
        self.short_of_memory.discard(sandbox.id)

    def memory_limit(self, sandbox: ProcessSandbox) -> int:
        """Bytes that it may use."""
        return self._limits.get(sandbox.id, sandbox.template.memory_bytes)

    async def lend(self, sandbox: ProcessSandbox, memory_bytes: int) -> None:
        """More memory than it has or may have, for its agent alone: its commands stop. 0: no more; they stay stopped.

        To `resize` its limit stays what it is.
        """
        await self._link.resize(sandbox.id, self.memory_limit(sandbox), memory_bytes)

    def _pressed(self, sandbox_id: str) -> None:
        self.short_of_memory.add(sandbox_id)
        sandbox = self._alive.get(sandbox_id)
        if sandbox is not None:
            self._on_pressure(sandbox)

    async def end(self, sandbox_id: str, reason: str) -> None:
        """Kills one for a reason; when it returns, its processes are gone."""
        if self._link is not None:
            await self._link.end(sandbox_id, reason)

    # New ones

    async def _create(
        self, template: Template, layer: Layer | Path | None, build: bool = False, restored: Restored | None = None
    ) -> ProcessSandbox:
        """One whose files begin with those of a layer, or, to be built, in a folder."""
        sandbox_id = await self._enter(template)
        self._use(sandbox_id, layer)
        sandbox, complete = None, False
        try:
            agent = await self._ask(sandbox_id, template, layer, build, restored)
            sandbox = await self._begin(sandbox_id, template, agent, restored)
            await sandbox.open({} if build or restored is not None else template.files)
            complete = True
            return sandbox
        finally:
            if not complete:
                await self._abandon(sandbox_id, sandbox)

    def _use(self, sandbox_id: str, layer: Layer | Path | None) -> None:
        if isinstance(layer, Layer):
            self._layers[sandbox_id] = layer
            self._uses[str(layer.tree)] += 1

    async def _ask(
        self,
        sandbox_id: str,
        template: Template,
        layer: Layer | Path | None,
        build: bool,
        restored: Restored | None,
    ) -> socket.socket | None:
        """Has the spawner make it; its agent's socket, unless the agent is to wait."""
        link = await self._spawner()
        if isinstance(layer, Layer):
            await self._hold(layer)
        tree = str(layer.tree) if isinstance(layer, Layer) else layer and str(layer)
        request = self._request(template) | {"layer": tree, "build": build}
        op, ttl_s = "create", template.ttl_s
        if restored is not None:
            self._limits[sandbox_id] = restored.snapshot.memory_bytes
            op, ttl_s, request = "restore", restored.ttl_s or ttl_s, request | restored.request()
        self._ends[sandbox_id] = asyncio.get_running_loop().time() + ttl_s
        try:
            async with asyncio.timeout(template.start_s):
                return await link.create(sandbox_id, request, op)
        except TimeoutError:
            raise SandboxLost(sandbox_id, "start") from None

    async def _begin(
        self, sandbox_id: str, template: Template, agent: socket.socket, restored: Restored | None
    ) -> ProcessSandbox:
        streams = await asyncio.open_connection(sock=agent)
        first_id = 0 if restored is None else restored.snapshot.ranges * RANGE
        sandbox = ProcessSandbox(sandbox_id, template, streams, self, first_id, restored is not None)
        if sandbox_id in self._alive:
            self._alive[sandbox_id] = sandbox
        else:
            sandbox.mark_lost("node-lost")
        return sandbox

    async def _build(self, template: Template, tree: Path) -> None:
        """Runs the template's set-up on its files."""
        sandbox = await self._create(template, tree, build=True)
        too_large = asyncio.Event()
        watch = asyncio.create_task(self._watch_size(sandbox, tree, template.layer_bytes, too_large))
        try:
            await set_up(sandbox, template, template.setup)
        except SandboxError as error:
            if not too_large.is_set():
                if isinstance(error, SandboxLost):
                    raise SandboxError(f"template {template.name!r}: its set-up failed: {error}") from error
                raise
        finally:
            watch.cancel()
            await sandbox.kill()
        if too_large.is_set() or await asyncio.to_thread(disk_use, tree) > template.layer_bytes:
            raise SandboxError(
                f"template {template.name!r}: its set-up failed: it made more than layer_bytes={template.layer_bytes}; "
                "raise that, or make less"
            )

    async def _watch_size(self, sandbox: ProcessSandbox, tree: Path, most: int, too_large: asyncio.Event) -> None:
        """Ends a set-up that fills the host's disk."""
        await quota.watch(sandbox, self._link.agent_pids.get(sandbox.id, 0), tree, most)
        too_large.set()
        await sandbox.kill()

    async def _hold(self, layer: Layer) -> None:
        """Has the layer's pages in memory, in an account of their own, before a sandbox touches them."""
        holder = _holder(layer)
        async with self._hold_lock:
            if holder in self._holders:
                return
            link = await self._spawner()
            # Whole pages, and what the kernel keeps of every file.
            room = layer.manifest.bytes + layer.manifest.files * 2 * resource.getpagesize() + 64 * MIB
            request = {"hold": str(layer.tree), "memory_bytes": room, "pids": 2, "ttl_s": LONGEST_S}
            reader, self._holders[holder] = await asyncio.open_connection(sock=await link.create(holder, request))
            try:
                await read_frame(reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                logging.warning("template %s: its pages are not held, and sandboxes pay for them", layer.manifest.name)

    async def close(self) -> None:
        """Kills every sandbox with reason "closed" and ends the spawner. Idempotent."""
        self._closed = True
        self._shelf.close()
        self._gate.refuse_all(SandboxError("the pool is closed"))
        for sandbox in list(self._alive.values()):
            if sandbox is not None:
                sandbox.mark_lost("closed")
        async with self._link_lock:
            if self._link is not None:
                await self._link.close()
                self._link = None

    def _request(self, template: Template) -> dict:
        env = variables(template, f"{self._python_bin}:{_PATH}")
        names = ("memory_bytes", "pids", "file_bytes", "disk_bytes", "output_bytes", "ttl_s", "oom", "oom_wait_s")
        return {"env": env, **{name: getattr(template, name) for name in names}}

    async def _spawner(self) -> SpawnerLink:
        """The present spawner, or a new one if it died."""
        async with self._link_lock:
            if self._closed:
                raise SandboxError("the pool is closed")
            if self._link is not None and self._link.closed.is_set():
                await self._link.close()  # collects the dead process
                self._link = None
            if self._link is None:
                agent = await asyncio.to_thread(self._agent_program)
                self._link = await SpawnerLink.open(self._on_gone, self._pressed, self._python_prefix, agent)
                self._link.report["agent"] = "python" if agent is None else "native"
                self._spawners += 1
            return self._link

    def _agent_program(self) -> str | None:
        if self._agent == "python":
            return None
        program, why = agent_program()
        if program is None and self._agent == "native":
            raise SandboxUnsupported(f"agent='native': {why}")
        if program is None:
            logging.warning("sandboxes have the Python agent, which takes more memory and cannot be saved: %s", why)
        return program

    def _on_gone(self, sandbox_id: str, reason: str) -> None:
        if sandbox_id in self._holders:
            self._holders.pop(sandbox_id).close()
        if not self._leave(sandbox_id, reason):
            return
        self._limits.pop(sandbox_id, None)
        self.short_of_memory.discard(sandbox_id)
        layer = self._layers.pop(sandbox_id, None)
        if layer is not None:
            self._part(layer)

    async def _abandon(self, sandbox_id: str, sandbox: ProcessSandbox | None) -> None:
        """After a failed or cancelled create: the sandbox, as far as it came to be, and its place."""
        if sandbox is not None:
            sandbox.mark_lost("killed")
        await self.end(sandbox_id, "killed")
        self._on_gone(sandbox_id, "killed")

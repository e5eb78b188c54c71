"""How the sandboxes of one owner on this host come to be, what they use, and how they end with their owner."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from venusrl.core.errors import ConfigError, SandboxCapacity, SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox.accounting import History, Usage
from venusrl.sandbox.client import RANGE, ProcessSandbox
from venusrl.sandbox.contract import MIB, WORKSPACE, Template
from venusrl.sandbox.gate import Gate
from venusrl.sandbox.layers import Layer, LayerStore, count, default_folder
from venusrl.sandbox.link import SpawnerLink
from venusrl.sandbox.programs import agent_program
from venusrl.sandbox.shelf import Shelf
from venusrl.sandbox.snapshots import Snapshot
from venusrl.sandbox.spawner.rootfs import PYTHON_HOME
from venusrl.sandbox.wire import read_frame

LINGER_S = 60.0  # that a layer without sandboxes stays in memory
_SIZE_S = 0.5  # between looks at the size of what is built
HISTORY_S = 60.0  # of memory that is remembered of a sandbox
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


@dataclass(frozen=True)
class PoolStats:
    """A pool's state: sandboxes alive, callers waiting, sandboxes created, ends by reason, spawners started."""

    alive: int
    waiting: int
    created: int
    ended: dict[str, int] = field(default_factory=dict)
    spawners: int = 0


def variables(template: Template, path: str) -> dict[str, str]:
    """What every command of the template's sandboxes sees; `path` is where its programs are."""
    return {
        "PATH": path,
        "HOME": WORKSPACE,
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        **template.env,
    }


class Making:
    """Makes sandboxes, at most `max_sandboxes` at once: what SandboxPool is, but for saving them.

    Args:
      max_sandboxes: sandboxes alive at once; further create calls wait in order of arrival.
      wait_s: seconds a create call waits for a place before SandboxCapacity.
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
        if max_sandboxes < 1:
            raise ConfigError(f"SandboxPool.max_sandboxes={max_sandboxes}: give at least 1")
        if not wait_s >= 0:
            raise ConfigError(f"SandboxPool.wait_s={wait_s}: give seconds, 0 or more")
        if agent not in ("auto", "native", "python"):
            raise ConfigError(f"SandboxPool.agent={agent!r}: give 'auto', 'native' or 'python'")
        self._wait_s = wait_s
        self._agent = agent
        self._gate = Gate(max_sandboxes)
        prefix = str(Path(python_prefix).resolve())
        self._python_prefix = None if prefix == "/usr" or prefix.startswith("/usr/") else prefix
        self._python_bin = f"{prefix if self._python_prefix is None else PYTHON_HOME}/bin"
        self._shelf = Shelf(LayerStore(default_folder() if templates is None else templates), self._build)
        self._holders: dict[str, asyncio.StreamWriter] = {}
        self._hold_lock = asyncio.Lock()
        self._layers: dict[str, Layer] = {}
        self._uses: Counter[str] = Counter()  # sandboxes by the layer that they have
        self._histories: dict[str, History] = {}
        self._link: SpawnerLink | None = None
        self._link_lock = asyncio.Lock()
        self._on_pressure = on_pressure
        self._ends: dict[str, float] = {}  # when they are to end, by the loop's time
        self._limits: dict[str, int] = {}  # of memory, of those that have another than their template's
        self.short_of_memory: set[str] = set()  # those that have stood still for want of it, and got no more
        self._alive: dict[str, ProcessSandbox | None] = {}
        self._created = 0
        self._spawners = 0
        self._ended: Counter[str] = Counter()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._spawner()
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    @property
    def alive(self) -> int:
        """Sandboxes that exist or are being made or ended."""
        return len(self._alive)

    @property
    def host(self) -> dict:
        """What the present spawner found: mode, cgroups, seccomp (see SpawnerLink.report)."""
        return {} if self._link is None else dict(self._link.report)

    @property
    def spawner_pid(self) -> int | None:
        """Process id of the present spawner."""
        return None if self._link is None else self._link.process_id

    def stats(self) -> PoolStats:
        """Counts since the pool was made."""
        return PoolStats(self.alive, self._gate.waiting, self._created, dict(self._ended), self._spawners)

    async def create(self, template: Template) -> ProcessSandbox:
        """A new sandbox with the template's files in place, which are built first where they are not.

        Raises:
          SandboxCapacity: no place within wait_s.
          SandboxUnsupported: the host cannot make sandboxes; the message names the settings.
          SandboxError: a command of the set-up fails, what was built is damaged, the pool is closed, or the spawner
            died during the call (the next call starts another).
          OSError: a file of the template does not fit on its disk.
        """
        if self._closed:
            raise SandboxError("the pool is closed")
        if not template.is_built:
            return await self._create(template, None)
        return await self._create(template, await self._shelf.layer(template))

    def _leave(self, layer: Layer) -> None:
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
        now = asyncio.get_running_loop().time()
        found = {}
        for name, (private, kernel) in charged.items():
            if name in self._alive:
                layer = self._layers.get(name)
                found[name] = Usage(private, kernel, 0 if layer is None else layer.manifest.bytes)
                self._histories.setdefault(name, History(HISTORY_S)).add(now, private)
        return found

    def growth(self, sandbox_id: str, window_s: float) -> int:
        """Bytes by which a sandbox's private memory grew in the last seconds, as far as `usage` was asked meanwhile."""
        history = self._histories.get(sandbox_id)
        return 0 if history is None else history.growth(window_s)

    async def resize(self, sandbox: ProcessSandbox, memory_bytes: int) -> None:
        """Another limit of a sandbox's memory; one that stood still goes on.

        Raises:
          SandboxError: the sandbox uses more than that, or is gone.
        """
        if self._link is None or self._link.closed.is_set():
            raise SandboxLost(sandbox.id, sandbox.lost or "node-lost")
        await self._link.resize(sandbox.id, memory_bytes)
        self._limits[sandbox.id] = memory_bytes
        self.short_of_memory.discard(sandbox.id)

    def memory_limit(self, sandbox: ProcessSandbox) -> int:
        """Bytes that it may use."""
        return self._limits.get(sandbox.id, sandbox.template.memory_bytes)

    async def lend(self, sandbox: ProcessSandbox, memory_bytes: int) -> None:
        """More memory than its limit is, which stays what it is to `resize`."""
        await self._link.resize(sandbox.id, self.memory_limit(sandbox) + memory_bytes)

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
        sandbox_id = await self._enter(template, layer)
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

    async def _enter(
        self, template: Template, layer: Layer | Path | None, sandbox_id: str | None = None, wait_s: float | None = None
    ) -> str:
        """Takes a place for one, and returns its id; what it takes is given back when it is gone."""
        wait_s = self._wait_s if wait_s is None else wait_s
        try:
            await self._gate.enter(wait_s)
        except TimeoutError:
            raise SandboxCapacity(
                f"no place for {template.name!r} within wait_s={wait_s}: {self.alive} sandboxes alive; "
                "kill some, wait, or raise max_sandboxes"
            ) from None
        self._created += 1
        sandbox_id = sandbox_id or f"sb-{secrets.token_hex(6)}"
        self._alive[sandbox_id] = None
        if isinstance(layer, Layer):
            self._layers[sandbox_id] = layer
            self._uses[str(layer.tree)] += 1
        return sandbox_id

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
        if restored is None:
            self._ends[sandbox_id] = asyncio.get_running_loop().time() + template.ttl_s
            return await link.create(sandbox_id, request)
        self._limits[sandbox_id] = restored.snapshot.memory_bytes
        self._ends[sandbox_id] = asyncio.get_running_loop().time() + (restored.ttl_s or template.ttl_s)
        return await link.create(sandbox_id, request | restored.request(), "restore")

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
            for command in template.setup:
                try:
                    result = await sandbox.exec(command, timeout_s=template.setup_s)
                except SandboxLost as error:
                    grown = f"it made more than layer_bytes={template.layer_bytes}; raise that, or make less"
                    why = grown if too_large.is_set() else str(error)
                    raise SandboxError(f"template {template.name!r}: {command!r}: {why}") from error
                if result.exit_code != 0:
                    why = "took too long" if result.timed_out else f"ended with {result.exit_code}"
                    raise SandboxError(f"template {template.name!r}: {command!r} {why}: {result.text[-2000:].strip()}")
        finally:
            watch.cancel()
            await sandbox.kill()

    async def _watch_size(self, sandbox: ProcessSandbox, tree: Path, most: int, too_large: asyncio.Event) -> None:
        """Ends a set-up that fills the host's disk."""
        while await asyncio.to_thread(lambda: count(tree)[1]) <= most:
            await asyncio.sleep(_SIZE_S)
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
            request = {"hold": str(layer.tree), "memory_bytes": room, "pids": 2, "ttl_s": 1e9}
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
        if sandbox_id not in self._alive:
            return
        sandbox = self._alive.pop(sandbox_id)
        self._histories.pop(sandbox_id, None)
        self._limits.pop(sandbox_id, None)
        self._ends.pop(sandbox_id, None)
        self.short_of_memory.discard(sandbox_id)
        layer = self._layers.pop(sandbox_id, None)
        if layer is not None:
            self._leave(layer)
        if sandbox is not None:
            sandbox.mark_lost(reason)
            reason = sandbox.lost or reason
        self._ended[reason] += 1
        self._gate.leave()

    async def _abandon(self, sandbox_id: str, sandbox: ProcessSandbox | None) -> None:
        """After a failed or cancelled create: the sandbox, as far as it came to be, and its place."""
        if sandbox is not None:
            sandbox.mark_lost("killed")
        await self.end(sandbox_id, "killed")
        self._on_gone(sandbox_id, "killed")

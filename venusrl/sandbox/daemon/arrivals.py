"""Sandboxes on their way from one node to another: how they are sent, and how they wait at where they go.

What is sent is a header, with what the snapshot is and who uses the sandbox, and then the snapshot's files, one after
the other. An arrived sandbox does not run. It runs once the node that it comes from says so (commit), or is forgotten:
when that node takes it back, or is not heard of for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from venusrl.core.errors import ConfigError, SandboxError
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.saving import Saving
from venusrl.sandbox.snapshots import Snapshot, digest_of, from_record, to_record

WAIT_S = 15.0  # that an arrived sandbox waits for its commit
_ID = re.compile(r"sb-[0-9a-z-]{1,64}")
_MOST_REMEMBERED = 10_000
_LENGTH = struct.Struct("!Q")
_MOST_HEADER = 64 << 20
_CHUNK = 1 << 20


async def outgoing(snapshot: Snapshot, folder: Path, about: dict) -> AsyncIterator[bytes]:
    """The bytes that are sent; `about` says who uses it."""
    async for part in parcel({"snapshot": to_record(snapshot), **about}, snapshot.files, folder):
        yield part


async def parcel(header: dict, files: Iterable[str], folder: Path) -> AsyncIterator[bytes]:
    """A header, and then the files that it tells of."""
    head = json.dumps(header).encode()
    yield _LENGTH.pack(len(head)) + head
    for name in files:
        with open(folder / name, "rb") as f:
            while data := f.read(_CHUNK):
                yield data


def describe(folder: Path) -> dict[str, tuple[int, str]]:
    """[bytes, sha256] of a folder's files, by name."""
    return {path.name: digest_of(path) for path in sorted(folder.iterdir())}


class _Reader:
    """Exact numbers of bytes of a stream that comes in parts."""

    def __init__(self, parts: AsyncIterator[bytes]):
        self._parts = parts
        self._rest = b""

    async def some(self, most: int) -> bytes:
        """1 to `most` bytes."""
        while not self._rest:
            try:
                self._rest = await anext(self._parts)
            except StopAsyncIteration:
                raise SandboxError("what came of the sandbox is not all of it") from None
        data, self._rest = self._rest[:most], self._rest[most:]
        return data

    async def header(self) -> dict:
        """ValueError where it is none."""
        (size,) = _LENGTH.unpack(await self.exactly(_LENGTH.size))
        if size > _MOST_HEADER:
            raise ConfigError(f"the header of what arrives has {size} bytes; at most {_MOST_HEADER}")
        return json.loads(await self.exactly(size))

    async def exactly(self, count: int) -> bytes:
        parts = []
        while count:
            parts.append(await self.some(count))
            count -= len(parts[-1])
        return b"".join(parts)


@dataclass
class Arrival:
    """One that is here, and does not run.

    Attributes:
      folder: of what came; it is closed when the sandbox runs, or is not to.
      about: who uses it, and how: {clients, jobs, watches, paused, lease_s, ttl_s}.
    """

    snapshot: Snapshot
    folder: contextlib.AsyncExitStack
    about: dict
    expiry: asyncio.TimerHandle | None = None
    begun: asyncio.Task | None = None  # the activation, once it is told to commit


class Arrivals:
    """Args:
    pool: of this node.
    begin: called with a sandbox that runs here from now on, and who uses it.
    """

    def __init__(self, pool: Saving, begin: Callable[[ProcessSandbox, dict], None]):
        self._pool = pool
        self._begin = begin
        self._waiting: dict[str, Arrival] = {}
        self._coming: set[str] = set()
        self._ran: dict[str, None] = {}  # those that were told to commit, and did
        self._tasks: set[asyncio.Task] = set()

    async def receive(self, sandbox_id: str, parts: AsyncIterator[bytes]) -> None:
        """Takes one; when this returns, it waits.

        Raises:
          SandboxError: something is wrong with it, or it cannot be here; nothing of it is left.
        """
        if not _ID.fullmatch(sandbox_id):
            raise ConfigError(f"id={sandbox_id!r}: no sandbox is called so")
        if sandbox_id in self._waiting or sandbox_id in self._coming:
            raise SandboxError(f"sandbox {sandbox_id} is arriving already")
        self._coming.add(sandbox_id)
        try:
            await self._receive(sandbox_id, parts)
        finally:
            self._coming.discard(sandbox_id)
        self._ran.pop(sandbox_id, None)  # it has been here before

    async def _receive(self, sandbox_id: str, parts: AsyncIterator[bytes]) -> None:
        async with contextlib.AsyncExitStack() as undoing:
            folder = await undoing.enter_async_context(self._pool.incoming().folder_of())
            reader = _Reader(parts)
            try:
                about = await reader.header()
                snapshot = from_record(about.pop("snapshot"))
                ttl_s = float(about.get("ttl_s", snapshot.template.ttl_s))
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(f"the header of an arriving sandbox: {error!r}") from None
            for name, (length, digest) in snapshot.files.items():
                await _write(reader, folder / name, length, digest)
            folder.chmod(0o711)  # as that of one that is checked out
            await self._pool.arrive(sandbox_id, snapshot, folder, ttl_s)
            arrival = self._waiting[sandbox_id] = Arrival(snapshot, undoing.pop_all(), about)
        arrival.expiry = asyncio.get_running_loop().call_later(WAIT_S, self._expire, sandbox_id)

    async def receive_template(self, key: str, parts: AsyncIterator[bytes]) -> None:
        """Takes what a template is made of.

        Raises:
          SandboxError: something is wrong with it; nothing of it is left.
        """
        async with self._pool.incoming().folder_of() as folder:
            reader = _Reader(parts)
            try:
                header = await reader.header()
                digest, files = str(header["digest"]), {str(name): tuple(of) for name, of in header["files"].items()}
                if any("/" in name or name.startswith(".") for name in files):
                    raise ValueError("a file of it is elsewhere")
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(f"the header of an arriving template: {error!r}") from None
            for name, (length, sha256) in files.items():
                await _write(reader, folder / name, length, sha256)
            await asyncio.to_thread(self._pool.take_template, key, digest, folder)

    async def commit(self, sandbox_id: str) -> bool:
        """It runs from now on; again is the same. False: it is not here, and will not be."""
        if sandbox_id in self._ran:
            return True
        arrival = self._waiting.get(sandbox_id)
        if arrival is None:
            return False
        if arrival.begun is None:
            arrival.expiry.cancel()
            arrival.begun = asyncio.create_task(self._activate(sandbox_id, arrival))
        await asyncio.shield(arrival.begun)
        return True

    async def _activate(self, sandbox_id: str, arrival: Arrival) -> None:
        def begin(sandbox: ProcessSandbox) -> None:
            sandbox.pauses.asked = bool(arrival.about.get("paused"))
            self._begin(sandbox, arrival.about)

        try:
            sandbox = await self._pool.activate(sandbox_id, arrival.snapshot, begin)
            self._ran[sandbox_id] = None  # also when it has ended: it must not be thought of as never begun
            if len(self._ran) > _MOST_REMEMBERED:
                del self._ran[next(iter(self._ran))]
            if not sandbox.pauses.asked:
                sandbox.resume_soon()
        except BaseException:
            await self._pool.end(sandbox_id, "killed")
            raise
        finally:
            del self._waiting[sandbox_id]
            await arrival.folder.aclose()

    async def refuse(self, sandbox_id: str) -> bool:
        """It is not to run here. False: it does already."""
        arrival = self._waiting.get(sandbox_id)
        if sandbox_id in self._ran or (arrival is not None and arrival.begun is not None):
            return False
        if arrival is not None:
            del self._waiting[sandbox_id]
            arrival.expiry.cancel()
            await self._pool.end(sandbox_id, "killed")
            await arrival.folder.aclose()
        return True

    def state(self, sandbox_id: str) -> str | None:
        """Whether it is "waiting" or "running"; None: it is not here."""
        if sandbox_id in self._ran:
            return "running"
        return "waiting" if sandbox_id in self._waiting else None

    def _expire(self, sandbox_id: str) -> None:
        task = asyncio.create_task(self.refuse(sandbox_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _write(reader: _Reader, path: Path, length: int, digest: str) -> None:
    found = hashlib.sha256()
    with open(path, "xb") as f:
        while length:
            data = await reader.some(min(length, _CHUNK))
            length -= len(data)
            found.update(data)
            f.write(data)
    if found.hexdigest() != digest:
        raise SandboxError(f"an arriving sandbox is damaged: {path.name} is not what was sent")

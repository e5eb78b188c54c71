"""Machines that others are cloned from: made once for a template, kept in a folder, never changed.

A kept machine is a folder under the key of what made it, with the files of Machine.keep, and an identity: two of the
same recipe differ, so what is saved of a clone goes with the one that it was cloned from.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import shutil
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from venusrl.core.errors import SandboxError
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.codec import to_json
from venusrl.sandbox.contract import Template
from venusrl.sandbox.layers import layer_key
from venusrl.sandbox.machines import pages
from venusrl.sandbox.machines.backend import MEMORY, PAGES, STATE, Backend
from venusrl.sandbox.places import set_up
from venusrl.sandbox.staging import Staging

_IDENTITY = "identity"
_NOT_OF_IT = ("name", "files", "ttl_s", "start_s")  # fields of a template that its machine does not depend on
_CHUNK = 1 << 20
_UNPACK_S = 600.0


@dataclass(frozen=True)
class Base:
    """A kept machine: its key, its identity, its folder."""

    key: str
    identity: str
    folder: Path


class Kept:
    """Args:
    backend: that makes them.
    folder: where they are, which pools may share.
    build: makes one of a template, set up, in a folder (Machine.keep).
    """

    def __init__(self, backend: Backend, folder: Path, build: Callable[[Template, Path], Awaitable[None]]):
        self._backend = backend
        self._staging = Staging(folder)
        self._build = build
        self._keys: dict[str, str] = {}  # by what is asked of a machine
        self._found: dict[str, asyncio.Task[Base]] = {}
        self._closed = False

    def _key(self, record: str, template: Template) -> str:
        """Names what the template's machine is made of: what is asked of it, and its lower directories as they are."""
        parts = json.dumps([self._backend.name, self._backend.key, record, layer_key(template)])
        return hashlib.sha256(parts.encode()).hexdigest()

    async def of(self, template: Template) -> Base:
        """The template's, which is made where there is none yet. Its lower directories are looked at until one is made.

        Raises:
          SandboxError: a command of the set-up fails, or the backend does.
        """
        fields = {name: value for name, value in to_json(template).items() if name not in _NOT_OF_IT}
        record = json.dumps(fields, sort_keys=True)
        key = self._keys.get(record) or await asyncio.to_thread(self._key, record, template)
        if key in self._found and self._found[key].done() and self._found[key].exception() is not None:
            del self._found[key]
        if key not in self._found:
            self._found[key] = asyncio.create_task(self._find(template, key))
        try:
            base = await asyncio.shield(self._found[key])
            self._keys[record] = key
            return base
        except asyncio.CancelledError:
            if self._closed:
                raise SandboxError("the pool is closed") from None
            raise

    async def _find(self, template: Template, key: str) -> Base:
        """What is kept is whole once it has its name."""
        folder = self._staging.folder / key
        if not folder.is_dir():
            async with self._staging.folder_of() as staged:
                await self._build(template, staged)
                (staged / _IDENTITY).write_text(secrets.token_hex(32))
                self._publish(staged, key)
        return Base(key, (folder / _IDENTITY).read_text(), folder)

    def _publish(self, staged: Path, key: str) -> None:
        try:
            self._staging.publish(staged, key)
        except OSError:
            if not (self._staging.folder / key).is_dir():  # else another pool was faster
                raise

    def known(self, key: str) -> Base | None:
        """The one under that key."""
        folder = self._staging.folder / key
        try:
            return Base(key, (folder / _IDENTITY).read_text(), folder)
        except FileNotFoundError:
            return None

    def pack(self, key: str, folder: Path) -> None:
        """Writes files of which another pool can `take` it."""
        kept = self._staging.folder / key
        for name in (STATE, _IDENTITY):
            shutil.copyfile(kept / name, folder / name)
        pages.pack(kept / MEMORY, folder / PAGES)

    def take(self, key: str, identity: str, folder: Path) -> None:
        """Keeps what another pool has packed. SandboxError where that is not what was said."""
        if (folder / _IDENTITY).read_text() != identity:
            raise SandboxError(f"template {key[:12]} has not come as it was sent; it is not kept")
        staged = self._staging.stage()
        try:
            for name in (STATE, _IDENTITY):
                shutil.copyfile(folder / name, staged / name)
            pages.unpack(folder / PAGES, staged / MEMORY)
            self._publish(staged, key)
        finally:
            self._staging.discard(staged)

    async def close(self) -> None:
        """What is being made is not finished."""
        self._closed = True
        for task in self._found.values():
            task.cancel()
        await asyncio.gather(*self._found.values(), return_exceptions=True)


async def prepare(sandbox: ProcessSandbox) -> None:
    """Runs a template's set-up in its first machine."""
    template = sandbox.template
    await sandbox.open({})
    if template.lowers:
        key = await asyncio.to_thread(layer_key, template)
        with tempfile.TemporaryFile() as archive:
            await asyncio.to_thread(_pack, template.lowers, archive)
            if await asyncio.to_thread(layer_key, template) != key:
                raise SandboxError(f"Template.lowers of {template.name!r} changed while they were copied; create again")
            await _unpack(sandbox, archive)
    await set_up(sandbox, template, template.setup)


def _pack(lowers: tuple[str, ...], archive: BinaryIO) -> None:
    """The directories, later ones over earlier, as one archive."""
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for lower in lowers:
            tar.add(lower, arcname=".")
    archive.seek(0)


async def _unpack(sandbox: ProcessSandbox, archive: BinaryIO) -> None:
    process = await sandbox.start("tar -x --no-same-owner", stdin=None, timeout_s=_UNPACK_S, follow=False)
    try:
        while data := await asyncio.to_thread(archive.read, _CHUNK):
            await process.send(data)
        await process.close_stdin()
    except OSError:
        pass  # it has ended, and says why
    result = await process.wait()
    if result.exit_code != 0:
        raise SandboxError(
            f"Template.lowers of {sandbox.template.name!r} do not fit (disk_bytes, file_bytes): {result.text[-1000:]}"
        )

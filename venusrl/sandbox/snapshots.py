"""Saved sandboxes on disk: images of processes, files, and a manifest that says what they are and that they are whole.

STORE/ID/manifest.json, beside the images. What is being written is called .ID until it is whole; a process that dies
meanwhile leaves a folder that the next one removes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from venusrl.core.errors import SandboxError, VenusError
from venusrl.sandbox.codec import from_json, to_json
from venusrl.sandbox.contract import Template
from venusrl.sandbox.staging import Staging

_FORMAT = 1
_ID = re.compile(r"[0-9a-f]{16}")
_BERTH = re.compile(r"(00[0-9a-f]{2,100})?")  # an abstract socket's name, never a path
_LAYER = re.compile(r"([0-9a-f]{64})?")
_LOGS = ("dump.log", "restore.log", "error", "stats-dump")


@dataclass(frozen=True)
class Snapshot:
    """Attributes:
    id: of the snapshot, the name of its folder.
    template: of the sandbox.
    agent: version of what it runs on: of the agent's program that it has mapped, or of its machine.
    machine: kind of processor.
    base: first user of the host that was the sandbox's; 0 where that does not matter.
    berth: where its agent waits; empty where it has stayed.
    ranges: of request ids that its owners have had; the next one's is another.
    memory_bytes: its limit, which may be another than the template's.
    layer, layer_digest: key of the template's layer, and what is in it; empty where it has none.
    files: [bytes, sha256] by name.
    created: seconds since 1970.
    kind: of sandbox: "process", "qemu", "firecracker" or "gvisor".
    """

    id: str
    template: Template
    agent: str
    machine: str
    base: int
    berth: str
    ranges: int
    memory_bytes: int
    layer: str = ""
    layer_digest: str = ""
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    created: float = 0.0
    kind: str = "process"

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(size for size, _ in self.files.values())

    def check(self, kind: str, agent: str) -> None:
        """Raises SandboxError unless it can be restored with what this host has."""
        if self.kind != kind:
            raise SandboxError(f"snapshot {self.id} is of a sandbox of the kind {self.kind!r}; this pool has {kind!r}")
        for what, theirs, ours in (("agent", self.agent, agent), ("machine", self.machine, machine())):
            if theirs != ours:
                raise SandboxError(f"snapshot {self.id} was made with {what} {theirs}, and this host has {ours}")


def default_folder() -> Path:
    """Where snapshots are kept: `$XDG_STATE_HOME/venusrl/snapshots`, below ~/.local/state else."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "venusrl/snapshots"


class SnapshotStore(Staging):
    """Snapshots in one folder, which processes may share."""

    def finish(self, staged: Path, snapshot: Snapshot) -> Snapshot:
        """What was staged becomes the snapshot, which is returned with its files."""
        snapshot = self.describe(staged, snapshot)
        record = to_record(snapshot)
        (staged / "manifest.json").write_text(json.dumps(record, indent=1))
        self.publish(staged, snapshot.id)
        return snapshot

    def describe(self, staged: Path, snapshot: Snapshot) -> Snapshot:
        """The snapshot, with the files that are staged."""
        for name in _LOGS:
            (staged / name).unlink(missing_ok=True)
        files = {path.name: digest_of(path) for path in sorted(staged.iterdir())}
        return Snapshot(**{**vars(snapshot), "files": files, "created": time.time()})

    def open(self, snapshot_id: str) -> Snapshot:
        """Raises SandboxError where there is none, or its manifest is damaged."""
        if not _ID.fullmatch(snapshot_id) or not (self.folder / snapshot_id).is_dir():
            raise SandboxError(f"no snapshot {snapshot_id!r} in {self.folder}; SandboxPool.snapshots lists them")
        return read_manifest(self.folder / snapshot_id)

    def check_out(self, snapshot: Snapshot) -> Path:
        """A folder with its files, to restore it from, and to be discarded.

        Raises:
          SandboxError: a file is not what was saved; nothing has started yet.
        """
        source = self.folder / snapshot.id
        verify(source, snapshot)
        folder = self.stage()
        try:
            folder.chmod(0o711)  # the sandbox's users open images in it; nobody else comes past the store's folder
            for name in snapshot.files:
                if name.startswith("userns-"):  # the restoring changes it
                    shutil.copyfile(source / name, folder / name)
                else:
                    os.link(source / name, folder / name)
        except BaseException:
            self.discard(folder)
            raise
        return folder

    def list(self) -> list[Snapshot]:
        """Those that are whole, the oldest first."""
        folders = self.folder.iterdir() if self.folder.is_dir() else ()
        found = []
        for folder in folders:
            if _ID.fullmatch(folder.name):
                with contextlib.suppress(SandboxError):  # damaged, or just being deleted: who restores it is told
                    found.append(read_manifest(folder))
        return sorted(found, key=lambda snapshot: snapshot.created)

    def delete(self, snapshot_id: str) -> None:
        """What is being restored from it goes on."""
        if not _ID.fullmatch(snapshot_id) or not (self.folder / snapshot_id).is_dir():
            raise SandboxError(f"no snapshot {snapshot_id!r} in {self.folder}; SandboxPool.snapshots lists them")
        gone = self.stage()
        os.rename(self.folder / snapshot_id, gone / snapshot_id)
        self.discard(gone)


def new_id() -> str:
    return secrets.token_hex(8)


def machine() -> str:
    return platform.machine()


def read_manifest(folder: Path) -> Snapshot:
    """Raises SandboxError where it is damaged."""
    try:
        return from_record(json.loads((folder / "manifest.json").read_text()))
    except (OSError, ValueError, SandboxError) as error:
        raise SandboxError(f"snapshot {folder.name} is damaged: manifest.json: {error}; delete it") from None


def to_record(snapshot: Snapshot) -> dict:
    """As JSON has it."""
    return vars(snapshot) | {"template": to_json(snapshot.template), "format": _FORMAT}


def from_record(record: dict) -> Snapshot:
    """Raises SandboxError for what is no snapshot."""
    try:
        if record.pop("format", None) != _FORMAT:
            raise ValueError(f"its format is not {_FORMAT}")
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in record["files"].items()}
        if any("/" in name or name.startswith(".") for name in files):
            raise ValueError("a file of it is elsewhere")
        for name, form in (("id", _ID), ("berth", _BERTH), ("layer", _LAYER)):
            if not form.fullmatch(record[name]):
                raise ValueError(f"{name}={record[name]!r}")
        for name, least in (("base", 0), ("ranges", 1), ("memory_bytes", 1)):
            if not isinstance(record[name], int) or not least <= record[name] < 1 << 50:
                raise ValueError(f"{name}={record[name]!r}")
        return Snapshot(**{**record, "files": files, "template": from_json(record["template"])})
    except (ValueError, KeyError, TypeError, AttributeError, VenusError) as error:
        raise SandboxError(f"it is no snapshot of format {_FORMAT}: {error!r}") from None


def verify(folder: Path, snapshot: Snapshot) -> None:
    """Raises SandboxError unless every file is as it was saved."""
    for name, (size, digest) in snapshot.files.items():
        try:
            if (folder / name).stat().st_size != size or digest_of(folder / name)[1] != digest:
                raise SandboxError(f"snapshot {snapshot.id} is damaged: {name} is not what was saved; delete it")
        except FileNotFoundError:
            raise SandboxError(f"snapshot {snapshot.id} is damaged: {name} is missing; delete it") from None


def digest_of(path: Path) -> tuple[int, str]:
    """(bytes, sha256) of a file."""
    with open(path, "rb") as f:
        return os.fstat(f.fileno()).st_size, hashlib.file_digest(f, "sha256").hexdigest()

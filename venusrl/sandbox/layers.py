"""Built templates: the files that sandboxes begin with, made once, kept under a key of what made them, never changed.

A layer is a folder `<key>` with `tree`, its files, and `manifest.json`. It is used under a shared lock of the kernel's,
which ends with the process that holds it, and deleted under an exclusive one.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from venusrl.core.errors import SandboxError
from venusrl.sandbox.contract import Template
from venusrl.sandbox.spawner.holder import walk
from venusrl.sandbox.spawner.namespaces import sync_all

USER_ID = 1000  # owner of a layer's files, as rootfs.USER_ID
_FORMAT = 1
_BLOCK = 512  # bytes of a block as stat(2) counts them
_INODE_BYTES = 256  # of what a file system keeps of a file besides, as ext4 has it
_SPECIAL = (
    (stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"),
)  # fmt: skip
_KEY = re.compile(r"[0-9a-f]{64}")
_STAGED = re.compile(r"\.[0-9a-f]{64}\.\w+")


@dataclass(frozen=True)
class Manifest:
    """What is written beside a layer's files.

    Attributes:
      key: sha256 of what the layer was made from.
      name: of the template that was built first.
      digest: sha256 over the files: paths, kinds, modes, contents.
      files, bytes: number of entries, and of bytes in regular files.
      setup, lowers, tenant: as in the template.
      format: of this record.
    """

    key: str
    name: str
    digest: str
    files: int
    bytes: int
    setup: tuple[str, ...]
    lowers: tuple[str, ...]
    tenant: str
    format: int = _FORMAT


def default_folder() -> Path:
    """Where layers are kept unless told otherwise: `$XDG_STATE_HOME/venusrl/templates`, below ~/.local/state else."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "venusrl/templates"


class Layer:
    """A layer in use. Close it, or end the process, to let it be deleted.

    Attributes:
      manifest: what it is.
      tree: folder of its files.
    """

    def __init__(self, manifest: Manifest, folder: Path, lock: int):
        self.manifest = manifest
        self.tree = folder / "tree"
        self._lock: int | None = lock

    def close(self) -> None:
        """Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class LayerStore:
    """Layers in one folder, which processes may share."""

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._building: dict[Path, int] = {}  # locks of what this process builds

    def open(self, key: str) -> Layer | None:
        """The layer, from now on in use; None where it is not built.

        Raises:
          SandboxError: it is damaged.
        """
        folder = self.folder / key
        try:
            lock = os.open(folder / "manifest.json", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink == 0:  # deleted while we waited
                os.close(lock)
                return None
            manifest = _manifest(folder)
            files, size = count(folder / "tree")
            if (files, size) != (manifest.files, manifest.bytes):
                raise SandboxError(
                    f"template {key[:12]} is damaged: {files} files of {size} bytes, where its manifest says "
                    f"{manifest.files} of {manifest.bytes}; delete {folder} and build it again"
                )
            return Layer(manifest, folder, lock)
        except BaseException:
            os.close(lock)
            raise

    def _stage(self, key: str) -> Path:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep()
        folder = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=self.folder))
        self._building[folder] = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._building[folder], fcntl.LOCK_EX)
        (folder / "tree").mkdir()
        return folder

    def stage(self, template: Template, key: str) -> Path:
        """A new folder with a copy of the template's lower directories, later ones over earlier, in its `tree`."""
        folder = self._stage(key)
        try:
            tree = folder / "tree"
            _check_places(template, self.folder)
            for lower in template.lowers:
                shutil.copytree(lower, tree, symlinks=True, dirs_exist_ok=True)
            if layer_key(template) != key:
                raise SandboxError(f"Template.lowers of {template.name!r} changed while they were copied; build again")
            _own(tree)
        except (OSError, shutil.Error) as error:
            self.discard(folder)
            raise SandboxError(f"Template.lowers of {template.name!r} cannot be copied: {str(error)[:500]}") from error
        except BaseException:
            self.discard(folder)
            raise
        return folder

    def finish(self, template: Template, key: str, staged: Path) -> None:
        """What was staged becomes the layer; where another process was faster, its layer stands."""
        tree = staged / "tree"
        _own(tree)
        digest, files, size = _digest(tree)
        manifest = Manifest(key, template.name, digest, files, size, template.setup, template.lowers, template.tenant)
        self._publish(manifest, staged)

    def pack(self, key: str, folder: Path) -> None:
        """A layer, which is in use, as files in a folder, for another store's `adopt`."""
        shutil.copyfile(self.folder / key / "manifest.json", folder / "manifest.json")
        _tar("-cf", folder / "tree.tar", "--sparse", "-C", self.folder / key / "tree", ".")

    def adopt(self, key: str, digest: str, folder: Path) -> None:
        """Makes the layer of what another store has packed. SandboxError where that is not what it was to be."""
        staged = self._stage(key)
        try:
            _tar("-xpf", folder / "tree.tar", "--no-same-owner", "-C", staged / "tree")
            manifest = _manifest(folder)
            _own(staged / "tree")
            found, _, _ = _digest(staged / "tree")
            if (manifest.key, manifest.digest, found) != (key, digest, digest):
                raise SandboxError(f"template {key[:12]} has not come as it was sent; it is not kept")
            self._publish(manifest, staged)
        except BaseException:
            self.discard(staged)
            raise

    def _publish(self, manifest: Manifest, staged: Path) -> None:
        key = manifest.key
        _forget_pages(staged / "tree")
        with open(staged / "manifest.json", "w") as f:
            json.dump(asdict(manifest), f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        try:
            os.rename(staged, self.folder / key)
        except OSError:
            if not (self.folder / key / "manifest.json").exists():
                raise
        self.discard(staged)

    def discard(self, staged: Path) -> None:
        """Forgets what was staged, where it has not become a layer. Idempotent."""
        shutil.rmtree(staged, ignore_errors=True)
        lock = self._building.pop(staged, None)
        if lock is not None:
            os.close(lock)

    def list(self) -> list[Manifest]:
        """Those that are built, by name."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            if _KEY.fullmatch(path.name) and (path / "manifest.json").exists():
                with contextlib.suppress(SandboxError):  # whoever needs it is told
                    found.append(_manifest(path))
        return sorted(found, key=lambda manifest: (manifest.name, manifest.key))

    def find(self, prefix: str) -> Manifest:
        """The one whose name, or the beginning of whose key, is `prefix`.

        Raises:
          SandboxError: there is none, or more than one.
        """
        found = [m for m in self.list() if m.name == prefix or (prefix and m.key.startswith(prefix))]
        if len(found) == 1:
            return found[0]
        names = ", ".join(f"{m.name} ({m.key[:12]})" for m in found or self.list()) or "none"
        what = "several templates are called" if found else "no template is called"
        raise SandboxError(f"{what} {prefix!r} in {self.folder}; there {'are' if found else 'is'}: {names}")

    def verify(self, key: str) -> None:
        """Raises SandboxError unless every file is as it was built."""
        manifest = _manifest(self.folder / key)
        digest, files, _ = _digest(self.folder / key / "tree")
        if digest != manifest.digest:
            raise SandboxError(
                f"template {key[:12]} is damaged: its {files} files are not those that were built; "
                f"delete {self.folder / key} and build it again"
            )

    def delete(self, key: str) -> None:
        """Raises SandboxError while a process uses it."""
        folder = self.folder / key
        lock = os.open(folder / "manifest.json", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SandboxError(f"template {key[:12]} is in use; end its sandboxes, then delete it") from None
        else:
            (folder / "manifest.json").unlink()
            shutil.rmtree(folder)
        finally:
            os.close(lock)

    def _sweep(self) -> None:
        """Removes what builders, and deleters, that are gone have left; nothing that is not named as ours is."""
        for folder in self.folder.iterdir():
            if _KEY.fullmatch(folder.name) and not (folder / "manifest.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
            elif _STAGED.fullmatch(folder.name):
                with contextlib.suppress(OSError):
                    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not while its builder lives
                        shutil.rmtree(folder, ignore_errors=True)
                    finally:
                        os.close(lock)


def layer_key(template: Template) -> str:
    """Names what the template's layer is made of: its lower directories as they are now, and its set-up.

    Raises:
      SandboxError: a lower directory is none, or holds what templates cannot, or more than layer_bytes.
    """
    check_sizes(template)
    parts = {
        "format": _FORMAT,
        "lowers": [_digest(Path(lower))[0] for lower in template.lowers],
        "setup": list(template.setup),
        "env": dict(sorted(template.env.items())) if template.setup else {},
        "tenant": template.tenant,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def check_sizes(template: Template) -> None:
    """Looks at the lower directories without opening a file.

    Raises:
      SandboxError: one is no directory, or they hold more than layer_bytes, holes as if they were written.
    """
    size = 0
    for lower in template.lowers:
        if not os.path.isdir(lower):
            raise SandboxError(f"Template.lowers: {lower!r} is no directory; fix the path")
        size += sum(max(info.st_size, info.st_blocks * _BLOCK) + _INODE_BYTES for _, info in walk(Path(lower)))
    if size > template.layer_bytes:
        raise SandboxError(
            f"Template.lowers of {template.name!r} are {size} bytes, more than layer_bytes={template.layer_bytes}; "
            "raise that, or give less"
        )


def _check_places(template: Template, store: Path) -> None:
    """Raises SandboxError where a lower directory holds the folder that it is copied to, or is in it."""
    store = store.resolve()
    for lower in template.lowers:
        top = Path(lower).resolve()
        if store.is_relative_to(top) or top.is_relative_to(store):
            raise SandboxError(
                f"Template.lowers: {lower!r} and the folder of templates, {store}, overlap; give another"
            )


def _tar(*arguments: str | Path) -> None:
    done = subprocess.run(["tar", "--numeric-owner", "--xattrs", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise SandboxError(f"the files of a template cannot be packed or unpacked: {done.stderr.strip()[-500:]}")


def _manifest(folder: Path) -> Manifest:
    try:
        record = json.loads((folder / "manifest.json").read_text())
        if record.get("format") != _FORMAT:
            raise ValueError(f"format {record.get('format')!r} is not {_FORMAT}")
        return Manifest(**{**record, "setup": tuple(record["setup"]), "lowers": tuple(record["lowers"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SandboxError(f"the manifest of {folder} is damaged ({error}); delete it and build again") from None


def count(tree: Path) -> tuple[int, int]:
    """(entries, bytes of regular files) of a folder, which may change meanwhile."""
    entries = [info for _, info in walk(tree)]
    return len(entries), sum(info.st_size for info in entries if stat.S_ISREG(info.st_mode))


def disk_use(tree: Path) -> int:
    """Bytes that a folder takes of its disk, which may change meanwhile: blocks, and an inode for everything; what has
    several names counts once."""
    found = {(info.st_dev, info.st_ino): info.st_blocks * _BLOCK + _INODE_BYTES for _, info in walk(tree)}
    return sum(found.values())


def _digest(tree: Path) -> tuple[str, int, int]:
    """(sha256 over paths, kinds, modes and contents; entries; bytes of regular files).

    Raises:
      SandboxError: there is something that templates cannot hold, or that cannot be read.
    """
    whole, files, size = hashlib.sha256(), 0, 0
    for path, info in walk(tree):
        content = ""
        try:
            if stat.S_ISREG(info.st_mode):
                content = _content(tree / path)
                size += info.st_size
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(tree / path)
        except OSError as error:
            raise SandboxError(
                f"{str(tree / path)!r} cannot be read: {error.strerror}; mend it, or leave it out"
            ) from error
        kind = next((name for test, name in _SPECIAL if test(info.st_mode)), None)
        if kind is not None:
            raise SandboxError(
                f"{str(tree / path)!r} is a {kind}: templates hold files, directories and links; leave it out"
            )
        mode = 0 if stat.S_ISLNK(info.st_mode) else info.st_mode
        whole.update(json.dumps([path, mode, content]).encode())
        files += 1
    return whole.hexdigest(), files, size


def _content(path: Path) -> str:
    """sha256 of a file; never waits for somebody who writes a pipe that has taken its place."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as f:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no file any more")
        return hashlib.file_digest(f, "sha256").hexdigest()


def _forget_pages(tree: Path) -> None:
    """All of it is on the disk, and nobody pays for the files' pages in memory any more; who touches one next does."""
    sync_all(tree)
    for path, info in walk(tree):
        if stat.S_ISREG(info.st_mode):
            with open(tree / path, "rb") as f:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _own(tree: Path) -> None:
    """Files belong to the sandbox's user, as far as this process may give them away; what is no file, directory or link
    goes, and so do set-user-id bits."""
    for path in [tree, *[tree / name for name, _ in walk(tree)]]:
        info = os.lstat(path)
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode)):
            os.unlink(path)
            continue
        if os.geteuid() == 0 and (info.st_uid, info.st_gid) != (USER_ID, USER_ID):
            os.chown(path, USER_ID, USER_ID, follow_symlinks=False)
        if stat.S_IMODE(info.st_mode) & (stat.S_ISUID | stat.S_ISGID) and not stat.S_ISLNK(info.st_mode):
            os.chmod(path, stat.S_IMODE(info.st_mode) & ~(stat.S_ISUID | stat.S_ISGID))

"""The file system of a sandbox: a read-only root with a view of the host's /usr, and a private, sized tmpfs in it.

The tmpfs holds the writable `workspace`, `tmp` and `shm`. The root is the same for all; a spawner that may do so makes
it once, in a mount namespace of its own (`prepare`). A new sandbox's first process puts both together within its
namespaces, before it drops its privileges (`enter`); for one that is restored that is done from outside, and CRIU puts
the parts in place (`assemble`).
"""

from __future__ import annotations

import os
import stat

from venusrl.sandbox.spawner.namespaces import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    attach,
    mount,
    pivot_to,
    set_mount_flags,
)

USER_ID = 1000
HOSTNAME = "sandbox"
PYTHON_HOME = "/opt/python"
AGENT = "/opt/agent"
# Covered by the tmpfs while the tree is built; any directories that always exist will do.
_STAGE = "/tmp"
PREPARED = "/run/venusrl"  # that others may pass, as the sandboxes' users must
_MAX_INODES = 100_000
_READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
# Not nodev, which would make it unusable. Read-only guards the node; the device itself can be written.
_DEVICE = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC
_DEVICES = ("null", "zero", "full", "random", "urandom")
_PROGRAMS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_CONFIGURATION = ("/etc/ld.so.cache", "/etc/alternatives")
# What the sandbox writes: where it has it, its directory in the tmpfs, and that one's mode.
OWN = (("/workspace", "workspace", 0o755), ("/tmp", "tmp", 0o1777), ("/dev/shm", "shm", 0o1777))
# The whole tmpfs, read-only, for who saves the sandbox from outside; its own user finds nothing new in it.
DISK = "/run/disk"
_LINKS = {
    "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0",
    "dev/stdout": "/proc/self/fd/1",
    "dev/stderr": "/proc/self/fd/2",
    "dev/ptmx": "pts/ptmx",
    "var/tmp": "/tmp",
    "etc/mtab": "/proc/mounts",
}
ETC = {
    "passwd": "root:x:0:0:root:/:/usr/sbin/nologin\nsandbox:x:1000:1000:sandbox:/workspace:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nsandbox:x:1000:\nnogroup:x:65534:\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
    "hostname": f"{HOSTNAME}\n",
    "hosts": f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n",
}


class Host:
    """What a sandbox sees of the host.

    Args:
      python: directory of the interpreter, shown at /opt/python; None: it has that of /usr.
      agent: path of the agent's program; None: there is none.
      known_as: path by which others know the interpreter's directory.
    """

    def __init__(self, python: str | None, agent: str | None, known_as: str | None = None):
        self.python = python
        self.agent = agent
        self.known_as = known_as or python

    def opened(self) -> Host:
        """The same by descriptors, of what may lie below a directory (`/root`, mode 700) that a sandbox's own user
        cannot enter; to be taken while this process still has the host user's rights."""
        paths = [path and f"/proc/self/fd/{os.open(path, os.O_PATH)}" for path in (self.python, self.agent)]
        return Host(*paths, self.known_as)

    def binds(self, stage: str) -> list[tuple[str, str, int]]:
        """(target, source, flags) of each mount, in an order in which they can be made.

        /opt/python comes without its site-packages: what happens to be installed there would differ from host to host,
        and start-up files in it can triple the time that every `python3` of a sandbox takes to start (42 ms against
        12 ms, measured).
        """
        found = [("/usr", "/usr", _READ_ONLY)]
        found += [(f"/{name}", f"/{name}", _READ_ONLY) for name in _PROGRAMS if _is_directory(f"/{name}")]
        found += [(path, path, _READ_ONLY | MOUNT_ATTR_NOEXEC) for path in _CONFIGURATION if os.path.exists(path)]
        found += [(f"/dev/{name}", f"/dev/{name}", _DEVICE) for name in _DEVICES]
        parts = ((PYTHON_HOME, self.python), (AGENT, self.agent))
        found += [(target, source, _READ_ONLY) for target, source in parts if source is not None]
        library = f"{self.python}/lib"
        for name in os.listdir(library) if os.path.isdir(library) else ():
            if name.startswith("python3") and os.path.isdir(f"{library}/{name}/site-packages"):
                found.append((f"{PYTHON_HOME}/lib/{name}/site-packages", f"{stage}/empty", _READ_ONLY))
        return found


def _is_directory(path: str) -> bool:
    """Most distributions keep the top-level names as links into /usr."""
    return os.path.isdir(path) and not os.path.islink(path)


class Layer:
    """Files that /workspace begins with.

    Args:
      fd: of their directory, or of a mount of it that is attached nowhere.
      is_mount: which of the two.
      writable: they are being made, and written themselves. Else their pages are shared with everything that has them,
        and what is written goes to the sandbox's own tmpfs.
    """

    def __init__(self, fd: int, is_mount: bool, writable: bool):
        self.fd = fd
        self.is_mount = is_mount
        self.writable = writable


def prepare(host: Host, stage: str = PREPARED) -> str:
    """Makes a root in this mount namespace; the returned directory is for `enter`."""
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    binds = host.binds(stage)
    root = _skeleton(stage, host, binds)
    for target, source, flags in binds:
        mount(source, root + target, None, MS_BIND | MS_REC)
        set_mount_flags(root + target, flags, recursive=True)
    set_mount_flags(root, _READ_ONLY, recursive=False)
    return root


def enter(disk_bytes: int, prepared: str | None, host: Host, layer: Layer | None = None) -> None:
    """Completes a copy of the prepared root, or of one made here, and makes it the root.

    Raises:
      OSError: the host refused a step; the error names it.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    stage = _STAGE
    if prepared is None:
        mount("tmpfs", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
        for name in ("prepared", "disk"):
            os.mkdir(f"{_STAGE}/{name}")
        prepared, stage = prepare(host, f"{_STAGE}/prepared"), f"{_STAGE}/disk"
    _make_disk(stage, disk_bytes, USER_ID)
    root = f"{stage}/root"
    mount(prepared, root, None, MS_BIND | MS_REC)
    options = "newinstance,ptmxmode=0666,mode=620,max=64"
    mount("devpts", f"{root}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if layer is not None:
        _mount_layer(stage, layer, USER_ID)
    for target, name, _ in OWN:
        mount(f"{stage}/{name}", root + target, None, MS_BIND)
    mount(stage, root + DISK, None, MS_BIND)
    set_mount_flags(root + DISK, _READ_ONLY | MOUNT_ATTR_NOEXEC, recursive=False)
    pivot_to(root)


def assemble(
    stage: str, disk_bytes: int, base: int, host: Host, layer: Layer | None, mounts: list[str]
) -> dict[str, str]:
    """Makes the same in the directory `stage`, as parts: a root that only has the places of the mounts, and by such a
    place what belongs there, each a mount of its own that nothing is mounted in.

    Args:
      base: first user of the host that is the sandbox's.
      mounts: the places that the sandbox had mounts at.

    Raises:
      OSError: ENOENT, this host lacks what the sandbox had.
    """
    binds = host.binds(stage)
    owner = base + USER_ID
    _make_disk(stage, disk_bytes, owner)
    root = _skeleton(stage, host, binds)
    set_mount_flags(root, _READ_ONLY, recursive=False)
    if layer is not None:
        _mount_layer(stage, layer, owner)
    own = {target: f"{stage}/{name}" for target, name, _ in OWN} | {DISK: stage}
    found = {}
    for number, place in enumerate(mounts):
        if os.path.normpath(place) != place:
            raise OSError(22, "no place that a sandbox has", place)
        source = own.get(place) or _source(place, binds)
        part = f"{stage}/part-{number}"
        if os.path.isdir(source):
            os.mkdir(part)
        else:
            _write(part, "")
        mount(source, part, None, MS_BIND)
        found[place] = part
    return found


def _source(place: str, binds: list[tuple[str, str, int]]) -> str:
    """Where the host has what the sandbox has at `place`, which may lie below one of the binds."""
    fits = [(target, source) for target, source, _ in binds if place == target or place.startswith(f"{target}/")]
    if not fits:
        raise FileNotFoundError(2, "this host shows no such place to sandboxes", place)
    target, source = max(fits)
    path = source + place[len(target) :]
    os.stat(path)
    return path


def _make_disk(stage: str, disk_bytes: int, owner: int) -> None:
    """The tmpfs of one sandbox, with the directories that are the user's."""
    options = f"size={disk_bytes},nr_inodes={_MAX_INODES},mode=755"
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.mkdir(f"{stage}/root", 0o755)
    for _, name, mode in OWN:
        os.mkdir(f"{stage}/{name}")
        os.chown(f"{stage}/{name}", owner, owner)
        os.chmod(f"{stage}/{name}", mode)


def _skeleton(stage: str, host: Host, binds: list[tuple[str, str, int]]) -> str:
    """The root, with all that is no mount, and the places of what is; returns its directory."""
    root = f"{stage}/root"
    for path in (root, f"{stage}/empty"):
        os.makedirs(path, 0o755, exist_ok=True)
    mount(root, root, None, MS_BIND)
    fill(root, host, binds)
    return root


def fill(root: str, host: Host, binds: list[tuple[str, str, int]]) -> None:
    """What a root has that is no mount, and the places of what is."""
    for name in ("etc", "var", "dev", "dev/shm", "dev/pts", "opt", "proc", "run", "run/disk", "workspace", "tmp"):
        os.mkdir(f"{root}/{name}", 0o755)
    for name in _PROGRAMS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
    for name, text in ETC.items():
        _write(f"{root}/etc/{name}", text)
    for path, target in _LINKS.items():
        os.symlink(target, f"{root}/{path}")
    for target, source, _ in binds:
        if target.startswith(f"{PYTHON_HOME}/"):
            continue  # a place in another bind
        if stat.S_ISDIR(os.stat(source).st_mode):
            os.mkdir(root + target, 0o755)
        else:
            _write(root + target, "")
    if host.known_as is not None:  # a link at the interpreter's own path, which its RPATH and scripts name
        os.makedirs(os.path.dirname(root + host.known_as), exist_ok=True)
        if not os.path.lexists(root + host.known_as):
            os.symlink(PYTHON_HOME, root + host.known_as)


def _mount_layer(stage: str, layer: Layer, owner: int) -> None:
    """Mounts the layer, and over it what is the sandbox's own, at the workspace; one to be written is there itself."""
    for name in ("layer", "upper", "work"):
        os.mkdir(f"{stage}/{name}", 0o755)
        os.chown(f"{stage}/{name}", owner, owner)
    target = f"{stage}/workspace" if layer.writable else f"{stage}/layer"
    if layer.is_mount:
        attach(layer.fd, target)
    else:
        mount(f"/proc/self/fd/{layer.fd}", target, None, MS_BIND)
        flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (0 if layer.writable else MOUNT_ATTR_RDONLY)
        set_mount_flags(target, flags, recursive=False)
    os.close(layer.fd)
    if layer.writable:
        return
    parts = f"lowerdir={stage}/layer,upperdir={stage}/upper,workdir={stage}/work,userxattr"
    mount("overlay", f"{stage}/workspace", "overlay", MS_NOSUID | MS_NODEV, parts)


def _write(path: str, text: str) -> None:
    with open(path, "w") as f:
        f.write(text)

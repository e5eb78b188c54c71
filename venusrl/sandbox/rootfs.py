"""The file system of a sandbox: a read-only view of the host's /usr and one private, sized tmpfs.

One tmpfs holds the directories `root` (what becomes /, read-only) and the writable `workspace`, `tmp` and `shm`. A new
sandbox's first process builds it within its namespaces, before it drops its privileges (`enter`); for one that is
restored it is built from outside, and CRIU puts its parts in place (`assemble`).
"""

import os
import stat

from venusrl.sandbox.namespaces import (
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
# Covered by the tmpfs while the tree is built; any directory that always exists will do.
_STAGE = "/tmp"
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
_ETC = {
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
    """

    def __init__(self, python: str | None, agent: str | None):
        self.python = python
        self.agent = agent

    def open(self) -> dict[str, int]:
        """Handles on what may lie below a directory (`/root`, mode 700) that the sandbox's own user cannot enter: taken
        while this process still has the host user's rights, and to be closed."""
        paths = {PYTHON_HOME: self.python, AGENT: self.agent}
        return {target: os.open(path, os.O_PATH) for target, path in paths.items() if path is not None}

    def binds(self, stage: str, handles: dict[str, int] | None = None) -> list[tuple[str, str, int]]:
        """(target, source, flags) of each mount, in an order in which they can be made.

        /opt/python comes without its site-packages: what happens to be installed there would differ from host to host,
        and start-up files in it can triple the time that every `python3` of a sandbox takes to start (42 ms against
        12 ms, measured).
        """
        found = [("/usr", "/usr", _READ_ONLY)]
        found += [(f"/{name}", f"/{name}", _READ_ONLY) for name in _PROGRAMS if _is_directory(f"/{name}")]
        found += [(path, path, _READ_ONLY | MOUNT_ATTR_NOEXEC) for path in _CONFIGURATION if os.path.exists(path)]
        found += [(f"/dev/{name}", f"/dev/{name}", _DEVICE) for name in _DEVICES]
        sources = {PYTHON_HOME: self.python, AGENT: self.agent}
        if handles is not None:
            sources = {target: f"/proc/self/fd/{fd}" for target, fd in handles.items()}
        found += [(target, source, _READ_ONLY) for target, source in sources.items() if source is not None]
        library = f"{sources.get(PYTHON_HOME)}/lib"
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


def enter(disk_bytes: int, host: Host, handles: dict[str, int], layer: Layer | None = None) -> None:
    """Builds the tree and makes it the root. OSError names the step that the host refused."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    binds = host.binds(_STAGE, handles)
    root = _skeleton(_STAGE, disk_bytes, USER_ID, host, binds)
    for target, source, flags in binds:
        mount(source, root + target, None, MS_BIND | MS_REC)
        set_mount_flags(root + target, flags, recursive=True)
    for fd in handles.values():
        os.close(fd)
    options = "newinstance,ptmxmode=0666,mode=620,max=64"
    mount("devpts", f"{root}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if layer is not None:
        _mount_layer(_STAGE, layer, USER_ID)
    for target, name, _ in OWN:
        mount(f"{_STAGE}/{name}", root + target, None, MS_BIND)
    mount(_STAGE, root + DISK, None, MS_BIND)
    set_mount_flags(root + DISK, _READ_ONLY | MOUNT_ATTR_NOEXEC, recursive=False)
    set_mount_flags(root, _READ_ONLY, recursive=False)
    pivot_to(root)


def assemble(
    stage: str, disk_bytes: int, base: int, host: Host, layer: Layer | None, mounts: list[str]
) -> dict[str, str]:
    """Builds the same in the directory `stage`, as parts: a root that only has the places of the mounts, and by such a
    place what belongs there, each a mount of its own that nothing is mounted in.

    Args:
      base: first user of the host that is the sandbox's.
      mounts: the places that the sandbox had mounts at.

    Raises:
      OSError: ENOENT, this host lacks what the sandbox had.
    """
    binds = host.binds(stage)
    owner = base + USER_ID
    root = _skeleton(stage, disk_bytes, owner, host, binds)
    for folder, folders, files in os.walk(stage):
        for path in (folder, *(f"{folder}/{name}" for name in (*folders, *files))):
            if os.lstat(path).st_uid == 0:
                os.lchown(path, base, base)
    set_mount_flags(root, _READ_ONLY, recursive=False)
    if layer is not None:
        _mount_layer(stage, layer, owner)
    own = {target: f"{stage}/{name}" for target, name, _ in OWN} | {DISK: stage}
    found = {}
    for number, place in enumerate(mounts):
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


def _skeleton(stage: str, disk_bytes: int, owner: int, host: Host, binds: list[tuple[str, str, int]]) -> str:
    """The tmpfs with its directories, and the root with all that is no mount; returns the root."""
    root = f"{stage}/root"
    options = f"size={disk_bytes},nr_inodes={_MAX_INODES},mode=755"
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name in ("root", "empty"):
        os.mkdir(f"{stage}/{name}", 0o755)
    for _, name, mode in OWN:
        os.mkdir(f"{stage}/{name}")
        os.chown(f"{stage}/{name}", owner, owner)
        os.chmod(f"{stage}/{name}", mode)
    mount(root, root, None, MS_BIND)
    for name in ("etc", "var", "dev", "dev/shm", "dev/pts", "opt", "proc", "run", "run/disk", "workspace", "tmp"):
        os.mkdir(f"{root}/{name}", 0o755)
    for name in _PROGRAMS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
    for name, text in _ETC.items():
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
    if host.python is not None:  # a link at the interpreter's own path, which its RPATH and scripts name
        os.makedirs(os.path.dirname(root + host.python), exist_ok=True)
        if not os.path.lexists(root + host.python):
            os.symlink(PYTHON_HOME, root + host.python)
    return root


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

"""The file system of a sandbox: a read-only view of the host's /usr and one private, sized tmpfs.

One tmpfs holds four directories: `root` (what becomes /, read-only), and the writable `workspace`, `tmp` and `shm`.
Runs in the sandbox's first process, inside its new namespaces, before privileges are dropped.
"""

import os

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
PYTHON_HOME = "/opt/python"
AGENT = "/opt/agent"
# Covered by the tmpfs while the tree is built; any directory that always exists will do.
_STAGE = "/tmp"
_ROOT = f"{_STAGE}/root"
_MAX_INODES = 100_000
_READ_ONLY = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
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
}


def open_handle(path: str | None) -> int | None:
    """A handle on the interpreter's directory or the agent's program, taken while this process still has the host
    user's rights: it may lie below a directory (`/root`, mode 700) that the sandbox's own user cannot enter."""
    return None if path is None else os.open(path, os.O_PATH)


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


def enter(
    hostname: str,
    disk_bytes: int,
    python_fd: int | None,
    python_prefix: str | None,
    layer: Layer | None = None,
    agent_fd: int | None = None,
) -> None:
    """Builds the tree and makes it the root. OSError names the step that the host refused."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    options = f"size={disk_bytes},nr_inodes={_MAX_INODES},mode=755"
    mount("tmpfs", _STAGE, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name in ("root", "workspace", "tmp", "shm", "empty"):
        os.mkdir(f"{_STAGE}/{name}", 0o755)
    mount(_ROOT, _ROOT, None, MS_BIND)
    _bind_host_programs()
    _write_etc(hostname)
    _make_devices()
    if python_fd is not None:
        _bind_python(python_fd, python_prefix)
    if agent_fd is not None:
        os.makedirs(f"{_ROOT}{os.path.dirname(AGENT)}", exist_ok=True)
        _write(f"{_ROOT}{AGENT}", "")
        _bind(f"/proc/self/fd/{agent_fd}", f"{_ROOT}{AGENT}", _READ_ONLY)
        os.close(agent_fd)
    for path in ("proc", "workspace", "tmp"):
        os.mkdir(f"{_ROOT}/{path}", 0o755)
    mount("proc", f"{_ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name, target, mode in (("workspace", "workspace", 0o755), ("tmp", "tmp", 0o1777), ("shm", "dev/shm", 0o1777)):
        os.chown(f"{_STAGE}/{name}", USER_ID, USER_ID)
        os.chmod(f"{_STAGE}/{name}", mode)
        if name == "workspace" and layer is not None:
            _mount_layer(layer)
        mount(f"{_STAGE}/{name}", f"{_ROOT}/{target}", None, MS_BIND)
    set_mount_flags(_ROOT, _READ_ONLY, recursive=False)
    pivot_to(_ROOT)


def _bind(source: str, target: str, attributes: int) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    set_mount_flags(target, attributes, recursive=True)


def _mount_layer(layer: Layer) -> None:
    """Mounts the layer, and over it what is the sandbox's own, at the workspace; one to be written is there itself."""
    for name in ("layer", "upper", "work"):
        os.mkdir(f"{_STAGE}/{name}", 0o755)
        os.chown(f"{_STAGE}/{name}", USER_ID, USER_ID)
    target = f"{_STAGE}/workspace" if layer.writable else f"{_STAGE}/layer"
    if layer.is_mount:
        attach(layer.fd, target)
    else:
        mount(f"/proc/self/fd/{layer.fd}", target, None, MS_BIND)
        flags = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (0 if layer.writable else MOUNT_ATTR_RDONLY)
        set_mount_flags(target, flags, recursive=False)
    os.close(layer.fd)
    if layer.writable:
        return
    parts = f"lowerdir={_STAGE}/layer,upperdir={_STAGE}/upper,workdir={_STAGE}/work,userxattr"
    mount("overlay", f"{_STAGE}/workspace", "overlay", MS_NOSUID | MS_NODEV, parts)


def _bind_host_programs() -> None:
    """/usr, and the top-level names that most distributions keep as links into it."""
    os.mkdir(f"{_ROOT}/usr")
    _bind("/usr", f"{_ROOT}/usr", _READ_ONLY)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{_ROOT}/{name}")
        elif os.path.isdir(f"/{name}"):
            os.mkdir(f"{_ROOT}/{name}")
            _bind(f"/{name}", f"{_ROOT}/{name}", _READ_ONLY)


def _write_etc(hostname: str) -> None:
    os.mkdir(f"{_ROOT}/etc")
    os.mkdir(f"{_ROOT}/var")
    own = {"hostname": f"{hostname}\n", "hosts": f"127.0.0.1 localhost {hostname}\n::1 localhost\n"}
    for name, text in {**_ETC, **own}.items():
        _write(f"{_ROOT}/etc/{name}", text)
    if os.path.exists("/etc/ld.so.cache"):
        _write(f"{_ROOT}/etc/ld.so.cache", "")
        _bind("/etc/ld.so.cache", f"{_ROOT}/etc/ld.so.cache", _READ_ONLY | MOUNT_ATTR_NOEXEC)
    if os.path.isdir("/etc/alternatives"):
        os.mkdir(f"{_ROOT}/etc/alternatives")
        _bind("/etc/alternatives", f"{_ROOT}/etc/alternatives", _READ_ONLY | MOUNT_ATTR_NOEXEC)


def _make_devices() -> None:
    """Harmless device nodes, bound from the host: a user namespace may not make any."""
    os.mkdir(f"{_ROOT}/dev")
    os.mkdir(f"{_ROOT}/dev/shm")
    for name in ("null", "zero", "full", "random", "urandom"):
        _write(f"{_ROOT}/dev/{name}", "")
        mount(f"/dev/{name}", f"{_ROOT}/dev/{name}", None, MS_BIND)
        # Not nodev, which would make it unusable. Read-only guards the node; the device itself can be written.
        flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC
        set_mount_flags(f"{_ROOT}/dev/{name}", flags, recursive=False)
    os.mkdir(f"{_ROOT}/dev/pts")
    options = "newinstance,ptmxmode=0666,mode=620,max=64"
    mount("devpts", f"{_ROOT}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    for path, target in _LINKS.items():
        os.symlink(target, f"{_ROOT}/{path}")


def _bind_python(python_fd: int, prefix: str) -> None:
    """The owner's interpreter at /opt/python, and a link at its old path, which its RPATH and scripts name.

    Without its site-packages: what happens to be installed there would differ from host to host, and start-up files in
    it can triple the time that every `python3` of a sandbox takes to start (42 ms against 12 ms, measured).
    """
    os.makedirs(f"{_ROOT}{PYTHON_HOME}")
    _bind(f"/proc/self/fd/{python_fd}", f"{_ROOT}{PYTHON_HOME}", _READ_ONLY)
    os.close(python_fd)
    library = f"{_ROOT}{PYTHON_HOME}/lib"
    for name in os.listdir(library) if os.path.isdir(library) else ():
        packages = f"{library}/{name}/site-packages"
        if name.startswith("python3") and os.path.isdir(packages):
            _bind(f"{_STAGE}/empty", packages, _READ_ONLY)
    os.makedirs(os.path.dirname(f"{_ROOT}{prefix}"), exist_ok=True)
    if not os.path.lexists(f"{_ROOT}{prefix}"):
        os.symlink(PYTHON_HOME, f"{_ROOT}{prefix}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as f:
        f.write(text)

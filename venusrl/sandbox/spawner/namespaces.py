"""The Linux calls Python lacks: clone into namespaces, mounts, capabilities, a few prctl options.

Only ctypes. Every function raises OSError with the call's name, so that a refused step says which one it was.
"""

import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
USERS = 65536  # of a sandbox
SANDBOX_NAMESPACES = (
    CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
)

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE, MS_SLAVE = 4096, 16384, 1 << 18, 1 << 19
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
_MOUNT_ATTR_IDMAP = 0x100000

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE, _MNT_DETACH = -100, 0x1000, 0x8000, 2
_OPEN_TREE, _OPEN_TREE_CLONE, _MOVE_MOUNT, _MOVE_MOUNT_F_EMPTY_PATH = 428, 1, 429, 4
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_CAPABILITY_VERSION_3 = 0x20080522

# Numbers of the calls glibc does not wrap, or not the way needed: (clone, pivot_root, mount_setattr, seccomp's arch).
MACHINES = {"x86_64": (56, 155, 442, 0xC000003E), "aarch64": (220, 41, 442, 0xC00000B7)}

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC_WITH_GIL = ctypes.PyDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _number(index: int) -> int:
    machine = os.uname().machine
    if machine not in MACHINES:
        raise OSError(38, f"machine {machine}: system call numbers are known for {', '.join(MACHINES)} only")
    return MACHINES[machine][index]


def clone(flags: int) -> int:
    """fork() into new namespaces: 0 in the child, its pid in the parent. The caller must be single threaded.

    One clone instead of unshare and two forks: the child is at once pid 1 of its pid namespace and a direct child
    of the caller, which can therefore wait for it. The interpreter is told through its own fork hooks.
    """
    arguments = [ctypes.c_long(value) for value in (_number(0), flags | signal.SIGCHLD, 0, 0, 0, 0)]
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _LIBC_WITH_GIL.syscall(*arguments)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check(pid, "clone into namespaces")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    result = _LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount {source} on {target}")


class _MountAttr(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd"))


def set_mount_flags(target: str, attributes: int, recursive: bool) -> None:
    """Adds MOUNT_ATTR_* to a mount, and to those below it. Needs Linux 5.12."""
    attr = _MountAttr(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _LIBC.syscall(
        ctypes.c_long(_number(2)),
        ctypes.c_long(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_ulong(flags),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )
    _check(result, f"mount_setattr {target}")


def mapped_mount(path: str, user_namespace: int, writable: bool) -> int:
    """A mount of a directory, attached nowhere, in which files have owners as that user namespace maps them.

    Needs Linux 5.12, root, and a file system that permits it (ext4, xfs, btrfs; tmpfs from 6.3). The files' pages are
    those of the original.
    """
    flags = ctypes.c_ulong(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    tree = _LIBC.syscall(ctypes.c_long(_OPEN_TREE), ctypes.c_long(_AT_FDCWD), os.fsencode(path), flags)
    _check(tree, f"open_tree {path}")
    try:
        set_flags = _MOUNT_ATTR_IDMAP | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | (0 if writable else MOUNT_ATTR_RDONLY)
        attr = _MountAttr(set_flags, 0, 0, user_namespace)
        result = _LIBC.syscall(
            ctypes.c_long(_number(2)),
            ctypes.c_long(tree),
            b"",
            ctypes.c_ulong(_AT_EMPTY_PATH),
            ctypes.byref(attr),
            ctypes.c_size_t(ctypes.sizeof(attr)),
        )
        _check(result, f"mount_setattr idmap {path}")
    except OSError:
        os.close(tree)
        raise
    return tree


def attach(tree: int, target: str) -> None:
    """Puts a mount of `mapped_mount` at `target` in the caller's mount namespace."""
    long = ctypes.c_long
    flags = ctypes.c_ulong(_MOVE_MOUNT_F_EMPTY_PATH)
    result = _LIBC.syscall(long(_MOVE_MOUNT), long(tree), b"", long(_AT_FDCWD), os.fsencode(target), flags)
    _check(result, f"move_mount on {target}")


def pivot_to(path: str) -> None:
    """Makes the mount at `path` the root and drops the old root with everything below it."""
    os.chdir(path)
    _check(_LIBC.syscall(ctypes.c_long(_number(1)), b".", b"."), f"pivot_root {path}")
    _check(_LIBC.umount2(b".", _MNT_DETACH), "unmount the old root")
    os.chdir("/")


def sync_all(path: str | os.PathLike) -> None:
    """syncfs(2): everything of the file system that `path` is on is on its disk. One for all files, not one a file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_LIBC.syncfs(fd), f"syncfs {os.fspath(path)}")
    finally:
        os.close(fd)


def eventfd() -> int:
    """eventfd(2), not blocking; closes on exec."""
    return _check(_LIBC.eventfd(0, os.O_NONBLOCK | os.O_CLOEXEC), "eventfd")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_LIBC.unshare(flags), "unshare")


def set_namespace(fd: int) -> None:
    """setns(2): this thread enters the namespace that the descriptor is of."""
    _check(_LIBC.setns(fd, 0), "setns")


def bound_users(budgets: dict[str, int], owner: int | None = None) -> None:
    """Sets what the users of a user namespace may have together (namespaces(7), /proc/sys/user).

    Args:
      owner: a process of that namespace; None: it is this process's own.
    """
    if owner is None:
        for name, most in budgets.items():
            with open(f"/proc/sys/user/{name}", "w") as f:
                f.write(str(most))
        return
    pid = os.fork()
    if pid == 0:
        try:
            set_namespace(os.open(f"/proc/{owner}/ns/user", os.O_RDONLY))
            bound_users(budgets)
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1] != 0:
        raise OSError(errno.EIO, "the budgets of its users cannot be set")


def raise_loopback() -> None:
    """The loopback of this network namespace, which in a new one is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def set_hostname(name: str) -> None:
    """sethostname(2), 64 bytes at most."""
    raw = name.encode()[:64]
    _check(_LIBC.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


def _prctl(option: int, value: int, what: str) -> None:
    zero = ctypes.c_ulong(0)
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), zero, zero, zero), what)


def set_dumpable(on: bool) -> None:
    """Off: other processes of the same user cannot read this one's memory, descriptors or environment in /proc."""
    _prctl(_PR_SET_DUMPABLE, int(on), "prctl dumpable")


def die_with_parent() -> None:
    """SIGKILL when the parent dies. A later change of credentials clears it, so call it after the last one."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, "prctl pdeathsig")


def set_no_new_privs() -> None:
    """No execve gives privileges from here on (setuid bits and file capabilities are ignored)."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "prctl no_new_privs")


def drop_bounding_set() -> None:
    """Empties the capability bounding set."""
    prctl, drop, zero = _LIBC.prctl, _PR_CAPBSET_DROP, ctypes.c_ulong(0)
    for capability in range(64):
        if prctl(drop, ctypes.c_ulong(capability), zero, zero, zero) < 0:
            if ctypes.get_errno() == errno.EINVAL:  # the kernel has no more
                return
            _check(-1, f"drop capability {capability}")


def clear_capabilities() -> None:
    """Empties the effective, permitted and inheritable sets."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_LIBC.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_seccomp(program: bytes) -> None:
    """Installs a classic BPF program (8-byte instructions) as this process's system call filter."""
    fprog = _SockFprog(len(program) // 8, program)
    zero = ctypes.c_ulong(0)
    _check(_LIBC.prctl(22, ctypes.c_ulong(2), ctypes.byref(fprog), zero, zero), "install the seccomp filter")

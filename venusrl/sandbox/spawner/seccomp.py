"""The system call deny list as a classic BPF program.

A deny list, not an allow list: test suites and build tools use almost every harmless call. What is denied is what
reaches kernel code far from ordinary programs (mounts, namespaces, modules, bpf, io_uring, keys, tracing) and what
could harm the agent. Denied calls fail with EPERM. `clone3` fails with ENOSYS because BPF cannot see its flags:
libc then falls back to `clone`, whose flags are checked.
"""

import struct

from venusrl.sandbox.spawner.namespaces import MACHINES

_X86_64 = {
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "swapon": 167, "swapoff": 168, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "create_module": 174,
    "init_module": 175, "delete_module": 176, "quotactl": 179, "nfsservctl": 180, "acct": 163, "settimeofday": 164,
    "lookup_dcookie": 212, "ptrace": 101, "syslog": 103, "sysctl": 156, "kexec_load": 246, "kexec_file_load": 320,
    "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "setns": 308, "perf_event_open": 298,
    "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "swapon": 224, "swapoff": 225, "reboot": 142,
    "sethostname": 161, "setdomainname": 162, "init_module": 105, "delete_module": 106, "quotactl": 60,
    "nfsservctl": 42, "acct": 89, "settimeofday": 170, "lookup_dcookie": 18, "ptrace": 117, "syslog": 116,
    "kexec_load": 104, "kexec_file_load": 294, "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97,
    "setns": 268, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280,
    "userfaultfd": 282,
}  # fmt: skip
# From 424 on every architecture has the same numbers.
_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip
_CLONE3 = 435
# Asynchronous I/O of the kernel's: its events are counted for the whole host (fs.aio-max-nr), and programs do without.
_IO_SETUP = {"x86_64": 206, "aarch64": 0}
_FALLOCATE = {"x86_64": 285, "aarch64": 47}
# Message queues: their bytes are counted for who made the sandboxes, and the usual bound is that of one of them.
_MQ_OPEN = {"x86_64": 240, "aarch64": 180}
# Programs of the kernel's packet filter: their code is counted for the whole host (net.core.bpf_jit_limit).
_SETSOCKOPT = {"x86_64": 54, "aarch64": 208}
_SOL_SOCKET, _ATTACH_FILTER, _ATTACH_REUSEPORT_FILTER = 1, 26, 51
# Filters of system calls that a guest gives itself are counted there, too. EINVAL is what a kernel without them says.
_SECCOMP, _PRCTL = {"x86_64": 317, "aarch64": 277}, {"x86_64": 157, "aarch64": 167}
_SET_MODE_FILTER, _PR_SET_SECCOMP, _MODE_FILTER = 1, 22, 2
_DENIED = {"x86_64": {**_X86_64, **_EVERYWHERE}, "aarch64": {**_AARCH64, **_EVERYWHERE}}
_CHECKED = {
    "x86_64": {"clone": 56, "socket": 41, "prlimit64": 302, "setpriority": 141, "ioprio_set": 251},
    "aarch64": {"clone": 220, "socket": 198, "prlimit64": 261, "setpriority": 140, "ioprio_set": 30},
}
# sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr: the first argument is a pid.
_SCHEDULING = {"x86_64": (142, 144, 203, 314), "aarch64": (118, 119, 122, 274)}
# The value of the first argument that makes the second one a pid, not a group or a user.
_ONE_PROCESS = {"setpriority": 0, "ioprio_set": 1}
_AGENT_PID = 1

_CLONE_NEW_ANY = 0x7E020000
_X32_BIT = 0x40000000
# Sockets that a network namespace confines. AF_VSOCK, for one, would reach the hypervisor.
_SOCKET_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink
_EPERM, _ENOMEM, _EINVAL, _ENOSYS, _EOPNOTSUPP, _EAFNOSUPPORT = 1, 12, 22, 38, 95, 97

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_OFFSET, _ARCH_OFFSET, _FIRST_ARGUMENT_OFFSET, _SECOND_ARGUMENT_OFFSET = 0, 4, 16, 24
_THIRD_ARGUMENT_OFFSET = 32
# Huge pages are the host's pool, outside of the memory of a cgroup: mmap, memfd_create, shmget, and their flags.
_HUGE_PAGES = {
    "x86_64": ((9, 40, 0x40000), (319, 24, 4), (29, 32, 0x800)),
    "aarch64": ((222, 40, 0x40000), (279, 24, 4), (194, 32, 0x800)),
}


def supported(machine: str) -> bool:
    """Whether a filter exists for this machine (`os.uname().machine`)."""
    return machine in _DENIED


def program(machine: str, builds: bool = False) -> bytes:
    """The filter for `machine`, ready for `install_seccomp`. KeyError on a machine that is not `supported`.

    Args:
      builds: for the set-up of a template, which may not take space of the host's disk faster than it can write.
    """
    denied, checked = _DENIED[machine], _CHECKED[machine]
    code = [
        (_LOAD, 0, 0, _ARCH_OFFSET),
        (_JUMP_EQUAL, 1, 0, MACHINES[machine][3]),
        (_RETURN, 0, 0, _KILL_PROCESS),  # a 32-bit call has other numbers: no list would hold
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_JUMP_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
        (_JUMP_EQUAL, 1, 0, _IO_SETUP[machine]),
        (_JUMP_EQUAL, 0, 1, _MQ_OPEN[machine]),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    if builds:
        code += [(_JUMP_EQUAL, 0, 1, _FALLOCATE[machine]), (_RETURN, 0, 0, _ERRNO | _EOPNOTSUPP)]
    code += [
        (_JUMP_EQUAL, 0, 8, _SETSOCKOPT[machine]),
        (_LOAD, 0, 0, _SECOND_ARGUMENT_OFFSET),
        (_JUMP_EQUAL, 0, 4, _SOL_SOCKET),
        (_LOAD, 0, 0, _THIRD_ARGUMENT_OFFSET),
        (_JUMP_EQUAL, 1, 0, _ATTACH_FILTER),
        (_JUMP_EQUAL, 0, 1, _ATTACH_REUSEPORT_FILTER),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number, offset, flag in _HUGE_PAGES[machine]:
        code += [
            (_JUMP_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, offset),
            (_JUMP_ANY_BIT, 0, 1, flag),
            (_RETURN, 0, 0, _ERRNO | _ENOMEM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    code += _with_first_argument(
        _SECCOMP[machine],
        [(_JUMP_EQUAL, 0, 1, _SET_MODE_FILTER), (_RETURN, 0, 0, _ERRNO | _EINVAL), (_RETURN, 0, 0, _ALLOW)],
    )
    block = [
        (_JUMP_EQUAL, 0, 3, _PR_SET_SECCOMP),
        (_LOAD, 0, 0, _SECOND_ARGUMENT_OFFSET),
        (_JUMP_EQUAL, 0, 1, _MODE_FILTER),
        (_RETURN, 0, 0, _ERRNO | _EINVAL),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code += _with_first_argument(_PRCTL[machine], block)
    code += _with_first_argument(
        checked["clone"],
        [(_JUMP_ANY_BIT, 0, 1, _CLONE_NEW_ANY), (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)],
    )
    # The agent's limits and priority: it is of the same user, so the kernel would permit a command to change them.
    for number in _SCHEDULING[machine]:
        code += _with_first_argument(
            number, [(_JUMP_EQUAL, 0, 1, _AGENT_PID), (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)]
        )
    for name, one_process in _ONE_PROCESS.items():
        block = [
            (_JUMP_EQUAL, 0, 2, one_process),
            (_LOAD, 0, 0, _SECOND_ARGUMENT_OFFSET),
            (_JUMP_EQUAL, 0, 1, _AGENT_PID),
            (_RETURN, 0, 0, _ERRNO | _EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
        code += _with_first_argument(checked[name], block)
    code += _with_first_argument(
        checked["prlimit64"],
        [(_JUMP_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW)],
    )
    count = len(_SOCKET_FAMILIES)
    families = [(_JUMP_EQUAL, count - index, 0, family) for index, family in enumerate(_SOCKET_FAMILIES)]
    code += _with_first_argument(
        checked["socket"], [*families, (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT), (_RETURN, 0, 0, _ALLOW)]
    )
    numbers = sorted(denied.values())
    code += [(_JUMP_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _with_first_argument(number: int, then: list[tuple]) -> list[tuple]:
    """Runs `then` on the low 32 bits of the first argument if the call is `number`, else skips it."""
    return [(_JUMP_EQUAL, 0, len(then) + 1, number), (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET), *then]

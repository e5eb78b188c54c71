"""The first moments of a sandbox: a fork of the spawner gives up all that it has, and becomes the agent."""

import contextlib
import gc
import os
import signal
import socket

from venusrl.sandbox.agent.agent import Agent
from venusrl.sandbox.spawner import budgets, limits, namespaces, rootfs
from venusrl.sandbox.wire import pack

USER_NAMESPACE_FIX = (
    "this host does not let this process make a sandbox. Run as root, or allow unprivileged user namespaces: "
    "sysctl user.max_user_namespaces > 0, kernel.unprivileged_userns_clone=1 (Debian), "
    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu); in a container, use a seccomp profile that allows "
    "clone with namespaces and mount (Docker: --security-opt seccomp=unconfined --security-opt "
    "systempaths=unconfined --cap-add SYS_ADMIN)"
)


class Birth:
    """What is the same for every sandbox of a spawner.

    Args:
      host: what they see of it.
      prepared: directory of their root; None: each makes its own.
      has_range: each has a range of users.
      limits_memory: a cgroup does; else each process has a limit of its own.
      filters: of system calls, BPF programs: of a sandbox, and of a template's set-up; None: this machine has none.
      life_fd: read end of a pipe that ends when the spawner dies.
      user_budgets: what all users of a sandbox may have together (budgets.of_users).
    """

    def __init__(
        self,
        host: rootfs.Host,
        prepared: str | None,
        has_range: bool,
        limits_memory: bool,
        filters: tuple[bytes | None, bytes | None],
        life_fd: int,
        user_budgets: dict[str, int],
    ):
        self._user_budgets = user_budgets
        self._host_files = budgets.host_files()
        self._host = host
        self._prepared = prepared
        self._range_mode = has_range
        self._limits_memory = limits_memory
        self._filters = filters
        self._life_fd = life_fd

    def become_agent(
        self,
        request: dict,
        oom_fd: int | None,
        freezer: list[int],
        control: socket.socket,
        gate: socket.socket,
        life_write: int,
    ) -> None:
        """Never returns. A step that fails is reported to the owner on the agent's socket.

        Args: freezer: Freezer.open_files, or nothing.
        """
        try:
            gc.enable()
            os.close(life_write)
            go, layer, _, _ = socket.recv_fds(gate, 1, 1)
            if go != b"1":
                return
            control = self.keep_only(control, oom_fd, *freezer, *layer)
            self._confine(request, *layer)
            data_bytes = None if self._limits_memory else request["memory_bytes"]
            open_files = budgets.open_files(request["pids"] + limits.PIDS_HEADROOM, self._host_files)
            limits.limit_agent(request["file_bytes"], open_files, data_bytes)
            if self._host.agent is not None:
                self._run_program(request, control.fileno(), -1 if oom_fd is None else oom_fd, freezer or [-1] * 3)
            limits_of_it = request["pids"], request["output_bytes"], request["env"]
            Agent(control, self._life_fd, oom_fd, freezer, *limits_of_it).serve()
        except OSError as error:
            control.sendall(pack({"setup_error": f"{error}; {USER_NAMESPACE_FIX}"}))
        finally:
            os._exit(0)

    def _run_program(self, request: dict, control: int, oom_fd: int, freezer: list[int]) -> None:
        """The agent's program in place of this one."""
        fds = (control, self._life_fd, oom_fd, *freezer)
        for fd in fds:
            if fd >= 0:
                os.set_inheritable(fd, True)
        numbers = (*fds, limits.process_limit(request["pids"]), request["output_bytes"])
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execve(rootfs.AGENT, ["agent", *(str(number) for number in numbers)], request["env"])

    def keep_only(self, control: socket.socket, *fds: int | None) -> socket.socket:
        """Closes the spawner's descriptors: its control socket, its pidfds, other sandboxes' counters."""
        keep = sorted(fd for fd in (control.fileno(), self._life_fd, *fds) if fd is not None)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        low = 3
        for fd in keep:
            os.closerange(low, fd)
            low = fd + 1
        os.closerange(low, os.sysconf("SC_OPEN_MAX"))
        return control

    def _confine(self, request: dict, layer: int | None = None) -> None:
        os.setsid()
        os.umask(0o022)
        host = self._host if self._prepared is not None else self._host.opened()
        if self._range_mode:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        with contextlib.suppress(OSError):  # a container may show /proc/sys read-only; then its own user's budgets hold
            namespaces.bound_users(self._user_budgets)
        namespaces.raise_loopback()
        namespaces.set_hostname(rootfs.HOSTNAME)
        files = None
        if layer is not None:
            files = rootfs.Layer(layer, True, request["build"])
        elif request["layer"] is not None:  # the files are this user's, as the sandbox is
            files = rootfs.Layer(os.open(request["layer"], os.O_PATH | os.O_DIRECTORY), False, request["build"])
        rootfs.enter(request["disk_bytes"], self._prepared, host, files)
        namespaces.drop_bounding_set()
        if self._range_mode:
            os.setresgid(rootfs.USER_ID, rootfs.USER_ID, rootfs.USER_ID)
            os.setresuid(rootfs.USER_ID, rootfs.USER_ID, rootfs.USER_ID)
        namespaces.clear_capabilities()
        namespaces.set_no_new_privs()
        namespaces.set_dumpable(False)
        calls = self._filters[bool(request["build"])]
        if calls is not None:
            namespaces.install_seccomp(calls)
        # Last, for a change of credentials clears it. If the spawner died before, the pipe has ended already.
        namespaces.die_with_parent()

"""The spawner: a small single-threaded process that forks sandboxes and ends them.

The owner has JAX, threads and a large heap, so it must not fork; the spawner imports a dozen standard modules and
forks in a fraction of a millisecond. It ends, and with it every sandbox, when its owner does: at end of file on the
control socket, or when the owner's pidfd says so (a fork of the owner could hold the socket open).

Messages are JSON, one a packet (SOCK_SEQPACKET).
  in:  create {id, disk_bytes, file_bytes, memory_bytes, pids, output_bytes, ttl_s, env, layer, build, oom, oom_wait_s},
       or a holder of a layer: create {id, memory_bytes, pids, ttl_s, hold}; restore {what create has, folder, criu,
       base, berth, parked}; kill {id, reason}; usage; and, answered by `done`: resize {id, memory_bytes, lent,
       request}; save {id, folder, criu, ghost_bytes, request}, of one whose agent has parked; meet {id, berth, request}
  out: hello {mode, cgroups, seccomp}; created {id, pid} with the agent's socket; refused {id, error};
       gone {id, reason}; usage {rows: [id, bytes, kernel bytes], last}; pressure {id}, it waits for
       memory; done {request, error}, with the agent's socket where that was asked for
"""

import contextlib
import errno
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

from venusrl.core.errors import ConfigError
from venusrl.sandbox.agent.berth import ADOPTED, KEPT, meet
from venusrl.sandbox.spawner import budgets, limits, namespaces, rootfs, saving, seccomp
from venusrl.sandbox.spawner.birth import USER_NAMESPACE_FIX, Birth
from venusrl.sandbox.spawner.boxes import Box, Helper
from venusrl.sandbox.spawner.holder import hold
from venusrl.sandbox.spawner.messages import check
from venusrl.sandbox.spawner.sharing import Sharing

PACKET_BYTES = 1 << 17
# Host users given to sandboxes: 64 Ki each, in a range no distribution assigns.
_FIRST_USER, _USERS, _RANGES = 0x70000000, namespaces.USERS, 3072
_REMOVE_RETRY_S = 0.02
_USAGE_ROWS = 500  # in a packet
# What a restored sandbox may have beyond its own limits, for CRIU, until it stands.
_HELPER_BYTES, _HELPER_PIDS = 128 << 20, 32
_UNLIMITED = 1 << 50
_MOST_ERROR = 500  # characters
_LONGEST_POLL_S = 3600.0  # poll(2) takes no more than 2^31 ms, and a ttl may be longer


def _apart(work: Callable, subject: Box | Helper) -> None:
    """What goes wrong with one sandbox must not end the others."""
    try:
        work(subject)
    except ConnectionError:
        raise
    except Exception:  # noqa: BLE001, whatever it is
        sys.excepthook(*sys.exc_info())


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _stop_commands(box: Box) -> Callable[[], None]:
    """Every process of a sandbox but its agent; what is returned has them go on, unless they stood still before."""
    freezer = box.group.freezer
    if freezer is not None:
        was_asked = freezer.is_asked()
        freezer.ask()
        return lambda: None if was_asked else freezer.thaw()
    commands = [pid for pid in box.group.processes() if pid != box.pid]
    _signal(commands, signal.SIGSTOP)
    return lambda: _signal(commands, signal.SIGCONT)


class Spawner:
    """Args:
    control: the packet socket to the owner.
    python_prefix: directory to show at /opt/python, or None.
    agent: path of the agent's program; None: the Python one.
    """

    def __init__(self, control: socket.socket, python_prefix: str | None, agent: str | None):
        self._control = control
        self._host = rootfs.Host(python_prefix, agent)
        with open("/proc/self/mountinfo") as mounts, open("/proc/self/cgroup") as own:
            mountinfo = mounts.read()
            limits.reap(mountinfo)
            self._cgroups = limits.detect(mountinfo, own.read())
        self._range_mode = os.geteuid() == 0 and _range_is_mapped()
        self._made = self._saves = 0
        self._boxes: dict[int, Box] = {}
        self._helpers: dict[int, Helper] = {}
        self._unremoved: list[limits.Group] = []
        self._life_read, self._life_write = os.pipe2(os.O_CLOEXEC)
        arch = os.uname().machine
        self._filter = seccomp.program(arch) if seccomp.supported(arch) else None
        build_filter = seccomp.program(arch, builds=True) if seccomp.supported(arch) else None
        prepared = self._prepare() if self._range_mode else None
        has_limit = self._cgroups.report["memory"] is not None
        self._user_budgets = budgets.of_users()
        self._birth = Birth(
            self._host,
            prepared,
            self._range_mode,
            has_limit,
            (self._filter, build_filter),
            self._life_read,
            self._user_budgets,
        )
        self._sharing = Sharing()
        self._owner_fd = os.pidfd_open(os.getppid())
        self._poll = select.poll()

    def _prepare(self) -> str | None:
        """The root of all sandboxes, in a mount namespace of this process; None where it may not have one."""
        try:
            os.makedirs(rootfs.PREPARED, exist_ok=True)
            namespaces.unshare(namespaces.CLONE_NEWNS)
            namespaces.mount("none", "/", None, namespaces.MS_REC | namespaces.MS_SLAVE)
            return rootfs.prepare(self._host)
        except OSError:
            return None

    def run(self) -> None:
        """Serves until the owner is gone, then ends every sandbox."""
        self._poll.register(self._control.fileno(), select.POLLIN)
        self._poll.register(self._owner_fd, select.POLLIN)
        mode = "range" if self._range_mode else "single"
        has_seccomp = self._filter is not None
        try:
            self._tell({"event": "hello", "mode": mode, "cgroups": self._cgroups.report, "seccomp": has_seccomp})
            while self._step():
                pass
        except ConnectionError:
            pass  # the owner went away while being told something
        finally:
            self._end_all()

    def _step(self) -> bool:
        ready = {fd for fd, _ in self._poll.poll(self._poll_ms())}
        if self._owner_fd in ready:
            return False
        for box in [box for fd, box in self._boxes.items() if fd in ready]:
            _apart(self._collect, box)
        for helper in [helper for fd, helper in self._helpers.items() if fd in ready]:
            _apart(self._end_help, helper)
        for box in [box for box in self._boxes.values() if box.oom_event in ready]:
            _apart(self._wait_for_memory, box)
        if self._control.fileno() in ready:
            packet = self._control.recv(PACKET_BYTES)
            if not packet:
                return False
            self._hear(packet)
        now = time.monotonic()
        for box in self._boxes.values():
            if box.reason is None and now >= box.expires:
                self._kill(box, "ttl")
            if box.reason is None and box.gives_up is not None and now >= box.gives_up:
                box.gives_up = None
                if box.group.under_oom():
                    self._kill(box, "oom")
        self._sharing.look((box.id, box.pid, box.group) for box in self._boxes.values() if box.reason is None)
        self._unremoved = [group for group in self._unremoved if not group.remove()]
        return True

    def _poll_ms(self) -> float | None:
        now = time.monotonic()
        alive = [box for box in self._boxes.values() if box.reason is None]
        waits = [box.expires - now for box in alive]
        waits += [box.gives_up - now for box in alive if box.gives_up is not None]
        if alive and self._sharing.due is not None:
            waits.append(self._sharing.due - now)
        if self._unremoved:
            waits.append(_REMOVE_RETRY_S)
        return max(0.0, min([*waits, _LONGEST_POLL_S])) * 1000.0 + 0.5 if waits else None

    def _hear(self, packet: bytes) -> None:
        """What is wrong with a message, or happens while it is served, ends that request alone."""
        message = None
        try:
            message = json.loads(packet)
            check(message)
            self._serve(message)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001, whatever it is
            if not isinstance(error, ConfigError | ValueError | RecursionError):
                sys.excepthook(*sys.exc_info())
            self._answer_error(message, f"{type(error).__name__}: {error}"[:_MOST_ERROR])

    def _answer_error(self, message: object, error: str) -> None:
        if not isinstance(message, dict):
            return  # nobody waits for that
        if isinstance(message.get("request"), int):
            self._tell({"event": "done", "request": message["request"], "error": error})
        elif message.get("op") in ("create", "restore") and message.get("id") not in self._ids():
            self._tell({"event": "refused", "id": str(message.get("id")), "error": error})

    def _ids(self) -> list[str]:
        return [box.id for box in self._boxes.values()]

    def _serve(self, message: dict) -> None:
        if message["op"] == "create":
            self._create(message)
            return
        if message["op"] == "restore":
            self._restore(message)
            return
        if message["op"] == "usage":
            self._tell_usage()
            return
        box = next((box for box in self._boxes.values() if box.id == message["id"]), None)
        if message["op"] == "kill":
            if box is not None:
                self._kill(box, message["reason"])
            for helper in self._helpers.values():
                if helper.sandbox_id == message["id"]:
                    helper.killed = True
                    signal.pidfd_send_signal(helper.pidfd, signal.SIGKILL)
        elif box is None:
            self._tell({"event": "done", "request": message["request"], "error": "it is gone"})
        else:
            {"resize": self._resize, "save": self._save, "meet": self._meet}[message["op"]](box, message)

    def _tell_usage(self) -> None:
        """What is charged to every sandbox, in packets of a size that fits."""
        rows = [(box.id, box.group.usage()) for box in self._boxes.values() if box.reason is None]
        rows = [(name, *usage) for name, usage in rows if usage is not None]
        for at in range(0, len(rows), _USAGE_ROWS):
            self._tell({"event": "usage", "rows": rows[at : at + _USAGE_ROWS], "last": False})
        self._tell({"event": "usage", "rows": [], "last": True})

    def _wait_for_memory(self, box: Box) -> None:
        try:
            os.read(box.oom_event, 8)
        except BlockingIOError:
            return
        if box.reason is None and box.group.under_oom():
            box.gives_up = box.gives_up or time.monotonic() + box.oom_wait_s
            self._tell({"event": "pressure", "id": box.id})

    def _resize(self, box: Box, message: dict) -> None:
        """One that is lent some gets none of it for its commands, which would not leave any: they stop before."""
        error, lent = None, message["lent"]
        undo = _stop_commands(box) if lent else lambda: None
        try:
            if lent is None:
                box.group.resize(message["memory_bytes"])
                box.gives_up = None
                if box.oom_event >= 0 and box.group.under_oom():
                    box.gives_up = time.monotonic() + box.oom_wait_s
            else:
                box.group.lend(message["memory_bytes"], lent)
        except OSError as refused:
            undo()
            error = f"{refused.strerror}"
        self._tell({"event": "done", "request": message["request"], "error": error})

    # Saving and restoring

    def _help(
        self,
        work: Callable[[], None],
        sandbox_id: str,
        group: limits.Group,
        restores: bool,
        then: Callable[[int], None],
    ) -> None:
        """In a group, by which its own children are found when this process is killed."""
        try:
            group.enter()
            pid = saving.helper(work)
        finally:
            group.leave()
        try:
            group.join(pid)
            helper = Helper(pid, sandbox_id, group, restores, then)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._helpers[helper.pidfd] = helper
        self._poll.register(helper.pidfd, select.POLLIN)

    def _end_help(self, helper: Helper) -> None:
        _, status = os.waitpid(helper.pid, 0)
        del self._helpers[helper.pidfd]
        self._poll.unregister(helper.pidfd)
        os.close(helper.pidfd)
        helper.then(-signal.SIGKILL if helper.killed else os.waitstatus_to_exitcode(status))

    def _save(self, box: Box, message: dict) -> None:
        def then(exit_code: int) -> None:
            group.kill()
            if not group.remove():
                self._unremoved.append(group)
            error = saving.error_of(message["folder"]) if exit_code else None
            if exit_code < 0 and box.reason is None:  # it may have left its own code in the sandbox's processes
                self._kill(box, "node-lost")
            self._tell({"event": "done", "request": message["request"], "error": error})

        self._saves += 1
        group = limits.Group([], [], None)
        try:
            freezer = box.group.freezer
            if freezer is None:  # its commands could look into the agent while that can be looked into
                raise OSError(errno.ENOTSUP, "this host has no freezer cgroup")
            group = self._cgroups.make(f"save-{self._saves}", _UNLIMITED, _HELPER_PIDS)
            self._help(lambda: saving.save(message, box.pid, freezer), box.id, group, False, then)
        except OSError as error:
            if not group.remove():
                self._unremoved.append(group)
            self._tell({"event": "done", "request": message["request"], "error": str(error)})

    def _meet(self, box: Box, message: dict) -> None:
        """The agent of a sandbox that was saved, and is still its owner's."""
        try:
            with self._connect(box.pid, message["berth"], KEPT, box.group) as connection:
                self._tell({"event": "done", "request": message["request"], "error": None}, (connection.fileno(),))
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionError):
                raise
            self._tell({"event": "done", "request": message["request"], "error": str(error)})

    def _connect(self, pid: int, berth: str, greeting: bytes, group: limits.Group) -> socket.socket:
        files = [] if group.freezer is None else group.freezer.open_files()
        try:
            fds = [self._life_read, *files, *([] if group.oom_fd is None else [group.oom_fd])]
            return meet(pid, bytes.fromhex(berth), greeting, fds)
        finally:
            for fd in files:
                os.close(fd)

    def _restore(self, request: dict) -> None:
        """Within the sandbox's own group, so that what it is restored from is charged to it."""
        group = limits.Group([], [], None)
        try:
            memory_bytes, pids = request["memory_bytes"], request["pids"]
            group = self._cgroups.make(request["id"], memory_bytes + _HELPER_BYTES, pids + _HELPER_PIDS)
            base, freezer = self._next_users(), group.freezer
            if freezer is None:
                raise OSError(errno.ENOTSUP, "this host has no freezer cgroup")
            self._help(
                lambda: saving.restore(request, self._host, base, freezer),
                request["id"],
                group,
                True,
                lambda exit_code: self._end_restore(request, group, exit_code),
            )
        except OSError as error:
            self._refuse(request["id"], group, str(error))

    def _end_restore(self, request: dict, group: limits.Group, exit_code: int) -> None:
        try:
            if exit_code:
                raise OSError(errno.EIO, saving.error_of(request["folder"]))
            pid = saving.pid_of(request["folder"])
            saving.check_frozen(group, pid)
            with contextlib.suppress(OSError):
                namespaces.bound_users(self._user_budgets, pid)
            connection = None
            if not request["parked"]:
                connection = self._connect(pid, request["berth"], ADOPTED, group)
            try:
                hold = group.hold_on_oom() if request["oom"] == "hold" else -1
                group.settle(request["memory_bytes"], request["pids"])
                self._admit(request, pid, group, hold, connection)
            finally:
                if connection is not None:
                    connection.close()
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionError):
                raise
            group.kill()
            self._refuse(request["id"], group, getattr(error, "strerror", None) or str(error))
        self._reap_strangers()

    def _reap_strangers(self) -> None:
        """Children that are nobody's: processes of a sandbox that was not restored to the end.

        Not while another is being restored, whose processes are not known yet; killed they are by their group.
        """
        if any(helper.restores for helper in self._helpers.values()):
            return
        known = {box.pid for box in self._boxes.values()} | {helper.pid for helper in self._helpers.values()}
        with open(f"/proc/self/task/{os.getpid()}/children") as f:
            for pid in {int(word) for word in f.read().split()} - known:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _refuse(self, sandbox_id: str, group: limits.Group, error: str) -> None:
        if not group.remove():
            self._unremoved.append(group)
        self._tell({"event": "refused", "id": sandbox_id, "error": error})

    def _admit(self, request: dict, pid: int, group: limits.Group, hold: int, agent: socket.socket | None) -> None:
        """A sandbox that is there from now on; with its agent's socket, unless that waits."""
        box = Box(request["id"], pid, group, time.monotonic() + request["ttl_s"])
        self._boxes[box.pidfd] = box
        self._poll.register(box.pidfd, select.POLLIN)
        if hold >= 0:
            box.oom_event, box.oom_wait_s = hold, request["oom_wait_s"]
            self._poll.register(hold, select.POLLIN)
        self._tell({"event": "created", "id": box.id, "pid": pid}, () if agent is None else (agent.fileno(),))

    def _kill(self, box: Box, reason: str) -> None:
        if box.reason is None:
            box.reason = reason
        signal.pidfd_send_signal(box.pidfd, signal.SIGKILL)
        box.group.let_die()

    def _collect(self, box: Box) -> None:
        """After process 1 ended, and with it, by the kernel's rule, every process of the sandbox."""
        _, status = os.waitpid(box.pid, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if box.reason is None:
            box.reason = "oom" if killed and box.group.oom_kills() > 0 else "killed"
        del self._boxes[box.pidfd]
        self._poll.unregister(box.pidfd)
        os.close(box.pidfd)
        if box.oom_event >= 0:
            self._poll.unregister(box.oom_event)
            os.close(box.oom_event)
        if not box.group.remove():
            self._unremoved.append(box.group)
        self._tell({"event": "gone", "id": box.id, "reason": box.reason})

    def _end_all(self) -> None:
        for helper in self._helpers.values():
            signal.pidfd_send_signal(helper.pidfd, signal.SIGKILL)
            helper.group.kill()
            self._unremoved.append(helper.group)
        for box in self._boxes.values():
            self._kill(box, "node-lost")
        for box in self._boxes.values():
            os.waitpid(box.pid, 0)
            self._unremoved.append(box.group)
        give_up = time.monotonic() + 2.0
        while time.monotonic() < give_up:
            self._unremoved = [group for group in self._unremoved if not group.remove()]
            if not self._unremoved and self._cgroups.close():
                return
            time.sleep(_REMOVE_RETRY_S)

    def _tell(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        data = json.dumps(message).encode()
        if fds:
            socket.send_fds(self._control, [data], list(fds))
        else:
            self._control.send(data)

    # Creation

    def _create(self, request: dict) -> None:
        group, hold = limits.Group([], [], None), -1
        try:
            group = self._cgroups.make(request["id"], request["memory_bytes"], request["pids"])
            if request.get("oom") == "hold":
                hold = group.hold_on_oom()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                fork = self._fork_holder if request.get("hold") else self._fork
                self._admit(request, fork(request, group, theirs), group, hold, ours)
        except Exception as error:
            if isinstance(error, ConnectionError):
                raise
            if hold >= 0:
                os.close(hold)
            group.kill()
            if not isinstance(error, OSError):
                sys.excepthook(*sys.exc_info())
            refused = getattr(error, "errno", None) in (
                errno.EPERM,
                errno.ENOSPC,
                errno.EUSERS,
                errno.EINVAL,
                errno.EACCES,
            )
            self._refuse(request["id"], group, f"{error}; {USER_NAMESPACE_FIX}" if refused else str(error))

    def _fork(self, request: dict, group: limits.Group, agent_end: socket.socket) -> int:
        ours, theirs = socket.socketpair()
        freezer = [] if group.freezer is None else group.freezer.open_files()
        with ours, theirs:
            try:
                group.enter()
                pid = namespaces.clone(namespaces.SANDBOX_NAMESPACES)
                if pid == 0:
                    ours.close()
                    self._birth.become_agent(request, group.oom_fd, freezer, agent_end, theirs, self._life_write)
            finally:
                group.leave()
                for fd in freezer:
                    os.close(fd)
            try:
                group.join(pid)
                self._map_users(pid)
                mapped = request["layer"] is not None and self._range_mode
                layers = [self._map_layer(pid, request["layer"], request["build"])] if mapped else []
                socket.send_fds(ours, [b"1"], layers)
                for layer in layers:
                    os.close(layer)
            except Exception:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
            return pid

    def _fork_holder(self, request: dict, group: limits.Group, holder_end: socket.socket) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            group.join(os.getpid())
            os.close(self._life_write)
            hold(request["hold"], self._birth.keep_only(holder_end), self._life_read)
        finally:
            os._exit(0)

    def _map_layer(self, pid: int, path: str, writable: bool) -> int:
        """A template's files for the sandbox of process `pid`: owned by its users, whoever they are on the host."""
        users = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return namespaces.mapped_mount(path, users, writable)
        except OSError as error:
            where = "keep templates on ext4, xfs or btrfs, and run Linux 5.19 or newer"
            raise OSError(errno.ENOTSUP, f"{error.strerror}; {where}") from error
        finally:
            os.close(users)

    def _map_users(self, pid: int) -> None:
        """Gives the new user namespace its users, from outside, as the kernel demands."""
        if self._range_mode:
            users = groups = f"0 {self._next_users()} {_USERS}"
        else:
            users, groups = f"{rootfs.USER_ID} {os.geteuid()} 1", f"{rootfs.USER_ID} {os.getegid()} 1"
            limits.write(f"/proc/{pid}/setgroups", "deny")
        limits.write(f"/proc/{pid}/uid_map", users)
        limits.write(f"/proc/{pid}/gid_map", groups)

    def _next_users(self) -> int:
        """The first of the host's users that the next sandbox has."""
        self._made += 1
        return _FIRST_USER + _USERS * ((os.getpid() + self._made) % _RANGES)


def _range_is_mapped() -> bool:
    """Whether the users for sandboxes exist in this process's own user namespace (in a container they may not)."""
    last = _FIRST_USER + _USERS * _RANGES
    with open("/proc/self/uid_map") as f:
        rows = [[int(field) for field in line.split()] for line in f]
    return any(first <= _FIRST_USER and last <= first + count for first, _, count in rows)


def main(arguments: list[str]) -> None:
    """Arguments: descriptor of the control socket; python prefix, and agent's program, or empty strings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C in a terminal is the owner's affair
    control = socket.socket(fileno=int(arguments[0]))
    control.set_inheritable(False)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a sandbox takes a few
    spawner = Spawner(control, arguments[1] or None, arguments[2] or None)
    # A sandbox shares this process's memory until one of the two writes: the collector does so to whatever it looks at.
    gc.collect()
    gc.freeze()
    gc.disable()
    spawner.run()


if __name__ == "__main__":
    main(sys.argv[1:])

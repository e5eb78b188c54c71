"""Saving and restoring a process sandbox: what a helper of the spawner does, a fork of it that ends afterwards.

A saved sandbox is a folder: CRIU's images of its processes, and `files.tar`, what it wrote. The helper leaves what went
wrong in the file `error`.
"""

import errno
import json
import os
import shlex
import signal

from venusrl.sandbox.spawner import criu, limits, namespaces, rootfs
from venusrl.sandbox.spawner.freezer import Freezer

FILES = "files.tar"
PLACES = "mounts.json"
ERROR = "error"
PID = "pid"
_FREEZE = "freeze.sh"
# CRIU runs it at every step. As soon as there is a network its loopback is raised. Before CRIU lets go of what it has
# restored, that is still stopped: all but the agent is moved into the freezer, thread by thread, and frozen.
_FREEZE_SCRIPT = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-setup-namespaces ] && exec {agent} loopback "$CRTOOLS_INIT_PID"
[ "$CRTOOLS_SCRIPT_ACTION" = pre-resume ] || exit 0
take() {{
  for task in /proc/$1/task/*; do
    [ "$1" = "$CRTOOLS_INIT_PID" ] || echo "${{task##*/}}" > {members}
    read -r children < "$task/children"
    for child in $children; do take "$child"; done
  done
}}
take "$CRTOOLS_INIT_PID"
{freeze}
"""
_PATH = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
_ENVIRONMENT = {"PATH": ":".join(_PATH)}
_TAR = ("tar", "--warning=no-file-ignored", "--xattrs", "--xattrs-include=user.*", "--sparse", "--numeric-owner")


def helper(work) -> int:
    """Runs `work` in a fork, whose pid is returned; it ends with this process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        namespaces.die_with_parent()
        work()
        os._exit(0)
    finally:
        os._exit(1)  # a fork must not go back into the spawner's loop


def save(request: dict, pid: int, freezer: Freezer) -> None:
    """In a helper: saves the sandbox whose agent, process `pid`, has parked.

    The agent can be looked into meanwhile, so nothing else of the sandbox may run. CRIU thaws only what it has stopped
    itself, and freezes it again before it lets go.
    """
    folder = request["folder"]
    with _reported(folder):
        places = criu.mounts(pid)
        command = criu.dump_command(request["criu"], pid, folder, places, request["ghost_bytes"], freezer.whole)
        with freezer.whole_frozen():
            exit_code = _run(command)
        if exit_code < 0:  # killed: it may have left its own code in the processes
            os.kill(os.getpid(), signal.SIGKILL)
        if exit_code != 0:
            raise OSError(errno.EIO, criu.complaint(f"{folder}/dump.log"))
        # Of a workspace that is an overlay, what lies over the layer.
        disk = f"/proc/{pid}/root{rootfs.DISK}"
        names = ["tmp", "shm", "upper" if os.path.isdir(f"{disk}/upper") else "workspace"]
        if _run([*_TAR, "-C", disk, "--one-file-system", "-cf", f"{folder}/{FILES}", *names]) != 0:
            raise OSError(errno.EIO, "its files could not be read")
        with open(f"{folder}/{PLACES}", "w") as f:
            json.dump(places, f)


def restore(request: dict, host: rootfs.Host, base: int, freezer: Freezer) -> None:
    """In a helper, which CRIU takes the place of: restores a sandbox, to wait for its owner where it did.

    Args:
      base: first user of the host that is the sandbox's.
      freezer: in which its commands are, frozen, before the first of them runs.
    """
    folder = request["folder"]
    with _reported(folder):
        script = f"{folder}/{_FREEZE}"
        with open(os.open(script, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o700), "w") as f:
            parts = {"members": freezer.members_file, "freeze": freezer.freeze_command}
            f.write(_FREEZE_SCRIPT.format(agent=shlex.quote(str(host.agent)), **parts))
        with open(f"{folder}/{PLACES}") as f:
            places = json.load(f)
        os.makedirs(rootfs.PREPARED, exist_ok=True)
        namespaces.unshare(namespaces.CLONE_NEWNS)
        namespaces.mount("none", "/", None, namespaces.MS_REC | namespaces.MS_PRIVATE)
        layer = None
        if request["layer"] is not None:
            layer = rootfs.Layer(namespaces.mapped_mount(request["layer"], _users(base), False), True, False)
        parts = rootfs.assemble(rootfs.PREPARED, request["disk_bytes"], base, host, layer, places)
        files = os.open(f"{folder}/{FILES}", os.O_RDONLY)
        if _run([*_TAR, "-C", rootfs.PREPARED, "-x", "--no-same-owner", "-p"], files, base + rootfs.USER_ID) != 0:
            raise OSError(errno.EIO, "its files could not be written")
        criu.move_users(folder, request["base"], base)
        root = f"{rootfs.PREPARED}/root"
        command = criu.restore_command(request["criu"], folder, root, [parts[place] for place in places], script)
        os.execve(command[0], command, _ENVIRONMENT)


def _users(base: int) -> int:
    """A user namespace of nobody's with the users of the sandbox."""
    told, tell = os.pipe()
    done, finish = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            namespaces.unshare(namespaces.CLONE_NEWUSER)
            os.write(tell, b"1")
            os.close(finish)
            os.read(done, 1)
        finally:
            os._exit(0)
    os.close(done)
    os.close(tell)
    os.read(told, 1)
    for kind in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{kind}", "w") as f:
            f.write(f"0 {base} {namespaces.USERS}")
    users = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    os.close(finish)
    os.waitpid(pid, 0)
    return users


class _reported:
    """Leaves the error of what it encloses in the folder."""

    def __init__(self, folder: str):
        self._folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if error is not None:
            with open(f"{self._folder}/{ERROR}", "w") as f:
                f.write(str(error) if isinstance(error, OSError | ValueError) else repr(error))


def error_of(folder: str) -> str:
    """What a helper left, or CRIU in its place."""
    try:
        with open(f"{folder}/{ERROR}") as f:
            return f.read() or "it does not say why"
    except FileNotFoundError:
        pass
    try:
        return criu.complaint(f"{folder}/restore.log")
    except FileNotFoundError:
        return "the process that did it was killed"


def pid_of(folder: str) -> int:
    """Of the first process of what was restored."""
    with open(f"{folder}/{PID}") as f:
        return int(f.read())


def check_frozen(group: limits.Group, agent: int) -> None:
    """Raises OSError unless every process of a restored sandbox but its agent is frozen, or about to be."""
    running = set(group.processes()) - {agent} - group.freezer.members()
    if not group.freezer.is_asked() or any(limits.start_time(pid) is not None for pid in running):
        raise OSError(errno.EIO, "its commands did not stand still")


def _run(command: list[str], stdin: int = 0, user: int | None = None) -> int:
    """Its exit code, as another user where one is given."""
    # Found before the fork: another user may not be able to import what os.execvp needs.
    folders = [folder for folder in _PATH if os.access(f"{folder}/{command[0]}", os.X_OK)]
    program = f"{folders[0]}/{command[0]}" if folders else command[0]
    pid = os.fork()
    if pid == 0:
        try:
            namespaces.die_with_parent()
            os.dup2(stdin, 0)
            if user is not None:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                os.umask(0)
            os.execve(program, command, _ENVIRONMENT)
        finally:
            os._exit(127)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

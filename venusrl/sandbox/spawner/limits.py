"""Resource limits: cgroups v1 or v2 where this process may make them, rlimits everywhere.

Directories are named after the spawner that made them (`venusrl-<pid namespace>-<pid>-<start time>`), so those of a
spawner that died without cleaning up can be recognised and removed by the next one.
"""

import contextlib
import errno
import os
import resource
import signal

from venusrl.sandbox.spawner import budgets, namespaces
from venusrl.sandbox.spawner.freezer import Freezer, thaw_left, write

_PREFIX = "venusrl-"
# The pids cgroup is the backstop; RLIMIT_NPROC, which the command's shell sets (see agent), stops commands first, so
# that the agent can always start another.
PIDS_HEADROOM = 8
# What waits in sockets, which version 1 counts for the sandbox apart from its memory: a part of that.
_SOCKETS, _SOCKETS_PART = "memory.kmem.tcp.limit_in_bytes", 8
_SLACK_BYTES = 1 << 20  # what a group may take between two looks at what it has
# A group has its share of the processors by being one: of equal weight with every other, however many run in it.
CONTROLLERS = ("memory", "pids", "cpu", "freezer")


def limit_agent(file_bytes: int, open_files: int, data_bytes: int | None) -> None:
    """Limits of the agent that commands inherit: file size, open files, no core files, private data a process."""
    # 1, not 0: both mean no core file, but only 1 keeps the host's core_pattern program from being run.
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    files = min(open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if data_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes, data_bytes))
    budgets.limit_process()


def process_limit(pids: int) -> int:
    """RLIMIT_NPROC of commands: one more than the template's `pids`, for the agent is of the same user.

    Linux >= 5.14 counts per user namespace, so sandboxes do not share the count even if they share the host user.
    """
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return pids + 1 if hard == resource.RLIM_INFINITY else min(pids + 1, hard)


class Hierarchy:
    """A directory of cgroupfs below which this process may make groups for one controller set.

    Attributes:
      home: the group of version 1 that this process is in, if it may come back to it; None: it stays there.
    """

    def __init__(self, directory: str, version: int, controllers: tuple[str, ...], home: str | None = None):
        self.home = home
        self.directory = directory
        self.version = version
        self.controllers = controllers

    def limits(self, memory_bytes: int, pids: int) -> list[tuple[str, str]]:
        """(file, value) pairs to write into a new group. Files that a kernel lacks for swap are optional."""
        pairs = []
        if "memory" in self.controllers and self.version == 1:
            pairs += [("memory.limit_in_bytes", str(memory_bytes)), ("memory.memsw.limit_in_bytes", str(memory_bytes))]
            pairs.append((_SOCKETS, str(memory_bytes // _SOCKETS_PART)))
        elif "memory" in self.controllers:
            pairs += [("memory.max", str(memory_bytes)), ("memory.swap.max", "0")]
        if "pids" in self.controllers:
            pairs.append(("pids.max", str(pids + PIDS_HEADROOM)))
        return pairs

    @property
    def oom_file(self) -> str | None:
        """The file of a group with a line `oom_kill N`."""
        if "memory" not in self.controllers:
            return None
        return "memory.oom_control" if self.version == 1 else "memory.events"

    @property
    def usage_files(self) -> tuple[str, str]:
        """The files of a group with the bytes charged, and with those of the kernel's among them."""
        if self.version == 1:
            return "memory.usage_in_bytes", "memory.kmem.usage_in_bytes"
        return "memory.current", "memory.stat"


class Group:
    """The cgroups of one sandbox.

    Attributes: freezer: of its commands; None where the host has none, or for what is no process sandbox.
    """

    def __init__(
        self,
        directories: list[str],
        homes: list[str | None],
        oom_path: str | None,
        usage_paths: tuple[str, ...] = (),
        freezer: Freezer | None = None,
    ):
        self.freezer = freezer
        self._directories = directories
        self._homes = homes
        self._entered: list[str] = []
        self._oom_path = oom_path
        self._usage_paths = usage_paths
        self._usage_fds: list[int] = []
        self.oom_fd = None if oom_path is None else os.open(oom_path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def exists(self) -> bool:
        """The host has groups for it, or one at least."""
        return bool(self._directories)

    def join(self, pid: int) -> None:
        """Moves a process in; its later children follow."""
        for directory in self._directories:
            if directory not in self._entered:
                write(f"{directory}/cgroup.procs", str(pid))

    def enter(self) -> None:
        """Moves this process in, as far as it can come back, so that what it forks is there; `join` does the rest.

        A process that moves its only thread takes no lock of the whole system's. Moving another does, and waits for a
        grace period of RCU, 10 to 20 ms, where none has moved for some milliseconds.
        """
        for directory, home in zip(self._directories, self._homes, strict=True):
            if home is not None:
                write(f"{directory}/tasks", "0")
                self._entered.append(directory)

    def leave(self) -> None:
        """Moves this process back."""
        for home in filter(None, self._homes):
            write(f"{home}/tasks", "0")

    def hold_on_oom(self) -> int:
        """From now on processes that need more memory than there is wait; a descriptor that tells when one does.

        Raises:
          OSError: ENOTSUP, no memory cgroup of version 1.
        """
        if self._oom_path is None or not self._oom_path.endswith("memory.oom_control"):
            raise OSError(errno.ENOTSUP, "Template.oom='hold' needs a memory cgroup of version 1; use 'kill'")
        fd = namespaces.eventfd()
        try:
            write(f"{os.path.dirname(self._oom_path)}/cgroup.event_control", f"{fd} {self.oom_fd}")
            write(self._oom_path, "1")
        except OSError:
            os.close(fd)
            raise
        return fd

    def under_oom(self) -> bool:
        """A process waits for memory."""
        return self.oom_fd is not None and b"under_oom 1" in os.pread(self.oom_fd, 4096, 0)

    def resize(self, memory_bytes: int) -> None:
        """Sets the limit of memory; OSError EBUSY where more is in use and cannot be freed."""
        if self._oom_path is None:
            raise OSError(errno.ENOTSUP, "no memory cgroup")
        directory = os.path.dirname(self._oom_path)
        if not self._oom_path.endswith("memory.oom_control"):
            if self.usage()[0] > memory_bytes:  # version 2 would kill for it
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            write(f"{directory}/memory.max", str(memory_bytes))
            return
        # The one with swap may never be the lower: it is the first to be raised, the last to be lowered.
        files = ["memory.memsw.limit_in_bytes", "memory.limit_in_bytes"]
        with open(f"{directory}/memory.limit_in_bytes") as f:
            files = files if memory_bytes >= int(f.read()) else files[::-1]
        for file in files:
            if os.path.exists(f"{directory}/{file}"):
                write(f"{directory}/{file}", str(memory_bytes))
        if os.path.exists(f"{directory}/{_SOCKETS}"):
            write(f"{directory}/{_SOCKETS}", str(memory_bytes // _SOCKETS_PART))

    def settle(self, memory_bytes: int, pids: int) -> None:
        """Limits as a new group would have them; one that has more memory already may keep that, and gets no more."""
        for directory in self._directories:
            if os.path.exists(f"{directory}/pids.max"):
                write(f"{directory}/pids.max", str(pids + PIDS_HEADROOM))
        if self._oom_path is not None:
            self.lend(memory_bytes, 0)

    def lend(self, memory_bytes: int, more: int) -> None:
        """So much more than its limit, or than it has where that is more; 0: the limit again, or what it has."""
        if more:
            self.resize(max(memory_bytes, self.usage()[0]) + more)
            return
        try:
            self.resize(memory_bytes)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self.resize(self.usage()[0] + _SLACK_BYTES)

    def processes(self) -> list[int]:
        """Pids of those that are in it."""
        directories = [*self._directories, *([] if self.freezer is None else [self.freezer.directory])]
        return list({pid for directory in directories for pid in _members(directory)})

    def kill(self) -> int:
        """Sends SIGKILL to every process that is in it, frozen or not; how many there were."""
        count = max((_kill_members(directory) for directory in self._directories), default=0)
        self.let_die()
        return count

    def let_die(self) -> None:
        """What has been killed ends, though it is frozen."""
        if self.freezer is not None:
            with contextlib.suppress(FileNotFoundError):
                self.freezer.let_die()

    def oom_kills(self) -> int:
        """Processes of the group that the kernel killed for its memory limit so far."""
        return read_oom_kills(self.oom_fd)

    def usage(self) -> tuple[int, int] | None:
        """(bytes charged, of them bytes of the kernel's); None where no cgroup counts them."""
        if not self._usage_paths:
            return None
        if not self._usage_fds:
            self._usage_fds = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in self._usage_paths]
        charged, kernel = (os.pread(fd, 4096, 0) for fd in self._usage_fds)
        lines = (line.split() for line in kernel.splitlines())
        return int(charged), int(kernel) if kernel.strip().isdigit() else int(dict(lines).get(b"kernel", 0))

    def remove(self) -> bool:
        """Removes the directories; False if the kernel still holds one, then try again shortly."""
        for fd in self._usage_fds:
            os.close(fd)
        self._usage_fds = []
        if self.oom_fd is not None:
            os.close(self.oom_fd)
            self.oom_fd = None
        if self.freezer is not None and _remove(self.freezer.directory):
            self.freezer = None
        self._directories = [directory for directory in self._directories if not _remove(directory)]
        return not self._directories and self.freezer is None


def read_oom_kills(oom_fd: int | None) -> int:
    """The counter behind a descriptor of `Hierarchy.oom_file`; 0 without one."""
    if oom_fd is None:
        return 0
    for line in os.pread(oom_fd, 4096, 0).splitlines():
        key, _, value = line.partition(b" ")
        if key == b"oom_kill":
            return int(value)
    return 0


class Cgroups:
    """Makes the groups of one spawner."""

    def __init__(self, hierarchies: list[Hierarchy]):
        self.hierarchies = hierarchies

    @property
    def report(self) -> dict:
        """{"memory": "v1" | "v2" | None, "pids", "cpu", "freezer": the same}: what holds for a sandbox as a whole."""
        found: dict = dict.fromkeys(CONTROLLERS)
        for hierarchy in self.hierarchies:
            found.update({name: f"v{hierarchy.version}" for name in hierarchy.controllers})
        return found

    def make(self, name: str, memory_bytes: int, pids: int) -> Group:
        """The groups of a new sandbox, limits set. OSError if the kernel refuses one."""
        made: list[str] = []
        try:
            return self._make(name, memory_bytes, pids, made)
        except OSError:
            for directory in reversed(made):
                _remove(directory)
            raise

    def _make(self, name: str, memory_bytes: int, pids: int, made: list[str]) -> Group:
        directories, homes, oom_path, usage_paths, freezer = [], [], None, (), None
        for hierarchy in self.hierarchies:
            directory = f"{hierarchy.directory}/{name}"
            os.mkdir(directory)
            made.append(directory)
            directories.append(directory)
            homes.append(hierarchy.home)
            for file, value in hierarchy.limits(memory_bytes, pids):
                if os.path.exists(f"{directory}/{file}"):
                    write(f"{directory}/{file}", value)
            if hierarchy.oom_file is not None:
                oom_path = f"{directory}/{hierarchy.oom_file}"
                usage_paths = tuple(f"{directory}/{file}" for file in hierarchy.usage_files)
            if "freezer" in hierarchy.controllers:
                freezer = Freezer(directory, hierarchy.version)
                made.append(freezer.directory)
        return Group(directories, homes, oom_path, usage_paths, freezer)

    def close(self) -> bool:
        """Removes the spawner's own directories, after all its groups; False if the kernel still holds one."""
        return all([_remove(hierarchy.directory) for hierarchy in self.hierarchies])


def detect(mountinfo: str, own: str, more: str = "", controllers: tuple[str, ...] = CONTROLLERS) -> Cgroups:
    """Makes this spawner's directories where it may.

    Args:
      mountinfo: text of /proc/self/mountinfo.
      own: text of /proc/self/cgroup.
      more: tells several of one process apart.
      controllers: that are wanted.
    """
    mine = f"{_PREFIX}{_pid_namespace()}-{os.getpid()}-{start_time(os.getpid())}-{more}"
    paths = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        paths.update({name: path for name in names.split(",")})
    hierarchies: dict[str, Hierarchy] = {}
    for root, point, kind, options in _cgroup_mounts(mountinfo):
        version = 1 if kind == "cgroup" else 2
        served = tuple(name for name in controllers if name not in hierarchies)
        if version == 1:
            served = tuple(name for name in served if name in options)
            path = paths.get(served[0], "/") if served else "/"
        else:
            path = paths.get("", "/")
        if not served:
            continue
        for parent in _parents(point, os.path.relpath(path, root)):
            made = _make_spawner_directory(parent, mine, version, served)
            if made is not None:
                made.home = _home(point, os.path.relpath(path, root)) if version == 1 else None
                hierarchies.update({name: made for name in made.controllers})
                break
    return Cgroups(list({id(h): h for h in hierarchies.values()}.values()))


def _home(point: str, relative: str) -> str | None:
    """This process's own group, if it may move there."""
    home = _parents(point, relative)[0]
    try:
        write(f"{home}/tasks", "0")
    except OSError:
        return None
    return home


def _cgroup_mounts(mountinfo: str) -> list[tuple[str, str, str, list[str]]]:
    found = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, rest = right.partition(" ")
        if kind in ("cgroup", "cgroup2"):
            fields = left.split()
            found.append((fields[3], fields[4], kind, rest.split()[-1].split(",")))
    return sorted(found, key=lambda item: item[2])  # v1 first: a controller is bound to one version


def _parents(point: str, relative: str) -> list[str]:
    """Own group first, then its ancestors: v2 forbids groups below one that has processes."""
    if relative.startswith(".."):
        return [point]  # the path is outside of what this container sees
    steps = [] if relative == "." else relative.split("/")
    return ["/".join([point, *steps[:count]]) for count in range(len(steps), -1, -1)]


def _make_spawner_directory(parent: str, name: str, version: int, wanted: tuple[str, ...]) -> Hierarchy | None:
    directory = f"{parent}/{name}"
    try:
        os.mkdir(directory)
    except OSError:
        return None  # read-only, not ours, or not there
    served = wanted
    if version == 2:
        try:
            with open(f"{directory}/cgroup.controllers") as f:
                served = tuple(set(wanted) & set(f.read().split()))
            if served:
                write(f"{directory}/cgroup.subtree_control", " ".join(f"+{controller}" for controller in served))
        except OSError:
            served = ()
        if "freezer" in wanted and os.path.exists(f"{directory}/cgroup.freeze"):
            served = (*served, "freezer")  # every group has it
    if not served:
        _remove(directory)
        return None
    return Hierarchy(directory, version, served)


def reap(mountinfo: str) -> None:
    """Kills what dead spawners of this pid namespace left in any hierarchy, and removes their groups."""
    for _, point, _, _ in _cgroup_mounts(mountinfo):
        _reap_below(point)


def _reap_below(point: str) -> None:
    for parent, names, _ in os.walk(point):
        for name in [name for name in names if name.startswith(_PREFIX)]:
            names.remove(name)
            namespace, _, rest = name[len(_PREFIX) :].partition("-")
            pid, _, started = rest.partition("-")
            started = started.partition("-")[0]
            if namespace != str(_pid_namespace()) or not pid.isdigit() or str(start_time(int(pid))) == started:
                continue
            for directory, _, _ in os.walk(f"{parent}/{name}", topdown=False):
                _kill_members(directory)
                thaw_left(directory)
                _remove(directory)


def _members(directory: str) -> list[int]:
    try:
        with open(f"{directory}/cgroup.procs") as f:
            return [int(line) for line in f]
    except OSError:
        return []


def _kill_members(directory: str) -> int:
    pids = _members(directory)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    return len(pids)


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, which with its pid names it for good; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == b"Z" else int(fields[19])


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _remove(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        return error.errno not in (errno.EBUSY, errno.ENOTEMPTY)
    return True

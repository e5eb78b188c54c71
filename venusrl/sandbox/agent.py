"""The agent: process 1 of a sandbox. It serves the owner over one socket and starts commands.

It is a fork of the spawner that has lost every privilege, so it runs with the same rights as the commands, except
that they cannot signal it (it is process 1 of its pid namespace) nor look into it (it is not dumpable). When it
ends, the kernel ends every process of the sandbox.
"""

import errno
import os
import select
import signal
import time

from venusrl.sandbox import files
from venusrl.sandbox.limits import process_limit, read_oom_kills
from venusrl.sandbox.output import Capture
from venusrl.sandbox.wire import WireError, pack, recv_frame

WORKSPACE = "/workspace"
SHELL = "/bin/bash"
# The shell first limits its processes, and makes itself the kernel's choice, before the agent, when memory runs out.
# The script comes as descriptor 3, for argv is limited to 128 KiB. eval keeps the messages of a plain `bash -c` (a
# sourced file would put its name into them), and descriptor 3 is closed while the script runs.
_BOOT = 'ulimit -u %d; echo 1000 >/proc/self/oom_score_adj; eval -- "$(</proc/self/fd/3)" 3<&-'
_READ_BYTES = 64 * 1024
# Pipes kept open for background processes after their exec returned, so that writing does not kill them.
_MAX_OLD_PIPES = 32
_KILL_WAIT_S = 10.0


class _Job:
    """The exec that runs now."""

    def __init__(self, request_id, pid, pipe, capture, started, timeout_s, oom_kills):
        self.request_id = request_id
        self.pid = pid
        self.pipe = pipe
        self.capture = capture
        self.started = started
        self.deadline = started + timeout_s
        self.oom_kills = oom_kills
        self.status: int | None = None


class Agent:
    """Serves requests until the owner or the spawner goes away.

    Args:
      control: blocking stream socket to the owner.
      life_fd: read end of a pipe that ends when the spawner dies.
      oom_fd: descriptor with the cgroup's `oom_kill` counter, or None.
      pids, output_bytes: limits of the template.
      environment: variables of every command.
    """

    def __init__(self, control, life_fd, oom_fd, pids, output_bytes, environment):
        self._control = control
        self._life_fd = life_fd
        self._oom_fd = oom_fd
        self._process_limit = process_limit(pids)
        self._output_bytes = output_bytes
        self._environment = environment
        self._job: _Job | None = None
        self._paused_at: float | None = None
        self._old_pipes: list[int] = []
        self._poll = select.poll()
        self._wake_fd = -1

    def serve(self) -> None:
        """Returns when the owner closed the socket or the spawner died."""
        os.chdir(WORKSPACE)
        self._wake_fd, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for fd in (self._control.fileno(), self._life_fd, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        self._send({"ready": True})
        try:
            while self._step():
                pass
        except (WireError, ConnectionError):
            return

    def _step(self) -> bool:
        ready = {fd for fd, _ in self._poll.poll(self._poll_ms())}
        if self._life_fd in ready:
            return False
        if self._wake_fd in ready:
            os.read(self._wake_fd, 4096)
            self._reap()
        if self._control.fileno() in ready:
            header, body = recv_frame(self._control)
            self._serve_request(header, body)
        for fd in [fd for fd in self._old_pipes if fd in ready]:
            self._drain_old(fd)
        job = self._job
        if job is not None and job.pipe in ready:
            self._read_pipe(job)
        if job is not None and job is self._job:
            if job.status is not None:
                self._finish(job, timed_out=False)
            elif self._paused_at is None and time.monotonic() >= job.deadline:
                self._stop(job)
        return True

    def _poll_ms(self) -> float | None:
        if self._job is None or self._paused_at is not None:
            return None
        return max(0.0, (self._job.deadline - time.monotonic()) * 1000.0) + 0.5

    # Requests

    def _serve_request(self, header: dict, body: bytes) -> None:
        op, request_id = header["op"], header["id"]
        if op == "exec":
            self._start(header, body)
        elif op == "cancel":
            if self._job is not None and self._job.request_id == header["job"]:
                self._stop(self._job)
        elif op == "pause":
            if self._paused_at is None:
                self._signal_all(signal.SIGSTOP)
                self._paused_at = time.monotonic()
            self._send({"id": request_id})
        elif op == "resume":
            self._resume()
            self._send({"id": request_id})
        else:
            try:
                answer, data = files.serve(op, header, body)
            except OSError as error:
                answer, data = {"errno": error.errno or errno.EIO}, b""
            self._send({"id": request_id, **answer}, data)

    def _resume(self) -> None:
        if self._paused_at is None:
            return
        pause_s = time.monotonic() - self._paused_at
        self._paused_at = None
        if self._job is not None:
            self._job.started += pause_s
            self._job.deadline += pause_s
        self._signal_all(signal.SIGCONT)

    def _start(self, header: dict, body: bytes) -> None:
        cut = header["script_bytes"]
        environment = {**self._environment, **header["env"]}
        oom_kills = read_oom_kills(self._oom_fd)
        started = time.monotonic()
        opened: list[int] = []
        try:
            script_fd = _memfd("script", body[:cut])
            opened.append(script_fd)
            stdin_fd = _memfd("stdin", body[cut:]) if len(body) > cut else os.open("/dev/null", os.O_RDONLY)
            opened.append(stdin_fd)
            pipe, pipe_write = os.pipe2(os.O_CLOEXEC)
            opened.append(pipe_write)
            pid = self._spawn(script_fd, stdin_fd, pipe_write, environment)
        except OSError as error:
            self._send({"id": header["id"], "errno": error.errno or errno.EIO})
            return
        finally:
            for fd in opened:
                os.close(fd)
        os.set_blocking(pipe, False)
        self._poll.register(pipe, select.POLLIN)
        capture = Capture(self._output_bytes)
        self._job = _Job(header["id"], pid, pipe, capture, started, header["timeout_s"], oom_kills)

    def _spawn(self, script_fd: int, stdin_fd: int, pipe_write: int, environment: dict) -> int:
        """Starts the shell without copying this process (vfork); every other descriptor closes on exec."""
        sources = ((stdin_fd, 0), (pipe_write, 1), (pipe_write, 2), (script_fd, 3))
        return os.posix_spawn(
            SHELL,
            ["bash", "-c", _BOOT % self._process_limit],
            environment,
            file_actions=[(os.POSIX_SPAWN_DUP2, source, target) for source, target in sources],
            setsid=True,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )

    # The running job

    def _read_pipe(self, job: _Job) -> None:
        try:
            data = os.read(job.pipe, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            job.capture.add(data)
        else:
            self._poll.unregister(job.pipe)
            os.close(job.pipe)
            job.pipe = -1

    def _finish(self, job: _Job, timed_out: bool) -> None:
        """Takes what the pipe holds now and answers; a background writer keeps the pipe."""
        left = 1 << 20  # a pipe's largest size: more than this was written after the shell ended
        while job.pipe >= 0 and left > 0:
            before = job.capture.total
            self._read_pipe(job)
            if job.capture.total == before:
                break
            left -= job.capture.total - before
        if job.pipe >= 0:
            self._old_pipes.append(job.pipe)
            if len(self._old_pipes) > _MAX_OLD_PIPES:
                self._close_old(self._old_pipes[0])
        self._job = None
        answer = {
            "id": job.request_id,
            "exit_code": os.waitstatus_to_exitcode(job.status),
            "total": job.capture.total,
            "timed_out": timed_out,
            "seconds": time.monotonic() - job.started,
            "oom": read_oom_kills(self._oom_fd) > job.oom_kills,
        }
        self._send(answer, job.capture.result())

    def _stop(self, job: _Job) -> None:
        """Ends every process of the sandbox, then answers with what the command had written."""
        self._signal_all(signal.SIGKILL)
        give_up = time.monotonic() + _KILL_WAIT_S
        while self._reap():
            if time.monotonic() > give_up:
                os._exit(1)  # something cannot be killed: the sandbox is no longer of use
            time.sleep(0.001)
        self._resume()
        self._finish(job, timed_out=True)

    def _signal_all(self, number: int) -> None:
        """To every process but this one. The kernel holds off forks meanwhile, so none escapes."""
        try:
            os.kill(-1, number)
        except ProcessLookupError:
            return

    def _reap(self) -> bool:
        """Collects every ended child, orphans too. False when there is no child left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if self._job is not None and pid == self._job.pid:
                self._job.status = status

    def _drain_old(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close_old(fd)

    def _close_old(self, fd: int) -> None:
        self._old_pipes.remove(fd)
        self._poll.unregister(fd)
        os.close(fd)

    def _send(self, header: dict, body: bytes = b"") -> None:
        self._control.sendall(pack(header, body))


def _memfd(name: str, data: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        os.close(fd)
        raise
    os.lseek(fd, 0, os.SEEK_SET)
    return fd

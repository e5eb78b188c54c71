"""The agent: process 1 of a sandbox. It serves the owner over one socket and starts commands.

It is a fork of the spawner that has lost every privilege, so it runs with the same rights as the commands, except
that they cannot signal it (it is process 1 of its pid namespace) nor look into it (it is not dumpable). When it
ends, the kernel ends every process of the sandbox.

Requests are frames (see wire.py) {op, id, ...}; each is answered by a frame with its id. Frames with `job` tell of a
command that was started: {job, stream} with output as the body, and at the end {job, exit_code, ...} with what was kept
of its output. {watch, events} tells of files.
"""

import contextlib
import errno
import os
import select
import signal
import struct
import time
from collections.abc import Callable

from venusrl.sandbox.agent import files
from venusrl.sandbox.agent.berth import ADOPTED, Berth
from venusrl.sandbox.agent.freezer import CommandFreezer, must_hold, signal_all
from venusrl.sandbox.agent.job import Job, Spare
from venusrl.sandbox.agent.tree import exists, outside
from venusrl.sandbox.agent.watch import Watcher
from venusrl.sandbox.agent.wire import patiently, receive, send
from venusrl.sandbox.spawner.limits import process_limit, read_oom_kills
from venusrl.sandbox.spawner.namespaces import set_dumpable
from venusrl.sandbox.wire import FrameTooLong, WireError

WORKSPACE = "/workspace"
# Pipes kept open for background processes after their command returned, so that writing does not kill them.
_MAX_OLD_PIPES = 32
_MAX_ENDED = 32  # started commands whose ends are remembered
_KILL_WAIT_S = 10.0
_SPARE_S = 5.0  # that a shell waits for the next command
_LONGEST_POLL_S = 3600.0  # poll(2) takes no more than 2^31 ms
# Of a request: a path that is no text, a field of the wrong kind or not there, a number that is none of the kernel's.
_BAD_FIELD = (ValueError, TypeError, KeyError, OverflowError, struct.error)


class Agent:
    """Serves requests until the owner or the spawner goes away.

    Args:
      control: blocking stream socket to the owner.
      life_fd: read end of a pipe that ends when the spawner dies.
      oom_fd: descriptor with the cgroup's `oom_kill` counter, or None.
      freezer: descriptors of the commands' freezer cgroup (CommandFreezer), or nothing.
      pids, output_bytes: limits of the template.
      environment: variables of every command.
    """

    def __init__(self, control, life_fd, oom_fd, freezer, pids, output_bytes, environment):
        self._control = control
        self._life_fd = life_fd
        self._oom_fd = oom_fd
        self._freezer = CommandFreezer(freezer)
        self._process_limit = process_limit(pids)
        self._output_bytes = output_bytes
        self._environment = environment
        self._jobs: dict[int, Job] = {}
        self._held: list[tuple[dict, bytes]] = []  # commands that wait for the sandbox to go on
        self._ended: dict[int, tuple[dict, bytes]] = {}  # how started commands ended
        self._spare: Spare | None = None
        self._spare_until = 0.0
        self._paused_at: float | None = None
        self._old_pipes: list[int] = []
        self._watcher: Watcher | None = None
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._open = True

    def serve(self) -> None:
        """Returns when the owner closed the socket or the spawner died."""
        os.chdir(WORKSPACE)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)  # the sandbox's own
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._listen(wake_read, lambda: (os.read(wake_read, 4096), self._reap()))
        self._greet()
        try:
            while self._open:
                self._step()
        except (WireError, ConnectionError):
            return

    def _greet(self) -> None:
        self._listen(self._life_fd, self._close)
        self._listen(self._control.fileno(), lambda: self._serve_request(*receive(self._control)))
        self._send({"ready": True})

    def _close(self) -> None:
        self._open = False

    def _listen(self, fd: int, handler: Callable[[], object], events: int = select.POLLIN) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def _ignore(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _step(self) -> None:
        for fd, _ in self._poll.poll(self._poll_ms()):
            handler = self._handlers.get(fd)  # one that came before may have ended it
            if handler is not None:
                handler()
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if job.status is not None:
                self._finish(job)
            elif self._paused_at is None and job.due() is not None and now >= job.due():
                quiet = job.silent_s is not None and now >= job.last_output + job.silent_s
                self._stop(job, "silent" if quiet else "deadline")
        if self._spare is not None and now >= self._spare_until:
            self._drop_spare()

    def _poll_ms(self) -> float | None:
        due = [job.due() for job in self._jobs.values() if job.due() is not None]
        if self._spare is not None:
            due.append(self._spare_until)
        if not due or self._paused_at is not None:
            return None
        return min(max(0.0, min(due) - time.monotonic()), _LONGEST_POLL_S) * 1000.0 + 0.5

    # Requests

    def _serve_request(self, header: dict, body: bytes) -> None:
        if self._paused_at is not None and header["op"] in ("exec", "start"):
            self._held.append((header, body))  # it starts when the sandbox goes on
            return
        serve = getattr(self, f"_op_{header['op']}", None)
        try:
            answer = serve(header, body) if serve is not None else files.serve(header["op"], header, body)
        except OSError as error:
            lacks = error.errno == errno.EFAULT  # a page for what the kernel says
            answer = {"errno": errno.ENOMEM if lacks else error.errno or errno.EIO}, b""
        except MemoryError:
            answer = {"errno": errno.ENOMEM}, b""
        except _BAD_FIELD:
            answer = {"errno": errno.EINVAL}, b""
        if answer is not None:
            try:
                self._send({"id": header["id"], **answer[0]}, answer[1])
            except FrameTooLong:
                self._send({"id": header["id"], "errno": errno.EFBIG})

    def _op_exec(self, header: dict, body: bytes):
        before = read_oom_kills(self._oom_fd)
        job = self._begin(header, body)
        job.oom_kills = before
        self._jobs[job.number] = job
        self._attend(job)
        return None if job.attached else ({"pid": job.pid}, b"")

    _op_start = _op_exec

    def _begin(self, header: dict, body: bytes) -> Job:
        """A new job; on the spare shell, where that fits and has not been killed."""
        arguments = header, body, self._process_limit, self._environment, self._output_bytes, self._freezer.join
        self._reap()
        spare = self._spare
        if spare is not None and Spare.fits(header, body):
            self._spare = None
            try:
                return Job(*arguments, spare)
            except OSError:
                spare.close()
        self._drop_spare()
        return Job(*arguments)

    def _prepare(self) -> None:
        """A spare shell for what comes next; one that is not used ends after a while.

        Only where no process is that could tamper with it, and it ends before another starts: its script comes through
        a pipe that others of the sandbox could open.
        """
        self._spare_until = time.monotonic() + _SPARE_S
        if self._spare is None and self._paused_at is None and not self._jobs and not outside(set()):
            try:
                self._spare = Spare(self._process_limit, self._environment, self._freezer.join)
            except OSError:
                self._spare = None  # no room: the next command finds out itself

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _op_cancel(self, header: dict, body: bytes):
        """One that is frozen may not be able to end: it does before the others go on."""
        self._held = [held for held in self._held if held[0]["id"] != header["job"]]
        job = self._jobs.get(header["job"])
        if job is None or job.status is not None:
            return
        if self._paused_at is not None:
            self._held.append((header, body))
        else:
            self._stop(job, "cancelled")

    def _op_pause(self, header: dict, body: bytes):
        self._pause()
        return {}, b""

    def _pause(self) -> bool:
        """Whether all commands stand still for sure."""
        if self._paused_at is not None:
            return self._freezer.freeze()
        self._drop_spare()
        is_frozen = self._freezer.freeze()
        self._paused_at = time.monotonic()
        self._send({"paused": True})
        return is_frozen

    def _op_resume(self, header: dict, body: bytes):
        if self._paused_at is not None:
            for job in self._jobs.values():
                job.delay(time.monotonic() - self._paused_at)
            self._paused_at = None
            held, self._held = self._held, []
            for request in [request for request in held if request[0]["op"] == "cancel"]:
                self._serve_request(*request)
            self._freezer.thaw()
            self._send({"paused": False})
            for request in [request for request in held if request[0]["op"] != "cancel"]:
                self._serve_request(*request)
        return {}, b""

    def _op_park(self, header: dict, body: bytes):
        """Pauses, lets go of everything outside of the sandbox, and waits for a new owner; the answer says where."""
        must_hold(self._freezer, self._pause())
        berth = Berth()
        kills = read_oom_kills(self._oom_fd)
        self._send({"id": header["id"], "berth": berth.name.hex()})
        for fd in (self._control.fileno(), self._life_fd):
            self._ignore(fd)
        self._control.close()
        for fd in {self._life_fd, self._oom_fd} - {None}:
            os.close(fd)
        self._freezer.close()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            self._ignore(watcher.fd)
            watcher.close()
        set_dumpable(True)  # what saves it is of another user
        self._control, greeting, (self._life_fd, *fds) = berth.wait()
        set_dumpable(False)
        self._freezer = CommandFreezer(fds[:3])
        self._oom_fd = fds[3] if len(fds) > 3 else None
        for job in self._jobs.values():  # where it has moved, another cgroup has counted others
            job.oom_kills += read_oom_kills(self._oom_fd) - kills
        for job in self._jobs.values() if greeting == ADOPTED else ():
            job.attached = False
            self._set_window(job, None)
        self._greet()
        for watch, path in watcher.paths.items() if watcher is not None else ():
            with contextlib.suppress(OSError):
                self._watch(watch, path)
            self._send({"watch": watch, "events": [["lost", ""]]})

    def _op_processes(self, header: dict, body: bytes):
        now = time.monotonic()
        rows = [
            [job.number, job.pid, job.script.decode("utf-8", "replace"), now - job.started]
            for job in self._jobs.values()
            if job.status is None
        ]
        return {"processes": rows}, b""

    def _op_connect(self, header: dict, body: bytes):
        """What is kept of the output so far; the rest follows. After its end, that again."""
        number = header["job"]
        over = self._jobs.get(number)
        if over is not None and over.status is not None:
            self._finish(over)
        if number in self._ended:
            end, output = self._ended[number]
            self._send({"id": header["id"], "pid": 0}, output)
            self._send(end, output)
            return None
        job = self._job(number)
        if job.attached:
            raise ProcessLookupError(errno.ESRCH, "it is another's exec")
        self._send({"id": header["id"], "pid": job.pid}, job.capture.result())
        self._set_window(job, header["window"])
        return None

    def _op_window(self, header: dict, body: bytes):
        """The owner takes `bytes` more, or (None) follows the output no longer."""
        job = self._jobs.get(header["job"])
        if job is not None:
            more = header["bytes"]
            self._set_window(job, None if more is None or job.window is None else job.window + more)

    def _op_input(self, header: dict, body: bytes):
        """Answered when it has been written."""
        job = self._job(header["job"])
        if job.stdin < 0:
            raise BrokenPipeError(errno.EPIPE, "its input is closed")
        job.unsent.append((header["id"], body or None))
        self._write(job)

    def _op_signal(self, header: dict, body: bytes):
        os.killpg(self._job(header["job"]).pid, header["number"])
        return {}, b""

    def _op_resize(self, header: dict, body: bytes):
        self._job(header["job"]).resize(header["rows"], header["columns"])
        return {}, b""

    def _op_watch(self, header: dict, body: bytes):
        self._watch(header["id"], os.path.join(WORKSPACE, header["path"]))
        return {}, b""

    def _watch(self, watch: int, path: str) -> None:
        if self._watcher is None:
            self._watcher = Watcher()
            self._listen(self._watcher.fd, self._tell_changes)
        self._watcher.add(watch, path)

    def _op_unwatch(self, header: dict, body: bytes):
        if self._watcher is not None:
            self._watcher.remove(header["watch"])
        return {}, b""

    def _tell_changes(self) -> None:
        for watch, events in self._watcher.read().items():
            self._send({"watch": watch, "events": events})

    def _job(self, number: int) -> Job:
        job = self._jobs.get(number)
        if job is None or job.status is not None:
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        return job

    # Output and input of a running job

    def _attend(self, job: Job) -> None:
        """Polls for what the job's descriptors wait for now. Output that the owner does not take stays in its pipe,
        where writing stops."""
        wanted = {} if job.held else dict.fromkeys(job.outputs, select.POLLIN)
        if job.unsent and job.stdin >= 0:
            wanted[job.stdin] = wanted.get(job.stdin, 0) | select.POLLOUT
        for fd in {*job.outputs, job.stdin} - {-1}:
            if fd in wanted:
                self._listen(fd, lambda fd=fd: self._move(job, fd), wanted[fd])
            else:
                self._ignore(fd)

    def _move(self, job: Job, fd: int) -> None:
        if fd == job.stdin and job.unsent:
            self._write(job)
        if fd in job.outputs and not job.held:
            self._read(job, fd)

    def _read(self, job: Job, fd: int) -> int:
        """Bytes that were read now; those of an open window go to the owner."""
        name = job.outputs[fd]
        data = job.read(fd)
        if data == b"":
            self._ignore(fd)
        elif data is not None and job.window is not None:
            self._send({"job": job.number, "stream": name}, data)
            self._set_window(job, job.window - len(data))
        return len(data or b"")

    def _set_window(self, job: Job, window: int | None) -> None:
        held, job.window = job.held, window
        if held != job.held:
            job.last_output = time.monotonic()
            self._attend(job)

    def _write(self, job: Job) -> None:
        fd = job.stdin
        for request, failed in job.write():
            self._send({"id": request} if failed is None else {"id": request, "errno": failed})
        if job.stdin != fd:
            self._ignore(fd)
        self._attend(job)

    # The end of a job

    def _finish(self, job: Job) -> None:
        """Takes what the pipes hold now and answers; background writers keep the pipes."""
        for fd in list(job.outputs):
            left = 1 << 20  # a pipe's largest size: more than this was written after the shell ended
            while fd in job.outputs and left > 0:
                count = self._read(job, fd)
                if count == 0:
                    break
                left -= count
        for fd in [fd for fd in job.outputs if fd != job.stdin]:
            self._listen(fd, lambda fd=fd: self._drain_old(fd))
            self._old_pipes.append(fd)
            del job.outputs[fd]
            if len(self._old_pipes) > _MAX_OLD_PIPES:
                self._close_old(self._old_pipes[0])
        for fd in {*job.outputs, job.stdin}:
            self._ignore(fd)
        job.close()
        for request, failed in job.write():
            self._send({"id": request, "errno": failed})
        del self._jobs[job.number]
        until = time.monotonic() if self._paused_at is None else self._paused_at
        end = {
            "id" if job.attached else "job": job.number,
            "exit_code": os.waitstatus_to_exitcode(job.status),
            "total": job.capture.total,
            "timed_out": job.timed_out,
            "seconds": until - job.started,
            "oom": read_oom_kills(self._oom_fd) > job.oom_kills,
        }
        output = job.capture.result()
        self._send(end, output)
        if job.attached:
            self._prepare()
        else:
            self._ended[job.number] = end, output
            if len(self._ended) > _MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def _stop(self, job: Job, why: str) -> None:
        """Ends every process of the sandbox that does not belong to another running command."""
        others = {other.pid for other in self._jobs.values() if other is not job and other.status is None}
        job.timed_out = why
        if not others:
            signal_all(signal.SIGKILL)
        else:
            self._freezer.freeze()  # so that none forks while the others are told apart
            killed = outside(others)
            _kill(killed)
            self._freezer.thaw()
        give_up = time.monotonic() + _KILL_WAIT_S
        while self._reap() and (not others or any(exists(pid) for pid in killed)):
            if time.monotonic() > give_up:
                os._exit(1)  # something cannot be killed: the sandbox is no longer of use
            time.sleep(0.001)
            if others and not self._freezer.holds:  # what went on in spite of the signal may have forked
                killed = outside(others)
                _kill(killed)
        self._finish(job)

    def _reap(self) -> bool:
        """Collects every ended child, orphans too. False when there is no child left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            for job in self._jobs.values():
                if job.pid == pid:
                    job.status = status
            if self._spare is not None and self._spare.pid == pid:
                self._drop_spare()

    def _drain_old(self, fd: int) -> None:
        try:
            data = patiently(os.read, fd, 64 * 1024)
        except BlockingIOError:
            return
        if not data:
            self._close_old(fd)

    def _close_old(self, fd: int) -> None:
        self._old_pipes.remove(fd)
        self._ignore(fd)
        os.close(fd)

    def _send(self, header: dict, body: bytes = b"") -> None:
        send(self._control, header, body)


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, signal.SIGKILL)

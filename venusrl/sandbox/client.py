"""The owner's side of one process sandbox: the Sandbox contract over the agent's socket."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress

from venusrl.core.errors import ConfigError, SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox import bounds
from venusrl.sandbox.agent.files import CHUNK_BYTES
from venusrl.sandbox.contract import MIB, ExecResult, FileChange, FileInfo, ProcessInfo, Template
from venusrl.sandbox.frames import check_answer, check_said
from venusrl.sandbox.keeper import Keeper
from venusrl.sandbox.pauses import Pauses
from venusrl.sandbox.process import WINDOW_BYTES, RemoteProcess, check_size
from venusrl.sandbox.requests import add_changes, command, exec_result, unfollowed
from venusrl.sandbox.wire import WireError, pack, read_frame, unpack

_GRACE_S = 30.0  # after a deadline; an agent that has not answered by then is broken, and its sandbox is killed
_REASON_WAIT_S = 5.0  # that the reason of a sandbox's end may come after its socket closed
RANGE = 1 << 32  # ids of one client
_UNANSWERED = ("cancel", "window")
_OWNER_REASONS = ("killed", "closed", "ttl", "oom", "node-lost", "lease", "start", "protocol")
_MOST_PARKED = 64 << 20  # bytes of frames that wait while a sandbox is saved
_PARKED_S = 0.05
_MORE_BYTES = 4096  # of a command's output than is kept: the line that says how much is not


class ProcessSandbox:
    """A sandbox, of whatever backend; made by the pool's `create`.

    Args:
      sandbox_id, template: unique on this host; as given to create.
      streams: reader and writer of the agent's socket.
      keeper: who made it, and can do what its agent cannot.
      paused: it stands still when it begins.
      first_id: of its requests; whole ranges belong to one client each (see daemon/hub.py).

    Attributes:
      foreign: takes what is for clients of other ranges.
      ranges: of ids that are taken, this client's among them.
      pauses: of the sandbox.
      control_s: seconds that the answer to a pause may take where it cannot be seen why it does.
      is_owner: of its agent; else others may have it paused, unseen from here.
    """

    def __init__(
        self,
        sandbox_id: str,
        template: Template,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        keeper: Keeper,
        first_id: int = 0,
        paused: bool = False,
    ):
        self.id = sandbox_id
        self.template = template
        self._reader, self._writer = streams
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._lost: str | None = None
        self._lost_event = asyncio.Event()
        self._mourners: list[Callable[[str], None]] = []
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._waiting: dict[int, tuple[str, asyncio.Future[tuple[dict, bytes]]]] = {}  # what was asked
        self._processes: dict[int, list[RemoteProcess]] = {}
        self._beginning: dict[int, RemoteProcess] = {}  # by the request that starts or connects it
        self._watches: dict[int, asyncio.Queue[FileChange | None]] = {}
        self._last_id = first_id
        self._range = first_id // RANGE
        self.ranges = self._range + 1
        self.foreign: Callable[[dict, bytes], None] = lambda header, body: None
        self._parked: list[bytes] | None = None  # frames that wait while nobody takes them
        self.pauses = Pauses(paused)
        self.control_s: float | None = None
        self.is_owner = True
        self._may_pause = 0  # pauses that its agent may still tell of
        self._receiver = self._loop.create_task(self._receive())

    def is_ready(self) -> None:
        """Its agent has said so to another: it is a clone."""
        if not self._ready.done():
            self._ready.set_result(None)

    async def open(self, files: Mapping[str, bytes]) -> None:
        """Waits until the sandbox is set up, and writes its first files.

        Raises:
          SandboxUnsupported: the host refused a step of the set-up.
          SandboxLost: it is gone before that; after Template.start_s seconds with the reason "start".
        """
        try:
            async with asyncio.timeout(self.template.start_s):
                await self._ready
                await asyncio.gather(*(self.write(path, data) for path, data in files.items()))
        except TimeoutError:
            self.mark_lost("start")
            raise SandboxLost(self.id, "start") from None

    # The contract

    async def exec(
        self,
        script: str | bytes,
        *,
        timeout_s: float = 30.0,
        silent_s: float | None = None,
        user: str = "",
        cwd: str | None = None,
        user_env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See Sandbox.exec."""
        header, raw = command("exec", script, timeout_s, silent_s, user, cwd, user_env)
        header |= {"stdin": "bytes", "pty": None, "merged": True, "window": None}
        body = raw + bounds.data("exec stdin", stdin, bounds.MOST_BODY - len(raw))
        await self._until_running()
        request_id, future = self._send(header, body)
        try:
            answer, output = await self._answer(future, header["timeout_s"] + _GRACE_S, cwd)
        except asyncio.CancelledError:
            if self._lost is None:
                self._send({"op": "cancel", "job": request_id})
            raise
        return exec_result(answer, output)

    async def start(
        self,
        script: str | bytes,
        *,
        timeout_s: float | None = None,
        silent_s: float | None = None,
        user: str = "",
        cwd: str | None = None,
        user_env: Mapping[str, str] | None = None,
        stdin: bytes | None = b"",
        pty: tuple[int, int] | None = None,
        follow: bool = True,
    ) -> RemoteProcess:
        """See Sandbox.start."""
        header, raw = command("start", script, timeout_s, silent_s, user, cwd, user_env)
        if pty is not None:
            pty = check_size(pty)
            if stdin:
                raise ConfigError("start stdin with pty: a terminal's input comes by Process.send")
            header["env"] = {"TERM": "xterm-256color", **header["env"]}
        header |= {"stdin": "pipe" if stdin is None else "bytes", "pty": None if pty is None else list(pty)}
        header |= {"merged": False, "window": WINDOW_BYTES if follow else None}
        body = raw + bounds.data("start stdin", b"" if stdin is None else stdin, bounds.MOST_BODY - len(raw))
        return await self._process(header, body, None, follow)

    async def processes(self) -> list[ProcessInfo]:
        """See Sandbox.processes."""
        answer, _ = await self._request({"op": "processes"}, "")
        return [ProcessInfo(*row) for row in answer["processes"]]

    async def connect(self, process: int) -> RemoteProcess:
        """See Sandbox.connect."""
        process = bounds.whole("connect process", "process", process)
        return await self._process({"op": "connect", "job": process, "window": WINDOW_BYTES}, b"", process, True)

    async def read(self, path: str, max_bytes: int = 16 * MIB) -> bytes:
        """See Sandbox.read."""
        max_bytes = bounds.whole("read max_bytes", "max_bytes", max_bytes)
        parts: list[bytes] = []
        size = 0
        while True:
            header = {"op": "read", "path": path, "offset": size, "max_bytes": max_bytes}
            _, data = await self._request(header, path)
            size += len(data)
            if size > max_bytes:
                raise OSError(errno.EFBIG, f"more than max_bytes={max_bytes}", path)
            parts.append(data)
            if len(data) < CHUNK_BYTES:
                return b"".join(parts)

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """See Sandbox.write."""
        mode = mode if mode is None else bounds.whole("write mode", "mode", mode)
        data = bounds.data("write data", data)
        if len(data) > self.template.file_bytes:
            raise OSError(errno.EFBIG, f"{len(data)} bytes, but file_bytes={self.template.file_bytes}", path)
        for offset in range(0, max(len(data), 1), CHUNK_BYTES):
            header = {"op": "write", "path": path, "offset": offset, "mode": mode}
            await self._request(header, path, data[offset : offset + CHUNK_BYTES])

    async def stat(self, path: str) -> FileInfo:
        """See Sandbox.stat."""
        answer, _ = await self._request({"op": "stat", "path": path}, path)
        return FileInfo(*answer["entry"])

    async def watch(self, path: str) -> AsyncIterator[FileChange]:
        """See Sandbox.watch."""
        if not isinstance(path, str) or "\0" in path or len(path) > bounds.MOST_PATH:
            raise OSError(errno.EINVAL, "no path", bounds.shown(path))
        await self._until_running()
        request_id, future = self._send({"op": "watch", "path": path})
        changes = self._watches[request_id] = asyncio.Queue()
        try:
            await self._answer(future, _GRACE_S, path)
            while (change := await changes.get()) is not None:
                yield change
            self._check_alive()
        finally:
            del self._watches[request_id]
            if self._lost is None:
                self._send({"op": "unwatch", "watch": request_id})

    async def list(self, path: str) -> list[FileInfo]:
        """See Sandbox.list."""
        answer, _ = await self._request({"op": "list", "path": path}, path)
        return [FileInfo(*entry) for entry in answer["entries"]]

    async def pause(self) -> None:
        """See Sandbox.pause. Calls made while paused wait for resume."""
        self._check_alive()
        self.pauses.note(True)
        self.pauses.asked = True
        self._may_pause += 1
        await self._control("pause")

    async def resume(self) -> None:
        """See Sandbox.resume."""
        self.pauses.asked = False
        await self._control("resume")
        if not self.pauses.asked:
            self.pauses.note(False)

    def resume_soon(self) -> None:
        """Without a word of the agent's, which may have no memory to say one."""
        self.pauses.asked = False
        self._tell({"op": "resume"})

    async def snapshot(self) -> str:
        """See Sandbox.snapshot."""
        self._check_alive()
        return await self._keeper.snapshot(self)

    async def fork(self) -> ProcessSandbox:
        """See Sandbox.fork."""
        self._check_alive()
        return await self._keeper.fork(self)

    async def park(self, stays: bool = False) -> str:
        """Stops it, and lets go of the agent, which waits under the name that is returned; or `stays` where it is,
        and says nothing more until `unpark`. For who saves it."""
        self._check_alive()
        self.pauses.note(True)
        self._may_pause += 1
        _, future = self._send({"op": "park", "stays": stays}, b"")
        self._parked = []
        try:
            answer, _ = await self._answer(future, None)
        except OSError:
            self._writer.write(b"".join(self._parked))
            self._parked = None
            raise
        if stays:
            return ""
        await asyncio.wait({self._receiver})
        self._check_alive()
        berth = answer.get("berth")
        if not isinstance(berth, str):
            self.mark_lost("protocol")
            raise SandboxLost(self.id, "protocol")
        return berth

    def rehome(self, keeper: Keeper, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """It is elsewhere now, and goes on. Other clients of it speak for themselves there."""
        self._keeper = keeper
        self._parked = [frame for frame in self._parked if unpack(frame)[0].get("id", 0) // RANGE == self._range]
        self.unpark(streams)

    def rekeep(self, keeper: Keeper) -> None:
        """It is elsewhere now, with the same streams."""
        self._keeper = keeper

    @property
    def is_parked(self) -> bool:
        """It stands still, and its agent is nobody's."""
        return self._parked is not None

    def interests(self, others: dict) -> dict:
        """Who is told of what (see daemon/hub.py), this client among them."""
        mine = [self._range]
        jobs = {job: [*others.get("jobs", {}).get(job, []), *mine] for job in self._processes}
        watches = others.get("watches", {}) | dict.fromkeys(self._watches, self._range)
        clients = [*others.get("clients", []), *mine]
        return {"jobs": others.get("jobs", {}) | jobs, "watches": watches, "clients": clients}

    @property
    def first_id(self) -> int:
        """Of this client's range."""
        return self._range * RANGE

    @property
    def waits(self) -> bool:
        """A request of this client has not been answered."""
        return bool(self._waiting)

    def unpark(self, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], stayed: bool = False) -> None:
        """The agent again, still paused."""
        if self._lost is not None:
            streams[1].close()
            return
        if streams != (self._reader, self._writer):
            self._receiver.cancel()
            self._writer.close()
            self._reader, self._writer = streams
        if stayed:
            self.wake(is_new=False)
        for frame in self._parked:  # one at a time: each is a message where it goes over a web socket
            self._writer.write(frame)
        self._parked = None
        if self._receiver.done() or self._receiver.cancelling():
            self._receiver = self._loop.create_task(self._receive())

    def wake(self, is_new: bool) -> None:
        """Tells an agent that stays where it is that it has its owner again, or a new one."""
        self._writer.write(pack({"op": "unpark", "new": is_new, "id": 0}, b""))

    async def migrate(self, node: str) -> None:
        """See Sandbox.migrate."""
        self._check_alive()
        await self._keeper.migrate(self, node)

    async def kill(self, reason: str = "killed") -> None:
        """See Sandbox.kill."""
        if reason not in _OWNER_REASONS:
            raise ConfigError(f"kill reason={bounds.shown(reason)}: use one of {', '.join(_OWNER_REASONS)}")
        self.mark_lost(reason)
        await self._keeper.end(self.id, reason)

    # Life and death

    @property
    def lost(self) -> str | None:
        """Why the sandbox is gone; None while it lives."""
        return self._lost

    @property
    def paused(self) -> bool:
        return self.pauses.now

    def when_lost(self, mourner: Callable[[str], None]) -> Callable[[], None]:
        """Calls with the reason when it is gone, at once where it is; what is returned takes that back."""
        self._mourners.append(mourner)
        if self._lost is not None:
            mourner(self._lost)
        return lambda: self._mourners.remove(mourner)

    def mark_lost(self, reason: str) -> None:
        """The sandbox is gone, or as good as gone. The first reason stands; every call in flight fails now."""
        if self._lost is not None:
            return
        self._lost = reason
        self._lost_event.set()
        self.pauses.end()
        if not self._ready.done():
            self._ready.set_exception(SandboxLost(self.id, reason))
            self._ready.exception()  # seen: start() may never be awaited
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxLost(self.id, reason))
                future.exception()  # seen: its caller may have been cancelled
        for process in [process for group in self._processes.values() for process in group]:
            process.ended(SandboxLost(self.id, reason))
        for changes in self._watches.values():
            changes.put_nowait(None)
        for mourner in list(self._mourners):
            mourner(reason)
        self._writer.close()
        if asyncio.current_task() is not self._receiver:
            self._receiver.cancel()

    async def mourn(self) -> None:
        """Its agent is gone. The spawner knows why, and says so next, unless it died itself."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._lost_event.wait(), _REASON_WAIT_S)
        self.mark_lost("node-lost")

    def pass_on(self, header: dict, body: bytes = b"") -> None:
        """A request of a client of another range, as it is; what comes of it goes to `foreign`."""
        self._check_alive()
        if header.get("op") in ("pause", "resume"):
            self.pauses.asked = header["op"] == "pause"
            self._may_pause += header["op"] == "pause"
        self._write(pack(header, body))

    async def drain(self) -> None:
        """Returns when what was passed on is on its way: its agent takes it, or it has stood still for long."""
        if self._parked is None:
            with suppress(ConnectionError):
                await self._writer.drain()
        while self._parked is not None and sum(map(len, self._parked)) > _MOST_PARKED:
            await asyncio.sleep(_PARKED_S)

    def _write(self, frame: bytes) -> None:
        if self._parked is not None:
            self._parked.append(frame)
        else:
            self._writer.write(frame)

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise SandboxLost(self.id, self._lost)

    async def _until_running(self) -> None:
        self._check_alive()
        await self.pauses.over()
        self._check_alive()

    # Requests

    async def _process(self, header: dict, body: bytes, job: int | None, follow: bool) -> RemoteProcess:
        """The process that a request starts or connects; what the agent tells of it may follow the answer at once."""
        await self._until_running()
        request_id, future = self._send(header, body)
        process = RemoteProcess(job or request_id, self._ask, self._tell, follow)
        group = self._processes.setdefault(process.id, [])
        for earlier in group:
            earlier.unfollow()
        group.append(process)
        self._beginning[request_id] = process
        try:
            await self._answer(future, _GRACE_S, header.get("cwd"))
        except BaseException:
            self._beginning.pop(request_id, None)
            group.remove(process)
            if not group:
                self._processes.pop(process.id, None)
            self._tell({"op": "cancel", "job": request_id} if job is None else unfollowed(job))
            raise
        return process

    async def _ask(self, header: dict, body: bytes) -> tuple[dict, bytes]:
        await self._until_running()
        _, future = self._send(header, body)
        return await self._answer(future, None)

    def _tell(self, header: dict) -> None:
        if self._lost is None:
            self._send(header)

    async def _request(self, header: dict, path: str, body: bytes = b"") -> tuple[dict, bytes]:
        if not isinstance(path, str):
            raise ConfigError(f"path={bounds.shown(path)}: give text")
        await self._until_running()
        if "\0" in path:
            raise OSError(errno.EINVAL, "NUL in path", path)
        if len(path) > bounds.MOST_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), f"{path[:80]}...")
        _, future = self._send(header, body)
        return await self._answer(future, _GRACE_S, path)

    async def _control(self, op: str) -> None:
        """Answered at once, paused or not, by an agent that is well, and after it has been saved."""
        self._check_alive()
        _, future = self._send({"op": op}, b"")
        while not future.done():
            is_parked = self._parked is not None  # then it goes out, or has, once it is saved
            await asyncio.wait({future}, timeout=self.control_s or self._patient(_GRACE_S))
            if not (future.done() or is_parked or self._parked is not None):
                self.mark_lost("node-lost")
                await self._keeper.end(self.id, "node-lost")
        await self._answer(future, 0.0)

    def _patient(self, seconds: float | None) -> float:
        """An agent may wait for memory, too; the spawner sees to it that this ends. None: for ever."""
        waits = self.template.oom_wait_s if self.template.oom == "hold" else 0.0
        return math.inf if seconds is None else seconds + waits

    def _send(self, header: dict, body: bytes = b"") -> tuple[int, asyncio.Future]:
        """Queues one frame whole, so that a cancelled caller cannot leave half of one."""
        self._check_alive()
        self._last_id += 1
        frame = pack({**header, "id": self._last_id}, body)
        future: asyncio.Future[tuple[dict, bytes]] = self._loop.create_future()
        if header["op"] not in _UNANSWERED:
            self._waiting[self._last_id] = header["op"], future
        self._write(frame)
        return self._last_id, future

    async def _answer(
        self, future: asyncio.Future, patience_s: float | None, path: str | None = None
    ) -> tuple[dict, bytes]:
        """The answer, or SandboxLost. `patience_s` bounds the wait, not counting time paused; None: nothing does."""
        give_up = self._loop.time() + self._patient(patience_s) - self.pauses.seconds
        while not future.done():
            left = give_up + self.pauses.seconds - self._loop.time()
            if left <= 0 and not self.pauses.now:
                self.mark_lost("node-lost")
                await self._keeper.end(self.id, "node-lost")
                break
            await asyncio.wait({future}, timeout=None if left == math.inf else max(left, 1.0))
        answer, body = future.result()
        if "errno" in answer:
            raise OSError(answer["errno"], os.strerror(answer["errno"]), path)
        return answer, body

    async def _receive(self) -> None:
        most_body = max(CHUNK_BYTES, self.template.output_bytes + _MORE_BYTES)
        try:
            while True:
                header, body = await read_frame(self._reader, most_body)
                check_said(header)
                self._hear(header, body)
        except WireError as error:
            logging.warning("sandbox %s: its agent sent %s; it is ended", self.id, error)
            self.mark_lost("protocol")
            with suppress(SandboxError):
                await self._keeper.end(self.id, "protocol")
            return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        if self._parked is None:
            await self.mourn()

    def _hear(self, answer: dict, body: bytes) -> None:
        """A frame of the agent's. WireError where that cannot be said now."""
        if "setup_error" in answer:
            if self._ready.done():
                raise WireError("the error of a set-up that was over")
            self._ready.set_exception(SandboxUnsupported(f"cannot make a sandbox: {answer['setup_error']}"))
            return
        if "ready" in answer:
            self.is_ready()
            return
        if "paused" in answer:
            if answer["paused"] and self.is_owner:
                if not self._may_pause:
                    raise WireError("a pause that nobody has asked for")
                self._may_pause -= 1
            self.pauses.note(answer["paused"])
            self.foreign(answer, body)
            return
        number = answer.get("id", answer.get("job", answer.get("watch", 0)))
        if number // RANGE != self._range and number not in self._processes:
            self.foreign(answer, body)
            return
        if "id" not in answer:
            self._told(answer, body)
            return
        asked = self._waiting.pop(answer["id"], None)
        if asked is None:
            return  # nobody has asked that, or it has been answered
        op, future = asked
        try:
            check_answer(op, answer)
        except WireError:
            self._waiting[answer["id"]] = asked  # it ends with the others
            raise
        process = self._beginning.pop(answer["id"], None)
        if process is not None and "errno" not in answer:
            process.began(answer["pid"], body)
        if not future.done():
            future.set_result((answer, body))

    def _told(self, message: dict, body: bytes) -> None:
        """Of a process, or of a watched path."""
        if "watch" in message:
            if message["watch"] in self._watches:
                add_changes(self._watches[message["watch"]], message["events"])
        elif "stream" in message:
            for process in self._processes.get(message["job"], ()):
                process.came(message["stream"], body)
        elif "exit_code" in message:
            for process in self._processes.pop(message["job"], ()):
                process.ended(exec_result(message, body))

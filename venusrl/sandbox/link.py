"""The owner's side of one spawner process: starts it, asks it for sandboxes, hears of their end."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from venusrl.core.errors import SandboxError, SandboxLost, SandboxUnsupported
from venusrl.sandbox.spawner import limits
from venusrl.sandbox.spawner.spawner import PACKET_BYTES

_START_WAIT_S = 30.0
_END_WAIT_S = 15.0
# -I and -S: no user site, no environment, no .pth files; the import path is then the standard library and ours.
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from venusrl.sandbox.spawner.spawner import main; main(sys.argv[1:])"
)


class SpawnerLink:
    """One spawner. Make it with `await SpawnerLink.open(...)`.

    Attributes:
      report: {"mode": "range" | "single", "cgroups": Cgroups.report, "seccomp": bool}.
      process_id: pid of the spawner.
      agent_pids: of the sandboxes' first processes, by sandbox.
      closed: set when the spawner is gone.
    """

    def __init__(
        self,
        process: subprocess.Popen,
        control: socket.socket,
        on_gone: Callable[[str, str], None],
        on_pressure: Callable[[str], None],
    ):
        self._process = process
        self._control = control
        self._on_gone = on_gone
        self._on_pressure = on_pressure
        self._asking: dict[int, tuple[str, asyncio.Future[socket.socket | None]]] = {}
        self._asked_count = 0
        self._loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[dict] = self._loop.create_future()
        self._creating: dict[str, tuple[str, asyncio.Future[socket.socket | None]]] = {}
        self._ending: dict[str, asyncio.Event] = {}
        self._sending, self._closing = asyncio.Lock(), asyncio.Lock()
        self._collected = False
        self._tasks: set[asyncio.Task] = set()
        self._usage: dict[str, tuple[int, int]] = {}
        self._measuring: asyncio.Future[dict[str, tuple[int, int]]] | None = None
        self.process_id = process.pid
        self.agent_pids: dict[str, int] = {}
        self.report: dict = {}
        self.closed = asyncio.Event()
        self._loop.add_reader(control.fileno(), self._receive)

    @classmethod
    async def open(
        cls,
        on_gone: Callable[[str, str], None],
        on_pressure: Callable[[str], None],
        python_prefix: str | None,
        agent: str | None = None,
    ) -> SpawnerLink:
        """Starts a spawner.

        Args:
          on_gone: called with (sandbox id, reason) when a sandbox has ended.
          on_pressure: called with its id when a sandbox stands still for want of memory.
          python_prefix: directory to show in sandboxes at /opt/python, or None.
          agent: path of the agent's program; None: the Python one.

        Raises:
          SandboxUnsupported: not Linux, or the spawner did not come up.
        """
        if sys.platform != "linux":
            raise SandboxUnsupported(f"the process backend needs Linux >= 5.14, this is {sys.platform}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            root = str(Path(__file__).resolve().parents[2])
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, root, str(theirs.fileno()), python_prefix or "", agent or ""],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.setblocking(False)
        link = cls(process, ours, on_gone, on_pressure)
        done, _ = await asyncio.wait({link._hello}, timeout=_START_WAIT_S)
        if not done or link._hello.exception() is not None:
            await link.close()
            raise SandboxUnsupported(f"the spawner (pid {process.pid}) did not come up; see its error output above")
        link.report = link._hello.result()
        return link

    async def create(self, sandbox_id: str, request: dict, op: str = "create") -> socket.socket | None:
        """The agent's socket of a sandbox that is new, or restored (op "restore"); None where its agent is to wait.

        Raises:
          SandboxUnsupported: the host refuses.
          SandboxError: the sandbox cannot be restored; SandboxLost: the spawner died.
        """
        future: asyncio.Future[socket.socket | None] = self._loop.create_future()
        self._creating[sandbox_id] = (op, future)
        self._ending[sandbox_id] = asyncio.Event()
        try:
            await self._tell({"op": op, "id": sandbox_id, **request})
        except SandboxError:
            self._creating.pop(sandbox_id, None)
            self._ending.pop(sandbox_id, None)
            raise
        return await future

    async def usage(self) -> dict[str, tuple[int, int]]:
        """(bytes charged, of them the kernel's) by sandbox and holder; empty where no cgroup counts them.

        Raises:
          SandboxError: the spawner is gone.
        """
        if self._measuring is None:
            self._measuring = self._loop.create_future()
            self._tasks.add(task := self._loop.create_task(self._tell({"op": "usage"})))
            task.add_done_callback(self._asked)
        return await asyncio.shield(self._measuring)

    def _asked(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._measuring is not None:
            self._measuring.set_exception(task.exception())
            self._measuring.exception()  # seen: who asked may have been cancelled
            self._measuring = None

    async def resize(self, sandbox_id: str, memory_bytes: int, lent: int | None = None) -> None:
        """Another limit of memory, or so much lent above it to one whose commands stop for it; 0: no more.

        Raises:
          SandboxError: the kernel refuses, or the sandbox or the spawner is gone.
        """
        fields = {"op": "resize", "memory_bytes": memory_bytes, "lent": lent}
        await self._ask(sandbox_id, "cannot have another limit of memory", **fields)

    async def save(self, sandbox_id: str, folder: str, criu: str, ghost_bytes: int) -> None:
        """Saves a sandbox that is parked. SandboxError with the reason where that fails."""
        await self._ask(sandbox_id, "cannot be saved", op="save", folder=folder, criu=criu, ghost_bytes=ghost_bytes)

    async def meet(self, sandbox_id: str, berth: str) -> socket.socket:
        """The socket of an agent that is parked. SandboxError where it is gone."""
        return await self._ask(sandbox_id, "is not where it was", op="meet", berth=berth)

    async def _ask(self, sandbox_id: str, what: str, **fields) -> socket.socket | None:
        """The socket that the answer comes with; SandboxError `what` where it cannot be."""
        future: asyncio.Future[socket.socket | None] = self._loop.create_future()
        self._asked_count += 1
        self._asking[self._asked_count] = (f"sandbox {sandbox_id} {what}", future)
        await self._tell({"id": sandbox_id, "request": self._asked_count, **fields})
        return await future

    async def end(self, sandbox_id: str, reason: str) -> None:
        """Kills a sandbox; returns when its processes are gone. Nothing happens if they are already."""
        gone = self._ending.get(sandbox_id)
        if gone is None or self.closed.is_set():
            return
        with suppress(SandboxError):
            await self._tell({"op": "kill", "id": sandbox_id, "reason": reason})
        try:
            await asyncio.wait_for(gone.wait(), _END_WAIT_S)
        except TimeoutError:
            raise SandboxError(f"sandbox {sandbox_id} did not end within {_END_WAIT_S} s of SIGKILL") from None

    async def close(self) -> None:
        """Ends the spawner and every sandbox of it."""
        self._shut()
        async with self._closing:
            await self._collect()

    async def _collect(self) -> None:
        if self._collected:
            return
        try:
            await self._loop.run_in_executor(None, self._process.wait, _END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await self._loop.run_in_executor(None, self._process.wait)
        if self._process.returncode != 0:  # it could not clean up behind itself
            await self._loop.run_in_executor(None, limits.reap, Path("/proc/self/mountinfo").read_text())
        self._collected = True

    async def _tell(self, message: dict) -> None:
        data = json.dumps(message).encode()
        if len(data) > PACKET_BYTES:
            raise SandboxError(f"a request of {len(data)} bytes is over {PACKET_BYTES}: make Template.env smaller")
        if self.closed.is_set():
            raise SandboxError("the spawner is gone")
        try:
            # One at a time: of several that wait for room, the loop would finish the last only.
            async with self._sending:
                await self._loop.sock_sendall(self._control, data)
        except OSError as error:
            raise SandboxError(f"the spawner is gone ({error})") from error

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self._shut()
            return
        message = json.loads(data)
        event, sandbox_id = message["event"], message.get("id", "")
        if event == "hello":
            self._hello.set_result({key: message[key] for key in ("mode", "cgroups", "seccomp")})
        elif event == "gone":
            self._forget(sandbox_id, message["reason"])
        elif event == "pressure":
            self._on_pressure(sandbox_id)
        elif event == "done":
            self._answer(message, fds)
        elif event == "usage":
            self._usage |= {name: (charged, kernel) for name, charged, kernel in message["rows"]}
            if message["last"]:
                self._measuring.set_result(self._usage)
                self._usage, self._measuring = {}, None
        else:
            self._answer_create(sandbox_id, message, fds)

    def _answer(self, message: dict, fds: list[int]) -> None:
        what, future = self._asking.pop(message["request"])
        agent = _socket(fds)
        if future.done():
            if agent is not None:
                agent.close()
        elif message["error"] is not None:
            future.set_exception(SandboxError(f"{what}: {message['error']}"))
        else:
            future.set_result(agent)

    def _answer_create(self, sandbox_id: str, message: dict, fds: list[int]) -> None:
        op, future = self._creating.pop(sandbox_id)
        if message["event"] == "refused":
            self._ending.pop(sandbox_id).set()
            if not future.done():
                error = message["error"]
                restoring = SandboxError(f"the sandbox cannot be restored: {error}")
                future.set_exception(
                    restoring if op == "restore" else SandboxUnsupported(f"cannot make a sandbox: {error}")
                )
            return
        self.agent_pids[sandbox_id] = message["pid"]
        agent = _socket(fds)
        if not future.done():
            future.set_result(agent)
        elif agent is not None:
            agent.close()  # the caller was cancelled; the closed socket ends the agent

    def _forget(self, sandbox_id: str, reason: str) -> None:
        self.agent_pids.pop(sandbox_id, None)
        self._on_gone(sandbox_id, reason)
        gone = self._ending.pop(sandbox_id, None)
        if gone is not None:
            gone.set()

    def _shut(self) -> None:
        """The spawner is gone, or is told to go by closing the socket. Its sandboxes die with it."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._loop.remove_reader(self._control.fileno())
        self._control.close()
        if not self._hello.done():
            self._hello.set_exception(SandboxError("the spawner died at its start"))
        for sandbox_id, (_, future) in self._creating.items():
            if not future.done():
                future.set_exception(SandboxLost(sandbox_id, "node-lost"))
        self._creating.clear()
        for _, future in self._asking.values():
            if not future.done():
                future.set_exception(SandboxError("the spawner is gone"))
                future.exception()  # seen: who asked may have been cancelled
        self._asking.clear()
        if self._measuring is not None and not self._measuring.done():
            self._measuring.set_exception(SandboxError("the spawner is gone"))
            self._measuring.exception()  # seen: who asked may have been cancelled
        for sandbox_id in list(self._ending):
            self._forget(sandbox_id, "node-lost")
        # Collects it, and what it could not end: a sandbox that was being restored.
        self._tasks.add(task := self._loop.create_task(self.close()))
        task.add_done_callback(self._tasks.discard)


def _socket(fds: list[int]) -> socket.socket | None:
    """What came with a message."""
    if not fds:
        return None
    agent = socket.socket(fileno=fds[0])
    agent.setblocking(False)
    return agent

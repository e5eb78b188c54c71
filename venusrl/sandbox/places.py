"""Who has a place among the sandboxes of one owner, and what is known of each: what every kind of pool has."""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from venusrl.core.errors import ConfigError, SandboxCapacity, SandboxError
from venusrl.sandbox.accounting import History
from venusrl.sandbox.client import ProcessSandbox
from venusrl.sandbox.contract import WORKSPACE, Template
from venusrl.sandbox.gate import Gate

HISTORY_S = 60.0  # of memory that is remembered of a sandbox


@dataclass(frozen=True)
class PoolStats:
    """A pool's state: sandboxes alive, callers waiting, sandboxes created, ends by reason, spawners started."""

    alive: int
    waiting: int
    created: int
    ended: dict[str, int] = field(default_factory=dict)
    spawners: int = 0


class Places(ABC):
    """At most `max_sandboxes` at once; belongs to one event loop; use `async with`.

    Args:
      max_sandboxes: sandboxes alive at once; further create calls wait in order of arrival.
      wait_s: seconds a create call waits for a place before SandboxCapacity.
    """

    def __init__(self, *, max_sandboxes: int, wait_s: float = 60.0):
        if max_sandboxes < 1:
            raise ConfigError(f"{type(self).__name__}.max_sandboxes={max_sandboxes}: give at least 1")
        if not wait_s >= 0:
            raise ConfigError(f"{type(self).__name__}.wait_s={wait_s}: give seconds, 0 or more")
        self._wait_s = wait_s
        self._gate = Gate(max_sandboxes)
        self._alive: dict[str, ProcessSandbox | None] = {}
        self._ends: dict[str, float] = {}  # when they are to end, by the loop's time
        self._histories: dict[str, History] = {}
        self._created = 0
        self._spawners = 0
        self._ended: Counter[str] = Counter()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    @abstractmethod
    async def open(self) -> None:
        """Finds out what the host has. SandboxUnsupported where it cannot make sandboxes."""

    @abstractmethod
    async def close(self) -> None:
        """Ends every sandbox with reason "closed". Idempotent."""

    @abstractmethod
    async def end(self, sandbox_id: str, reason: str) -> None:
        """Kills one for a reason; when it returns, its processes are gone."""

    @property
    def alive(self) -> int:
        """Sandboxes that exist or are being made or ended."""
        return len(self._alive)

    def stats(self) -> PoolStats:
        """Counts since the pool was made."""
        return PoolStats(self.alive, self._gate.waiting, self._created, dict(self._ended), self._spawners)

    def growth(self, sandbox_id: str, window_s: float) -> int:
        """Bytes by which a sandbox's private memory grew in the last seconds, as far as `usage` was asked meanwhile."""
        history = self._histories.get(sandbox_id)
        return 0 if history is None else history.growth(window_s)

    def _remember(self, sandbox_id: str, private: int) -> None:
        now = asyncio.get_running_loop().time()
        self._histories.setdefault(sandbox_id, History(HISTORY_S)).add(now, private)

    async def _enter(self, template: Template, sandbox_id: str | None = None, wait_s: float | None = None) -> str:
        """Takes a place for one, and returns its id."""
        if self._closed:
            raise SandboxError("the pool is closed")
        wait_s = self._wait_s if wait_s is None else wait_s
        try:
            await self._gate.enter(wait_s)
        except TimeoutError:
            raise SandboxCapacity(
                f"no place for {template.name!r} within wait_s={wait_s}: {self.alive} sandboxes alive; "
                "kill some, wait, or raise max_sandboxes"
            ) from None
        self._created += 1
        sandbox_id = sandbox_id or f"sb-{secrets.token_hex(6)}"
        self._alive[sandbox_id] = None
        return sandbox_id

    def _leave(self, sandbox_id: str, reason: str) -> bool:
        """It is gone, and its place is another's. False: it was gone already."""
        if sandbox_id not in self._alive:
            return False
        sandbox = self._alive.pop(sandbox_id)
        self._histories.pop(sandbox_id, None)
        self._ends.pop(sandbox_id, None)
        if sandbox is not None:
            sandbox.mark_lost(reason)
            reason = sandbox.lost or reason
        self._ended[reason] += 1
        self._gate.leave()
        return True


async def set_up(sandbox: ProcessSandbox, template: Template, commands: tuple[str, ...]) -> None:
    """Runs commands of a template's set-up. SandboxError where one fails."""
    for command in commands:
        result = await sandbox.exec(command, timeout_s=template.setup_s)
        if result.exit_code != 0:
            why = "took too long" if result.timed_out else f"ended with {result.exit_code}"
            raise SandboxError(f"template {template.name!r}: {command!r} {why}: {result.text[-2000:].strip()}")


def variables(template: Template, path: str) -> dict[str, str]:
    """What every command of the template's sandboxes sees; `path` is where its programs are."""
    return {
        "PATH": path,
        "HOME": WORKSPACE,
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        **template.env,
    }

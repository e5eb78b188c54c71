"""What a sandbox asks of whoever made it, since its own agent cannot do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from venusrl.sandbox.client import ProcessSandbox


class Keeper(Protocol):
    """Who made a sandbox: a pool, or a daemon far away."""

    async def end(self, sandbox_id: str, reason: str) -> None:
        """Kills the sandbox for a reason, and returns when its processes are gone."""

    async def snapshot(self, sandbox: ProcessSandbox) -> str:
        """See Sandbox.snapshot."""

    async def fork(self, sandbox: ProcessSandbox) -> ProcessSandbox:
        """See Sandbox.fork."""

    async def migrate(self, sandbox: ProcessSandbox, node: str) -> None:
        """See Sandbox.migrate."""

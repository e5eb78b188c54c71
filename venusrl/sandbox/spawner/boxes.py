"""What a spawner knows of each of its sandboxes, and of the processes that help it."""

import os
from collections.abc import Callable

from venusrl.sandbox.spawner import limits


class Box:
    """One sandbox as the spawner sees it."""

    def __init__(self, box_id: str, pid: int, group: limits.Group, expires: float):
        self.id = box_id
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.group = group
        self.expires = expires
        self.oom_event = -1  # tells that it waits for memory
        self.oom_wait_s = 0.0
        self.gives_up: float | None = None  # when it ends for want of memory
        self.reason: str | None = None


class Helper:
    """A process that saves or restores a sandbox; `then` is called with its exit code."""

    def __init__(self, pid: int, sandbox_id: str, group: limits.Group, restores: bool, then: Callable[[int], None]):
        self.pid = pid
        self.group = group
        self.pidfd = os.pidfd_open(pid)
        self.sandbox_id = sandbox_id
        self.then = then
        self.restores = restores
        self.killed = False

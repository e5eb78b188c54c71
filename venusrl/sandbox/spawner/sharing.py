"""Keeps a processor free for short commands, whatever the other sandboxes do.

A process that wakes up where another has been running may wait for the kernel's next tick, 4 ms where there are 250 a
second, however small its part of the processors was: so beside one sandbox that kept a processor busy, the p99 of
another's commands was three to six times as long. What helped was neither shares, nor idle groups, nor short slices,
but a processor that is free. So a sandbox that has been busy for a moment is confined to the others, until it is calm.
"""

import os
import time
from collections.abc import Iterable

from venusrl.sandbox.spawner.limits import Group

LOOK_S = 0.1
HEAVY, LIGHT = 0.7, 0.3  # of a processor: from here on it is confined; below this it is calm
CALM_S = 1.0  # that it has to be, to be let go
_KEEP = 16  # one processor in so many is kept free, and at least one
_MOST_LOOKING = 0.05  # of the time goes into it
_TICKS = os.sysconf("SC_CLK_TCK")

Row = tuple[str, int, Group]  # a sandbox's id, its agent's pid, its groups


class Sharing:
    """Of the processors that this process may use."""

    def __init__(self):
        cpus = sorted(os.sched_getaffinity(0))
        self._all = set(cpus)
        self._confined = set(cpus[max(1, len(cpus) // _KEEP) :])
        self._next = 0.0
        self._idle = (0.0, 0.0)  # when it was asked, and seconds that processors had been idle
        self._used: dict[str, tuple[float, float]] = {}  # by sandbox: when it was asked, and seconds used
        self.heavy: dict[str, float] = {}  # those that are confined, and until when

    @property
    def due(self) -> float | None:
        """When to look next, by time.monotonic(); None: never, there is one processor."""
        return self._next if self._confined else None

    def look(self, rows: Iterable[Row]) -> None:
        """Confines who is heavy, and lets go who is calm."""
        now = time.monotonic()
        if not self._confined or now < self._next:
            return
        before, self._idle = self._idle, (now, _idle_s(self._all))
        passed = now - before[0]
        busy = len(self._all) - (self._idle[1] - before[1]) / passed
        if busy < LIGHT and not self.heavy:
            self._used.clear()
            self._next = now + LOOK_S
            return
        self._look(list(rows), now)
        self._next = now + max(LOOK_S, (time.monotonic() - now) / _MOST_LOOKING)

    def _look(self, rows: list[Row], now: float) -> None:
        before, self._used = self._used, {}
        for name, agent, group in rows:
            processes = group.processes()
            used = sum(map(_used_s, processes))
            self._used[name] = (now, used)
            if name not in before:
                continue
            share = (used - before[name][1]) / (now - before[name][0])
            if share >= HEAVY or (name in self.heavy and share >= LIGHT):
                self.heavy[name] = now + CALM_S
            if name in self.heavy:
                is_calm = now >= self.heavy[name]
                _allow([pid for pid in processes if pid != agent], self._all if is_calm else self._confined)
                if is_calm:
                    del self.heavy[name]
        self.heavy = {name: until for name, until in self.heavy.items() if name in self._used}


def _idle_s(cpus: set[int]) -> float:
    """Seconds that processors have been idle, all together."""
    names = {b"cpu%d" % cpu for cpu in cpus}
    with open("/proc/stat", "rb") as f:
        lines = [line.split() for line in f if line.startswith(b"cpu")]
    return sum(int(fields[4]) + int(fields[5]) for fields in lines if fields[0] in names) / _TICKS


def _used_s(pid: int) -> float:
    """Seconds of a process, and of those of its children that have ended; of a group's, all together, nothing is lost
    but what has ended and not been collected yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def _allow(pids: list[int], cpus: set[int]) -> None:
    for pid in pids:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                if os.sched_getaffinity(int(thread)) != cpus:
                    os.sched_setaffinity(int(thread), cpus)
        except OSError:  # it has ended, or this process may not use those processors any more
            continue

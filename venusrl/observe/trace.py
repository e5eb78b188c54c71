"""A run as a timeline: a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a worker with a track a slot, one process for trajectories with a track each, where the time in tools shows
beside the time in generation. The format is Chrome's JSON array, which needs no end: a file of a run that was killed
opens as well.
"""

import contextlib
import json
import os
from types import TracebackType

from venusrl.observe.files import AppendFile


class Trace:
    """Writes spans as they end. Times are seconds on one clock. A span that cannot be written is left out.

    Raises:
      OSError: when it is made, naming the file.
    """

    def __init__(self, path: str | os.PathLike):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
        self._file = AppendFile(path, header=b"[\n", waiting_bytes=0)
        self._tracks: dict[tuple[str, str], tuple[int, int]] = {}
        self._processes: dict[str, int] = {}
        self._free: dict[str, list[float]] = {}  # by worker: when each slot was last in use

    def generated(self, trajectory: str, worker: str, begin: float, end: float, tokens: int, stop: str) -> None:
        """An action had a slot of `worker` from `begin` to `end`."""
        facts = {"trajectory": trajectory, "tokens": tokens, "stop": stop}
        slots = self._free.setdefault(worker, [])
        slot = next((i for i, until in enumerate(slots) if until <= begin), len(slots))
        if slot == len(slots):
            slots.append(end)
        slots[slot] = end
        self._span(worker, f"slot {slot}", trajectory, begin, end, facts)
        self._span("trajectories", trajectory, "generate", begin, end, {"worker": worker, **facts})

    def waited(self, trajectory: str, begin: float, end: float) -> None:
        """It was ready and had no slot."""
        if end > begin:
            self._span("trajectories", trajectory, "wait", begin, end, {})

    def tool(self, trajectory: str, what: str, begin: float, end: float) -> None:
        """Its environment was at work."""
        self._span("trajectories", trajectory, what, begin, end, {})

    def published(self, version: int, begin: float, end: float) -> None:
        """Workers took new weights."""
        self._span("training", "weights", f"version {version}", begin, end, {})

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _span(self, process: str, track: str, name: str, begin: float, end: float, facts: dict) -> None:
        pid, tid = self._track(process, track)
        self._write(
            {
                "ph": "X",
                "pid": pid,
                "tid": tid,
                "name": name,
                "ts": begin * 1e6,
                "dur": (end - begin) * 1e6,
                "args": facts,
            }
        )

    def _track(self, process: str, track: str) -> tuple[int, int]:
        found = self._tracks.get((process, track))
        if found is not None:
            return found
        if process not in self._processes:
            self._processes[process] = len(self._processes) + 1
            self._name("process_name", self._processes[process], 0, process)
        found = self._tracks[process, track] = (self._processes[process], len(self._tracks) + 1)
        self._name("thread_name", *found, track)
        return found

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._write({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}})

    def _write(self, event: dict) -> None:
        self._file.append(json.dumps(event).encode() + b",\n")


def read_trace(path: str | os.PathLike) -> list[dict]:
    """The events of a file, whole or cut off."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()[1:]
    events = []
    for line in lines:
        try:
            events.append(json.loads(line.rstrip(",")))
        except ValueError:
            break  # the line that was being written
    return events

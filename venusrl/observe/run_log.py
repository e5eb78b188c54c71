"""metrics.jsonl, TensorBoard events, trajectories.jsonl and reward.png of a run.

Nothing here ends a run: what cannot be written is said, counted and tried again.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from venusrl.core.group import Batch
from venusrl.observe.events import EventFile
from venusrl.observe.files import AppendFile, named, replace_file
from venusrl.observe.plots import reward_plot


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; [] where there is none. Lines that are no rows are passed over: cut short by a crash,
    or damaged."""
    return [row for _, row in _lines(path) if row is not None]


def _lines(path: str | os.PathLike) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(line as it stands, its row; None where it is none)."""
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield line, row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class JsonLines:
    """An append-only file of rows that have a `step`; going on from step k drops what is after k."""

    def __init__(self, path: str | os.PathLike, resume_step: int):
        """Raises:
        OSError: naming the file.
        """
        _keep(Path(path), resume_step)
        self.file = AppendFile(path)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """All of them or, for now, none; see AppendFile."""
        self.file.append(b"".join(_line(row) for row in rows))

    def close(self) -> None:
        self.file.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(row), allow_nan=False).encode() + b"\n"


def plain(value: Any) -> Any:
    """`value` with null for every number that JSON does not have."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(plain(key)): plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
    return value


def _keep(path: Path, resume_step: int) -> None:
    """Takes away rows after a step, and lines that are no rows. Needs no room where only the end goes."""
    end, kept, cut, broken = 0, [], False, 0
    for line, row in _lines(path):
        if row is None or row["step"] > resume_step:
            broken += row is None
            cut = True
            continue
        if cut or not line.endswith(b"\n"):
            kept.append(line.rstrip(b"\n") + b"\n")  # behind something that goes
        else:
            end += len(line)
    if broken > 1 or (broken and kept):  # one at the end is what a crash leaves
        logging.warning("%s: %d lines are no rows of a run and are left out", path, broken)
    try:
        if kept:
            with open(path, "rb") as file:
                replace_file(path, file.read(end) + b"".join(kept))
        elif cut:
            os.truncate(path, end)
    except OSError as error:
        raise named(error, path) from error


class RunLog:
    """Writes what a run measures.

    Raises:
      OSError: when it is made, naming the file that cannot be begun.
    """

    def __init__(self, workdir: str | os.PathLike, resume_step: int = 0):
        self.workdir = Path(workdir)
        self.metrics_path = self.workdir / "metrics.jsonl"
        self.trajectories_path = self.workdir / "trajectories.jsonl"
        self._metrics = JsonLines(self.metrics_path, resume_step)
        self._trajectories = JsonLines(self.trajectories_path, resume_step)
        rows = ((row["step"], _values(row)) for row in read_jsonl(self.metrics_path))
        self._events = EventFile(self.workdir / "tensorboard", resume_step, rows, time.time())
        self._plot_failures = 0

    @property
    def failures(self) -> int:
        """Attempts to write that failed so far."""
        return self._plot_failures + sum(f.failures for f in self._files)

    @property
    def _files(self) -> tuple[AppendFile, ...]:
        return self._metrics.file, self._trajectories.file, self._events.file

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One row of metrics, also as TensorBoard scalars; null where a number is not finite."""
        self._events.add(step, values, time.time())  # first: a run that is killed here has no row without its events
        self._metrics.write([{"step": step, **values}])

    def trajectories(self, step: int, batch: Batch) -> None:
        """What was trained on, readable: prompt, every turn's command and observation, reward."""
        self._trajectories.write(
            {
                "step": step,
                "id": t.id,
                "prompt_id": group.prompt_id,
                "epoch": group.epoch,
                "reward": t.reward,
                "start_version": t.start_version,
                "tokens": len(t),
                "generated": t.num_generated,
                "messages": t.info.get("messages"),
                "turns": [
                    {
                        **turn,
                        "stop": span.stop,
                        "generate_s": round(span.generate_s, 4),
                        "tool_s": round(span.tool_s, 4),
                    }
                    for turn, span in zip(t.info.get("steps", []), t.turns, strict=True)
                ],
            }
            for group in batch.groups
            for t in group.trajectories
        )

    def plot(self) -> None:
        """Draws reward.png anew."""
        try:
            reward_plot(read_jsonl(self.metrics_path), self.workdir / "reward.png", str(self.workdir))
        except OSError as error:
            self._plot_failures += 1
            logging.warning("reward.png is not drawn (%s); the run goes on", error)

    def close(self) -> None:
        self._metrics.close()
        self._trajectories.close()
        self._events.close()


def _values(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics; null is one that was not finite."""
    numbers = {name: math.nan if value is None else value for name, value in row.items() if name != "step"}
    return {n: v for n, v in numbers.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}

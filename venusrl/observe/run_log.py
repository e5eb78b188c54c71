"""metrics.jsonl, TensorBoard events and trajectories.jsonl of a run."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from venusrl.core.group import Batch


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file; [] where there is none. A last line cut short by a crash is passed over."""
    rows = []
    if not os.path.exists(path):
        return rows
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break  # written when the process was killed; everything after it is not there
    return rows


class JsonLines:
    """An append-only file of rows that have a `step`; going on from step k drops what is after k."""

    def __init__(self, path: str | os.PathLike, resume_step: int):
        path = Path(path)
        kept = [row for row in read_jsonl(path) if row["step"] <= resume_step]
        fresh = path.with_suffix(".tmp")
        with open(fresh, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
        os.replace(fresh, path)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.writelines(json.dumps(row) + "\n" for row in rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RunLog:
    """Writes what a run measures."""

    def __init__(self, workdir: str | os.PathLike, resume_step: int = 0):
        self.workdir = Path(workdir)
        self.metrics_path = self.workdir / "metrics.jsonl"
        self.trajectories_path = self.workdir / "trajectories.jsonl"
        self._metrics = JsonLines(self.metrics_path, resume_step)
        self._trajectories = JsonLines(self.trajectories_path, resume_step)
        self._events = SummaryWriter(str(self.workdir / "tensorboard"), purge_step=resume_step + 1)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """One row of metrics, also as TensorBoard scalars."""
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}  # NaN is not JSON
        self._metrics.write([{"step": step, **plain}])
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

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

    def close(self) -> None:
        self._metrics.close()
        self._trajectories.close()
        self._events.close()

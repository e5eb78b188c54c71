"""Figure 2: what trajectory-level scheduling leaves idle, and how little of a sandbox's memory ceiling is used.

    python -m launchers.figures.fig02_motivation [--quick] [--trace FILE] [--workdir DIR]

The active batch is simulated: 64 slots a worker, each held by one trajectory through its tools, with more trajectories
than slots. Memory is measured on a trace of real runs (AgentCgroup's, one JSON object a line with `mem_mb`), where
--trace names one. The share of sandboxes in a cluster's cost is the paper's alone: it is a price list.
"""

import dataclasses
import json
import statistics
from pathlib import Path

from launchers.figures.common import QUICK_SCALE, Cell, Row, Settings, plt, program, row, run_cells, write
from venusrl.core.errors import TaskError
from venusrl.sim.workload import read_lines

NAME = "fig02_motivation"
SLOTS = 64
CEILING_MB = 4096  # the ceiling that such sandboxes are declared with


def make(settings: Settings) -> list[Row]:
    series = memory_series(Path(settings.trace)) if settings.trace else []
    scale = QUICK_SCALE if settings.quick else 1
    # 16 workers of 64 slots hold 128 groups of 8; a batch of 128 at async factor 2 asks for twice that.
    cells = [Cell("fcfs_trajectory", "qwen3-4b", 128, 2.0, 3, s, scale=scale) for s in range(settings.seeds)]
    results = run_cells(cells, settings.jobs)
    shares = [results[c].active / SLOTS for c in cells]
    fractions = [results[c].bound_fraction for c in cells]
    where = "64 slots held through tools"
    rows = [row(NAME, where, "active share of slots", 0.765, shares, fractions)]
    memory = statistics.fmean(statistics.fmean(s) for s in series) / CEILING_MB if series else None
    measured = Row(
        NAME, f"{len(series)} runs, {CEILING_MB} MB declared", "used share of memory", 0.08, memory, "trace", 1
    )
    rows.append(measured)
    rows.append(
        dataclasses.replace(measured, cell="cluster", metric="sandboxes' share of non-GPU cost", paper=0.6, ours=None)
    )
    figure, axis = plt.subplots(figsize=(6, 4))
    labels = ["active share of slots", f"used share of {CEILING_MB} MB"]
    axis.bar([0, 1], [0.765, 0.08], 0.35, label="paper", color="0.7")
    axis.bar([0.4, 1.4], [statistics.fmean(shares), memory or 0.0], 0.35, label="ours (simulated; trace)")
    axis.set_xticks([0.2, 1.2], labels)
    axis.set_ylim(0, 1)
    axis.set_title("Idle slots and idle memory")
    axis.legend()
    write(settings, NAME, rows, figure)
    return rows


def memory_series(path: Path) -> list[list[float]]:
    """Resident memory of each run over time, in MB.

    Raises:
      TaskError: the file cannot be read, a line is no run, or no run has `mem_mb`.
    """
    series = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            samples = json.loads(line).get("mem_mb") or []
            series.append([float(mb) for _, mb in samples])
        except (AttributeError, TypeError, ValueError) as error:
            raise TaskError(f"--trace={path}, line {number}: not a run with `mem_mb` ({error!r})") from error
    series = [samples for samples in series if samples]
    if not series:
        raise TaskError(f"--trace={path}: no line has `mem_mb`, pairs of seconds and MB; give AgentCgroup's trace")
    return series


if __name__ == "__main__":
    program(make)

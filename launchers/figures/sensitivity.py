"""Ours: the speedup over action-level scheduling against the predictor's rank correlation, and against tool latency.

    python -m launchers.figures.sensitivity [--quick] [--seeds N] [--workdir DIR]

Qwen3-4B, 32 groups a batch, async factor 2.0. Simulated.
"""

import statistics

from launchers.figures.common import QUICK_SCALE, Cell, Row, Settings, plt, program, row, run_cells, write

NAME = "sensitivity"
CORRELATIONS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.98, 1.0)
TOOL_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)


def make(settings: Settings) -> list[Row]:
    scale = QUICK_SCALE if settings.quick else 1

    def cells(system: str, prediction: str = "", tool_scale: float = 1.0) -> list[Cell]:
        return [
            Cell(system, "qwen3-4b", 32, 2.0, settings.updates, seed, prediction, tool_scale, scale=scale)
            for seed in range(settings.seeds)
        ]

    predictions = {r: "oracle" if r == 1.0 else f"noisy:{r}" for r in CORRELATIONS}
    wanted = [c for p in predictions.values() for c in cells("venus", p)] + cells("venus") + cells("fcfs_action")
    for scale_ in TOOL_SCALES:
        wanted += cells("venus", tool_scale=scale_) + cells("fcfs_action", tool_scale=scale_)
    results = run_cells(wanted, settings.jobs)

    def speedup(ours: list[Cell], base: list[Cell]) -> list[float]:
        return [results[a].per_hour / results[b].per_hour for a, b in zip(ours, base, strict=True)]

    rows: list[Row] = []
    base = cells("fcfs_action")
    by_correlation = []
    for r, prediction in predictions.items():
        ours = cells("venus", prediction)
        values = speedup(ours, base)
        by_correlation.append(statistics.fmean(values))
        fractions = [results[c].bound_fraction for c in ours]
        rows.append(row(NAME, f"rank correlation {r}", "speedup", None, values, fractions))
        measured = [results[c].spearman for c in ours if results[c].spearman is not None]
        if measured:
            rows.append(row(NAME, f"rank correlation {r}", "measured rank correlation", None, measured))
    own = speedup(cells("venus"), base)
    rows.append(row(NAME, "no predictor: group-mates", "speedup", None, own))
    by_tool = []
    for factor in TOOL_SCALES:
        ours = cells("venus", tool_scale=factor)
        values = speedup(ours, cells("fcfs_action", tool_scale=factor))
        by_tool.append(statistics.fmean(values))
        fractions = [results[c].bound_fraction for c in ours]
        rows.append(row(NAME, f"tool seconds x{factor}", "speedup", None, values, fractions))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(CORRELATIONS, by_correlation, marker="o", label="noisy predictor")
    left.axhline(statistics.fmean(own), linestyle="--", color="0.5", label="group-mates' mean")
    left.set_xlabel("rank correlation of the prediction")
    left.legend()
    right.plot(TOOL_SCALES, by_tool, marker="o")
    right.set_xscale("log", base=2)
    right.set_xlabel("tool seconds, times the traces'")
    for axis in (left, right):
        axis.set_ylabel("speedup over action-level (simulated)")
    write(settings, NAME, rows, figure)
    return rows


if __name__ == "__main__":
    program(make)

"""Figure 12: how often trajectories are thrown away, by percentile of their length. Simulated.

    python -m launchers.figures.fig12_discards [--quick] [--seeds N] [--workdir DIR]

100 steps (20 with --quick) of 32 groups, async factor 1.5. A trajectory counts at the length it has or would have had;
a restart after an aborted request is a discard of what was there.
"""

import itertools

import numpy as np

from launchers.figures.common import QUICK_SCALE, Cell, Row, Settings, plt, program, row, run_cells, write

NAME = "fig12_discards"
SYSTEMS = ("venus", "slime", "rollflash", "areal")
EDGES = (0, 50, 75, 90, 95, 100)


def make(settings: Settings) -> list[Row]:
    scale, steps = (QUICK_SCALE, 20) if settings.quick else (QUICK_SCALE, 100)
    cells = {
        name: [Cell(name, "qwen3-4b", 32, 1.5, steps, s, scale=scale) for s in range(settings.seeds)]
        for name in SYSTEMS
    }
    results = run_cells([c for found in cells.values() for c in found], settings.jobs)
    rows: list[Row] = []
    curves: dict[str, list[float]] = {}
    for name in SYSTEMS:
        runs = [results[c] for c in cells[name]]
        fractions = [o.bound_fraction for o in runs]
        paper = {"venus": "never above slime or rollflash", "rollflash": "highest"}.get(name)
        rows.append(
            row(NAME, f"{name}, all lengths", "discarded share", paper, [o.discard_rate for o in runs], fractions)
        )
        curves[name] = []
        for low, high in itertools.pairwise(EDGES):
            shares = [_share(o.lengths, low, high) for o in runs]
            curves[name].append(float(np.mean(shares)))
            rows.append(row(NAME, f"{name}, length percentile {low}-{high}", "discarded share", None, shares))
    figure, axis = plt.subplots(figsize=(8, 4.5))
    places = range(len(EDGES) - 1)
    for style, (name, curve) in zip(("-", "-", "-", ":"), curves.items(), strict=True):
        axis.plot(places, curve, style, marker="o", label=name, linewidth=3 if style == "-" else 2)
    axis.set_xticks(places, [f"{a}-{b}" for a, b in itertools.pairwise(EDGES)])
    axis.set_xlabel("percentile of length")
    axis.set_ylabel("discarded share (simulated)")
    axis.set_title(f"Discarded trajectories over {steps} steps")
    axis.legend()
    write(settings, NAME, rows, figure)
    return rows


def _share(lengths: tuple[tuple[int, bool], ...], low: float, high: float) -> float:
    tokens = np.array([n for n, _ in lengths])
    thrown = np.array([d for _, d in lengths])
    least, most = np.percentile(tokens, [low, high])
    inside = (tokens >= least) & ((tokens < most) | (high == 100))
    return float(thrown[inside].mean()) if inside.any() else 0.0


if __name__ == "__main__":
    program(make)

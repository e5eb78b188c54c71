"""Figure 15: what each part of the scheduler adds, at batch 32 and 64. Simulated; the last step live, too.

    python -m launchers.figures.fig15_scheduler_ablation [--quick] [--nolive] [--seeds N] [--workdir DIR]

Qwen3-4B, async factor 2.0. Every step keeps what the one before has; speedups are over action-level scheduling. Live:
two engines of a small model, whose KV holds half of what is open (figures/live.py).
"""

import statistics

from launchers.figures.common import QUICK_SCALE, Cell, Row, Settings, plt, program, row, run_cells, write
from launchers.figures.live import LiveCell, run_seeds

NAME = "fig15_scheduler_ablation"
BATCHES = (32, 64)
_OFF = {"residency": False, "demotion": False, "migration": False}
# (name, system, switches, prediction)
STEPS = (
    ("action-level", "fcfs_action", {}, ""),
    ("FCFS priority", "fcfs_priority", {}, ""),
    ("+ prediction", "venus", _OFF, ""),
    ("+ residency", "venus", {"demotion": False, "migration": False}, ""),
    ("+ demotion", "venus", {"migration": False}, ""),
    ("+ migration", "venus", {}, ""),
    ("+ a clairvoyant prediction", "venus", {}, "oracle"),
)
LIVE_STEPS = ("action-level", "+ demotion", "+ migration")


def make(settings: Settings) -> list[Row]:
    scale = QUICK_SCALE if settings.quick else 1

    def cells(step: str, batch: int) -> list[Cell]:
        _, name, switches, prediction = next(s for s in STEPS if s[0] == step)
        return [
            Cell(name, "qwen3-4b", batch, 2.0, settings.updates, seed, prediction, 1.0, tuple(switches.items()), scale)
            for seed in range(settings.seeds)
        ]

    results = run_cells([c for step in STEPS for b in BATCHES for c in cells(step[0], b)], settings.jobs)
    rows: list[Row] = []
    speedups: dict[tuple[str, int], list[float]] = {}
    for batch in BATCHES:
        base = [results[c].per_hour for c in cells("action-level", batch)]
        for step, *_ in STEPS:
            runs = [results[c] for c in cells(step, batch)]
            speedup = [o.per_hour / b for o, b in zip(runs, base, strict=True)]
            speedups[step, batch] = speedup
            fractions = [o.bound_fraction for o in runs]
            rows.append(row(NAME, f"B{batch} {step}", "speedup", None, speedup, fractions))
            rows.append(row(NAME, f"B{batch} {step}", "KV hit rate", None, [o.hit for o in runs]))
        rows += _claims(batch, speedups)
    if settings.live:
        rows += _live(settings)
    figure, axis = plt.subplots(figsize=(10, 4.5))
    for k, batch in enumerate(BATCHES):
        heights = [statistics.fmean(speedups[step, batch]) for step, *_ in STEPS]
        bars = axis.bar([x + 0.4 * k for x in range(len(STEPS))], heights, 0.4, label=f"{batch} groups a batch")
        axis.bar_label(bars, [f"{h:.2f}" for h in heights], fontsize=8)
    axis.set_xticks([x + 0.2 for x in range(len(STEPS))], [s[0] for s in STEPS], rotation=20)
    axis.set_ylabel("speedup over action-level (simulated)")
    axis.set_title("What each part of the scheduler adds")
    axis.legend()
    write(settings, NAME, rows, figure)
    return rows


def _live(settings: Settings) -> list[Row]:
    cells = {step: LiveCell(name, tuple(switches.items())) for step, name, switches, _ in STEPS if step in LIVE_STEPS}
    runs = run_seeds(cells, settings)
    rows = []
    for step, outcomes in runs.items():
        speedup = [base.total_s / o.total_s for base, o in zip(runs["action-level"], outcomes, strict=True)]
        cell = f"live {step}"
        rows.append(row(NAME, cell, "speedup", None, speedup, source="live"))
        rows.append(row(NAME, cell, "KV hit rate", None, [o.hit for o in outcomes], source="live"))
        rows.append(row(NAME, cell, "moves of KV", None, [o.moved for o in outcomes], source="live"))
    pairs = zip(runs["+ migration"], runs["+ demotion"], runs["action-level"], strict=True)
    adds = [base.total_s / w.total_s - base.total_s / wo.total_s for w, wo, base in pairs]
    rows.append(row(NAME, "live", "migration adds", "up to +0.48x", adds, source="live"))
    return rows


def _claims(batch: int, speedups: dict[tuple[str, int], list[float]]) -> list[Row]:
    """The paper's sentences about single parts."""

    def ratio(a: str, b: str) -> list[float]:
        return [x / y for x, y in zip(speedups[a, batch], speedups[b, batch], strict=True)]

    whole = {32: "1.81x", 64: "1.42x"}[batch]
    migration = [a - b for a, b in zip(speedups["+ migration", batch], speedups["+ demotion", batch], strict=True)]
    return [
        row(NAME, f"B{batch}", "priority scheduling over action-level", whole, speedups["FCFS priority", batch]),
        row(NAME, f"B{batch}", "prediction over action-level", "up to 1.95x", ratio("+ prediction", "action-level")),
        row(NAME, f"B{batch}", "prediction over FCFS priority", "up to 1.58x", ratio("+ prediction", "FCFS priority")),
        row(NAME, f"B{batch}", "migration adds", "up to +0.48x" if batch == 64 else None, migration),
    ]


if __name__ == "__main__":
    program(make)

"""Figure 17: KV residency and demotion against caches that know nothing of trajectories. Live and simulated.

    python -m launchers.figures.fig17_cache [--quick] [--nolive] [--seeds N] [--workdir DIR]

Simulated: Qwen3-4B, async factor 2.0, batch 32 and 64. Live: two engines of a small model in one process, whose KV
holds a part of what is open, with the simulator's trajectories made short (figures/live.py). All of them order actions
as VenusRL does, but for the last, and move them between workers; they differ in what stays cached, and in whether
more may run than fits. Host memory is twice the device's, as in HiCache. On a CPU it is no slower than the device's, so
the live rows with host memory show a cache of three times the size, not a second tier's cost.
"""

import statistics

from launchers.figures.common import QUICK_SCALE, Cell, Row, Settings, plt, program, row, run_cells, write
from launchers.figures.live import LiveCell, run_seeds

NAME = "fig17_cache"
BATCHES = (32, 64)
LOADS = (1.5, 3.0)
VENUS = "residency + demotion"
# (name, system, switches, order in which a live engine gives pages up)
CACHES = (
    (VENUS, "venus", {}, "references"),
    ("no demotion", "venus", {"demotion": False}, "references"),
    ("two tiers (HiCache)", "venus_two_tier", {}, "lru"),
    ("LRU", "venus_lru", {}, "lru"),
    ("residency + demotion, two tiers", "venus_host", {}, "references"),
    ("action-level, LRU", "fcfs_action", {}, "lru"),
)
PAPER = {"two tiers (HiCache)": "2.09x", "no demotion": "1.58x"}
PAPER_HIT = {VENUS: "> 0.95", "no demotion": 0.79}


def make(settings: Settings) -> list[Row]:
    rows, speedups = _simulated(settings)
    if settings.live:
        more, live = _live(settings)
        rows, speedups = rows + more, speedups | live
    figure, axis = plt.subplots(figsize=(11, 4.5))
    width = 0.8 / len(speedups)
    for k, (where, by_cache) in enumerate(speedups.items()):
        bars = axis.bar(
            [x + width * k for x in range(len(CACHES))], [by_cache[c[0]] for c in CACHES], width, label=where
        )
        axis.bar_label(bars, [f"{by_cache[c[0]]:.2f}" for c in CACHES], fontsize=7)
    axis.set_xticks([x + 0.4 - width / 2 for x in range(len(CACHES))], [c[0] for c in CACHES], rotation=15)
    axis.set_ylabel("throughput, LRU = 1")
    axis.set_title("What stays cached, and how much may run")
    axis.legend()
    write(settings, NAME, rows, figure)
    return rows


def _simulated(settings: Settings) -> tuple[list[Row], dict[str, dict[str, float]]]:
    scale = QUICK_SCALE if settings.quick else 1

    def cells(cache: tuple, batch: int) -> list[Cell]:
        _, name, switches, _ = cache
        return [
            Cell(name, "qwen3-4b", batch, 2.0, settings.updates, seed, "", 1.0, tuple(switches.items()), scale)
            for seed in range(settings.seeds)
        ]

    results = run_cells([c for cache in CACHES for b in BATCHES for c in cells(cache, b)], settings.jobs)
    rows: list[Row] = []
    speedups: dict[str, dict[str, float]] = {}
    for batch in BATCHES:
        runs = {cache[0]: [results[c] for c in cells(cache, batch)] for cache in CACHES}
        for name, outcomes in runs.items():
            cell, hit = f"B{batch} {name}", PAPER_HIT.get(name) if batch == 64 else None
            rows.append(row(NAME, cell, "batches/h", None, [o.per_hour for o in outcomes]))
            rows.append(row(NAME, cell, "KV hit rate", hit, [o.hit for o in outcomes]))
            ratios = [v.per_hour / o.per_hour for v, o in zip(runs[VENUS], outcomes, strict=True)]
            if name == VENUS:
                rows.append(row(NAME, cell, "hit rate of what fits", "> 0.95", [o.kept for o in outcomes]))
            else:
                rows.append(row(NAME, cell, f"{VENUS} over it", PAPER.get(name), ratios))
        base = statistics.fmean(o.per_hour for o in runs["LRU"])
        speedups[f"simulated, {batch} groups a batch"] = {
            name: statistics.fmean(o.per_hour for o in outcomes) / base for name, outcomes in runs.items()
        }
    return rows, speedups


def _live(settings: Settings) -> tuple[list[Row], dict[str, dict[str, float]]]:
    rows: list[Row] = []
    speedups: dict[str, dict[str, float]] = {}
    for load in LOADS[-1:] if settings.quick else LOADS:
        cells = {
            name: LiveCell(system, tuple(switches.items()), residency, load)
            for name, system, switches, residency in CACHES
        }
        runs = run_seeds(cells, settings)
        for name, outcomes in runs.items():
            cell = f"live, load {load} {name}"
            rows.append(_live_row(cell, "seconds", None, [o.total_s for o in outcomes]))
            rows.append(_live_row(cell, "KV hit rate", PAPER_HIT.get(name), [o.hit for o in outcomes]))
            ratios = [o.total_s / v.total_s for v, o in zip(runs[VENUS], outcomes, strict=True)]
            if name == VENUS:
                rows.append(_live_row(cell, "hit rate of what fits", "> 0.95", [o.kept for o in outcomes]))
            else:
                rows.append(_live_row(cell, f"{VENUS} over it", PAPER.get(name), ratios))
        base = statistics.fmean(o.total_s for o in runs["LRU"])
        speedups[f"live, load {load}"] = {
            name: base / statistics.fmean(o.total_s for o in outcomes) for name, outcomes in runs.items()
        }
    return rows, speedups


def _live_row(cell: str, metric: str, paper, values: list[float]) -> Row:
    return row(NAME, cell, metric, paper, values, source="live")


if __name__ == "__main__":
    program(make)

"""Figure 10: throughput of whole systems, over models, batch sizes and degrees of asynchrony. Simulated.

    python -m launchers.figures.fig10_end_to_end [--quick] [--seeds N] [--workdir DIR]

Throughput is batches trained an hour, from a cold start. `slime` restarts trajectories whose request is aborted by a
weight update, as its agent examples do; `slime_step` is its one-step-off driver. slime, ThunderAgent and AReaL do not
bound the age of what is trained on as VenusRL does; the `_bounded` ones keep VenusRL's bound, by discarding.
"""

import itertools

from launchers.figures.common import MODELS, QUICK_SCALE, Cell, Row, Settings, plt, program, row, run_cells, write

NAME = "fig10_end_to_end"
BATCHES = (32, 64)
ASYNC_FACTORS = (1.0, 1.5, 2.0)
SYSTEMS = (
    "venus", "slime", "slime_bounded", "slime_step", "rollflash", "thunderagent", "thunderagent_bounded", "areal",
)  # fmt: skip
QUICK_SYSTEMS = ("venus", "slime", "slime_bounded", "rollflash", "thunderagent")
# Of the paper, over all its cells.
PAPER = {
    "slime": "1.07-3.26x",
    "slime_bounded": "1.07-3.26x",
    "rollflash": "1.06-4.24x",
    "thunderagent": "1.05-2.67x",
    "thunderagent_bounded": "1.05-2.67x",
}
PAPER_ON_POLICY = {"qwen3-4b": "1.07-1.15x", "qwen3-32b": "1.05-1.85x"}


def make(settings: Settings) -> list[Row]:
    systems = QUICK_SYSTEMS if settings.quick else SYSTEMS
    scale = QUICK_SCALE if settings.quick else 1
    grid = list(itertools.product(MODELS, BATCHES, ASYNC_FACTORS))

    def cells(name: str, model: str, batch: int, factor: float) -> list[Cell]:
        # slime has no asynchronous driver that is strictly on-policy; its synchronous one stands in at 1.0.
        if factor == 1.0 and name in ("slime", "slime_bounded"):
            name = "slime_step"
        if factor == 1.0 and name == "thunderagent_bounded":
            name = "thunderagent"
        return [Cell(name, model, batch, factor, settings.updates, seed, scale=scale) for seed in range(settings.seeds)]

    # What perfect predictions would give; not with --quick.
    oracle = {key: [_oracle(c) for c in cells("venus", *key)] for key in grid if not settings.quick}
    wanted = [c for key in grid for name in systems for c in cells(name, *key)]
    results = run_cells([*wanted, *(c for cs in oracle.values() for c in cs)], settings.jobs)

    rows: list[Row] = []
    speedups: dict[tuple[str, str, float], list[float]] = {}
    for key in grid:
        model, batch, factor = key
        where = f"{model} B{batch} async {factor}"
        ours = [results[c] for c in cells("venus", *key)]
        for name in systems:
            theirs = [results[c] for c in cells(name, *key)]
            fractions = [o.bound_fraction for o in theirs]
            rows.append(row(NAME, where, f"{name}: batches/h", None, [o.per_hour for o in theirs], fractions))
            if name != "venus":
                ratios = [a.per_hour / b.per_hour for a, b in zip(ours, theirs, strict=True)]
                rows.append(row(NAME, where, f"venus over {name}", None, ratios))
                speedups.setdefault((name, model, factor), []).append(row(NAME, "", "", None, ratios).ours)
        clear = [results[c] for c in oracle.get(key, [])]
        if not clear:
            continue
        values, fractions = [o.per_hour for o in clear], [o.bound_fraction for o in clear]
        rows.append(row(NAME, where, "venus, clairvoyant: batches/h", None, values, fractions))
    for name in systems[1:]:
        found = [v for (n, _, _), values in speedups.items() if n == name for v in values]
        rows += _range("all cells", f"venus over {name}", PAPER.get(name), found, settings.seeds)
    for model, paper in PAPER_ON_POLICY.items():
        peers = [n for n in systems if n in ("slime", "rollflash", "thunderagent")]
        found = [v for n in peers for v in speedups[n, model, 1.0]]
        rows += _range(f"{model} on-policy", "venus over slime, rollflash, thunderagent", paper, found, settings.seeds)
    write(settings, NAME, rows, _plot(systems, grid, lambda *a: [results[c].per_hour for c in cells(*a)]))
    return rows


def _oracle(cell: Cell) -> Cell:
    return Cell(**{**cell.__dict__, "prediction": "oracle"})


def _range(cell: str, metric: str, paper: str | None, found: list[float], seeds: int) -> list[Row]:
    low, high = (paper or "-").rstrip("x").split("-") if paper else (None, None)
    return [
        Row(NAME, cell, f"{metric}, least", low and f"{low}x", round(min(found), 4), "simulated", seeds),
        Row(NAME, cell, f"{metric}, most", high and f"{high}x", round(max(found), 4), "simulated", seeds),
    ]


def _plot(systems, grid, per_hour) -> plt.Figure:
    figure, axes = plt.subplots(len(MODELS), len(BATCHES), figsize=(14, 8), squeeze=False)
    width = 0.8 / len(systems)
    for (i, model), (j, batch) in itertools.product(enumerate(MODELS), enumerate(BATCHES)):
        axis = axes[i][j]
        for k, name in enumerate(systems):
            values = [sum(v) / len(v) for f in ASYNC_FACTORS if (v := per_hour(name, model, batch, f))]
            places = [x + (k - len(systems) / 2 + 0.5) * width for x in range(len(ASYNC_FACTORS))]
            axis.bar(places, values, width, label=name, color=f"C{k}" if k < 10 else f"{0.25 * (k - 9)}")
        axis.set_xticks(range(len(ASYNC_FACTORS)), [f"async factor {f}" for f in ASYNC_FACTORS])
        axis.set_title(f"{model}, {batch} groups a batch")
        axis.set_ylabel("batches an hour (simulated)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=6, bbox_to_anchor=(0.5, -0.04))
    figure.suptitle("Throughput of whole systems (higher is better)")
    return figure


if __name__ == "__main__":
    program(make)

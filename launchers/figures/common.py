"""What the figures share: simulated cells run in parallel, rows of results, and the files they are written to."""

import csv
import dataclasses
import functools
import json
import os
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
from absl import app, flags, logging

from venusrl.coordinator.coordinator import CoordinatorOptions
from venusrl.sim import bounds
from venusrl.sim.cluster import Cluster, paper_cluster
from venusrl.sim.prediction import Noisy, make_prediction
from venusrl.sim.simulation import Simulation
from venusrl.sim.systems import system
from venusrl.sim.workload import Generated

matplotlib.use("Agg")
import matplotlib.pyplot as plt

QUICK = flags.DEFINE_bool("quick", False, "A quarter of cluster and batch, few updates: a look, not a result.")
SEEDS = flags.DEFINE_integer("seeds", 0, "Seeds of each cell; 0 is 1 with --quick and 2 without.", lower_bound=0)
WORKDIR = flags.DEFINE_string("workdir", "runs/figures", "Folder for the files.")
JOBS = flags.DEFINE_integer("jobs", 0, "Processes at once; 0 is one a core.", lower_bound=0)

GROUP = 8
MODELS = {"qwen3-4b": 1, "qwen3-32b": 4}  # devices of a worker
QUICK_SCALE = 4
WARMUP = 2  # batches left out of the rate


@dataclasses.dataclass(frozen=True)
class Settings:
    """Attributes:
    quick: see --quick.
    seeds: of each cell.
    workdir: where files go.
    jobs: processes at once.
    """

    quick: bool
    seeds: int
    workdir: Path
    jobs: int

    @property
    def updates(self) -> int:
        return 4 if self.quick else 8


@dataclasses.dataclass(frozen=True)
class Cell:
    """One simulated run. Attributes:
    prediction: see sim/prediction.py.
    switches: fields of SchedulerOptions.
    scale: the cluster and the batch are so many times smaller than the paper's.
    """

    system: str
    model: str
    batch: int
    async_factor: float
    updates: int
    seed: int = 0
    prediction: str = ""
    tool_scale: float = 1.0
    switches: tuple[tuple[str, Any], ...] = ()
    scale: int = 1

    @property
    def options(self) -> CoordinatorOptions:
        return CoordinatorOptions(
            GROUP, self.batch // self.scale, self.async_factor, updates=self.updates, seed=self.seed, max_refills=10**9
        )

    @property
    def cluster(self) -> Cluster:
        whole = paper_cluster(self.model, MODELS[self.model])
        trainer = dataclasses.replace(whole.trainer, devices=whole.trainer.devices // self.scale)
        return dataclasses.replace(whole, workers=max(1, whole.workers // self.scale), trainer=trainer)

    @property
    def workload(self) -> Generated:
        return Generated(self.seed, tool_scale=self.tool_scale)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Attributes:
    per_hour: batches an hour, the warm-up left out.
    bound_fraction: the lower bound on the time of the last batch over its time.
    spearman: measured rank correlation of the predictions; None where none was made.
    lengths: (tokens the trajectory would have had, discarded) of every trajectory that ended.
    """

    per_hour: float
    bound_fraction: float
    hit: float
    active: float
    wasted: float
    discard_rate: float
    spearman: float | None
    stale_max: int
    events: int
    wall_s: float
    lengths: tuple[tuple[int, bool], ...]


@functools.cache
def _bound(cell: Cell) -> list[float]:
    return bounds.batch_times(cell.cluster, cell.workload, cell.options)


def run_cell(cell: Cell) -> Outcome:
    """Simulates one cell."""
    what = system(cell.system)
    if cell.switches:
        what = dataclasses.replace(what, switches=(*what.switches, *cell.switches))
    prediction = make_prediction(cell.prediction, cell.seed)
    report = Simulation(what, cell.cluster, cell.workload, cell.options, prediction).run()
    bound = _bound(dataclasses.replace(cell, system="venus", prediction="", switches=()))
    return Outcome(
        per_hour=3600 / report.batch_s(min(WARMUP, cell.updates - 2)),
        bound_fraction=bound[-1] / report.batches_s[-1],
        hit=report.hit,
        active=report.active,
        wasted=report.wasted / max(1, report.generated),
        discard_rate=report.discard_rate,
        spearman=prediction.measured if isinstance(prediction, Noisy) else None,
        stale_max=max(report.stale, default=0),
        events=report.events,
        wall_s=report.wall_s,
        lengths=tuple(report.discards),
    )


def run_cells(cells: Iterable[Cell], jobs: int) -> dict[Cell, Outcome]:
    """All of them, the longest first."""
    ordered = sorted(set(cells), key=lambda c: -c.batch * c.async_factor * c.updates)
    results: dict[Cell, Outcome] = {}
    with ProcessPoolExecutor(jobs) as pool:
        for number, (cell, outcome) in enumerate(zip(ordered, pool.map(run_cell, ordered), strict=True), 1):
            results[cell] = outcome
            logging.info(
                "%d/%d %s %s B%d x%.1f: %.2f batches/h, %.0f%% of the bound, %.1f s",
                number, len(ordered), cell.system, cell.model, cell.batch, cell.async_factor,
                outcome.per_hour, 100 * outcome.bound_fraction, outcome.wall_s,
            )  # fmt: skip
    return results


@dataclasses.dataclass(frozen=True)
class Row:
    """A number of a figure. Attributes:
    paper: the paper's number or range; None where it gives none for this cell.
    ours: the mean over seeds.
    source: "live", "simulated" or "trace".
    spread: the standard deviation over seeds; None for one seed.
    bound_fraction: of the run it is about; None where no run is.
    """

    figure: str
    cell: str
    metric: str
    paper: str | float | None
    ours: float | None
    source: str
    seeds: int
    spread: float | None = None
    bound_fraction: float | None = None


def row(figure: str, cell: str, metric: str, paper, values: list[float], fractions: list[float] | None = None) -> Row:
    """A simulated number over seeds."""
    spread = round(statistics.stdev(values), 4) if len(values) > 1 else None
    fraction = round(statistics.fmean(fractions), 3) if fractions else None
    ours = round(statistics.fmean(values), 4)
    return Row(figure, cell, metric, paper, ours, "simulated", len(values), spread, fraction)


def write(settings: Settings, name: str, rows: list[Row], figure: plt.Figure) -> None:
    """NAME.csv, NAME.json and NAME.png."""
    settings.workdir.mkdir(parents=True, exist_ok=True)
    table = [dataclasses.asdict(r) for r in rows]
    (settings.workdir / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")
    with (settings.workdir / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(table)
    figure.savefig(settings.workdir / f"{name}.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    for r in rows:
        paper = "" if r.paper is None else f"   paper {r.paper}"
        bound = "" if r.bound_fraction is None else f"   {100 * r.bound_fraction:.0f}% of the bound"
        print(f"{r.cell:40} {r.metric:34} {r.ours if r.ours is not None else '-':>9}{paper}{bound}")
    print(f"wrote {settings.workdir / name}.csv, .json and .png", flush=True)


def settings() -> Settings:
    """From the flags."""
    seeds = SEEDS.value or (1 if QUICK.value else 2)
    return Settings(QUICK.value, seeds, Path(WORKDIR.value), JOBS.value or os.cpu_count() or 1)


def program(make: Callable[[Settings], list[Row]]) -> None:
    """Runs a figure's `make` as an absl program."""

    def main(argv: list[str]) -> None:
        del argv
        make(settings())

    app.run(main)

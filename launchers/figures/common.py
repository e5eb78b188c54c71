"""What the figures share: simulated cells run in parallel, rows of results, and the files they are written to."""

import contextlib
import csv
import dataclasses
import gc
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib
from absl import flags, logging

from launchers import program as entry
from launchers.configuration import check_workdir
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
SEEDS = flags.DEFINE_integer("seeds", 0, "Seeds of each cell; 0 is one.", 0, 1000)
WORKDIR = flags.DEFINE_string("workdir", "runs/figures", "Folder for the files.")
TRACE = flags.DEFINE_string(
    "trace", "", "Trace of real runs with memory series, for Figure 2; empty leaves memory out."
)
LIVE = flags.DEFINE_bool("live", True, "The live part of a figure that has one, too; minutes.")
JOBS = flags.DEFINE_integer("jobs", 0, "Processes at once; 0 is one a core.", 0, 4096)

GROUP = 8
MODELS = {"qwen3-4b": 1, "qwen3-32b": 4}  # devices of a worker
QUICK_SCALE = 4
QUICK_TURNS = 40


@dataclasses.dataclass(frozen=True)
class Settings:
    """Attributes:
    quick: see --quick.
    seeds: of each cell.
    workdir: where files go.
    jobs: processes at once.
    trace: file of real runs; empty for none.
    live: see --live.
    """

    quick: bool
    seeds: int
    workdir: Path
    jobs: int
    trace: str = ""
    live: bool = True

    @property
    def updates(self) -> int:
        return 3 if self.quick else 6


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
        turns = 300 if self.scale == 1 else QUICK_TURNS
        return Generated(self.seed, tool_scale=self.tool_scale, max_turns=turns)

    @property
    def problem(self) -> "Cell":
        """What a bound is about: the cell without what is a scheduler's."""
        return dataclasses.replace(self, system="venus", prediction="", switches=())


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Attributes:
    total_s: seconds to the last batch, from a cold start.
    bound_fraction: the lower bound on that time over that time.
    spearman: measured rank correlation of the predictions; None where none was made.
    lengths: (tokens the trajectory would have had, discarded) of every trajectory that ended.
    """

    total_s: float
    per_hour: float
    bound_fraction: float
    hit: float
    kept: float
    active: float
    wasted: float
    discard_rate: float
    spearman: float | None
    events: int
    wall_s: float
    lengths: tuple[tuple[int, bool], ...]


def bound_s(cell: Cell) -> float:
    """Lower bound on the seconds to the last batch."""
    return bounds.batch_times(cell.cluster, cell.workload, cell.options)[-1]


def run_cell(cell: Cell) -> Outcome:
    """Simulates one cell."""
    what = system(cell.system)
    if cell.switches:
        what = dataclasses.replace(what, switches=(*what.switches, *cell.switches))
    prediction = make_prediction(cell.prediction, cell.seed)
    gc.disable()  # a simulation makes no cycles, and a tenth of its time would go into looking for them
    report = Simulation(what, cell.cluster, cell.workload, cell.options, prediction).run()
    gc.enable()
    total_s = report.batches_s[-1]
    return Outcome(
        total_s=total_s,
        per_hour=3600 * cell.updates / total_s,
        bound_fraction=0.0,  # filled in by `run_cells`
        hit=report.hit,
        kept=report.kept,
        active=report.active,
        wasted=report.wasted / max(1, report.generated),
        discard_rate=report.discard_rate,
        spearman=prediction.measured if isinstance(prediction, Noisy) else None,
        events=report.events,
        wall_s=report.wall_s,
        lengths=tuple(report.discards),
    )


def run_cells(cells: Iterable[Cell], jobs: int) -> dict[Cell, Outcome]:
    """All of them, the longest first."""
    ordered = sorted(set(cells), key=lambda c: -c.batch * c.async_factor * c.updates)
    results: dict[Cell, Outcome] = {}
    # A process that has used JAX cannot be forked.
    fresh = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, fresh) if jobs > 1 else contextlib.nullcontext() as pool:
        each = pool.map if pool else map
        problems = list(dict.fromkeys(cell.problem for cell in ordered))
        bound = dict(zip(problems, each(bound_s, problems), strict=True))
        for number, (cell, outcome) in enumerate(zip(ordered, each(run_cell, ordered), strict=True), 1):
            outcome = dataclasses.replace(outcome, bound_fraction=bound[cell.problem] / outcome.total_s)
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


def row(
    figure: str,
    cell: str,
    metric: str,
    paper,
    values: list[float],
    fractions: list[float] | None = None,
    source: str = "simulated",
) -> Row:
    """A number over seeds."""
    spread = round(statistics.stdev(values), 4) if len(values) > 1 else None
    fraction = round(statistics.fmean(fractions), 3) if fractions else None
    ours = round(statistics.fmean(values), 4)
    return Row(figure, cell, metric, paper, ours, source, len(values), spread, fraction)


def write(settings: Settings, name: str, rows: list[Row], figure: plt.Figure) -> None:
    """NAME.csv, NAME.json and NAME.png."""
    settings.workdir.mkdir(parents=True, exist_ok=True)
    table = [dataclasses.asdict(r) for r in rows]
    (settings.workdir / f"{name}.json").write_text(json.dumps(table, indent=1) + "\n")
    with (settings.workdir / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Row)])
        writer.writeheader()
        writer.writerows(table)
    if settings.quick:
        figure.text(0.99, 0.01, "quick settings: a look, not a result", ha="right", color="red")
    figure.savefig(settings.workdir / f"{name}.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
    for r in rows:
        paper = "" if r.paper is None else f"   paper {r.paper}"
        bound = "" if r.bound_fraction is None else f"   {100 * r.bound_fraction:.0f}% of the bound"
        print(f"{r.cell:40} {r.metric:34} {r.ours if r.ours is not None else '-':>9}{paper}{bound}")
    print(f"wrote {settings.workdir / name}.csv, .json and .png", flush=True)


def numbers(rows: list[Row]) -> dict[str, dict[str, float | None]]:
    """Ours by figure and "cell: metric": the last line of a figure's program, for scripts to read."""
    result: dict[str, dict[str, float | None]] = {}
    for r in rows:
        result.setdefault(r.figure, {})[f"{r.cell}: {r.metric}"] = r.ours
    return result


def settings() -> Settings:
    """From the flags."""
    seeds = SEEDS.value or 1
    jobs = JOBS.value or os.cpu_count() or 1
    return Settings(QUICK.value, seeds, check_workdir(WORKDIR.value), jobs, TRACE.value, LIVE.value)


def program(make: Callable[[Settings], list[Row]]) -> None:
    """Runs a figure's `make` as an absl program; the last line is one JSON object."""

    def main(argv: list[str]) -> None:
        del argv
        logging.set_verbosity(logging.INFO)
        print(json.dumps(numbers(make(settings()))))

    entry.run(main, lasting=True)

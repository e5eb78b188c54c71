"""The figures as programs would make them, of trajectories cut to a few turns."""

import csv
import dataclasses
import json

import pytest

from launchers.figures import all as every
from launchers.figures import common, fig02_motivation, fig12_discards, live
from launchers.figures.common import Cell, Row, Settings, bound_s, run_cell
from venusrl.core.errors import TaskError

FIELDS = {f.name for f in dataclasses.fields(Row)}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(common, "QUICK_TURNS", 3)
    monkeypatch.setattr(live, "GROUP", 2)
    monkeypatch.setattr(live, "BATCH", 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_figure_is_written_and_shown_beside_the_papers_numbers(short, tmp_path, capsys):
    rows = every.make(Settings(quick=True, seeds=1, workdir=tmp_path, jobs=1))
    page = (tmp_path / "index.html").read_text()
    for figure in every.FIGURES:
        name = figure.NAME
        table = json.loads((tmp_path / f"{name}.json").read_text())
        assert table and all(set(r) == FIELDS for r in table)
        assert all(r["source"] in ("live", "simulated", "trace") for r in table)
        with (tmp_path / f"{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == len(table)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"{name}.png" in page
    assert sum(r.figure == "fig10_end_to_end" for r in rows) > 60
    fractions = [r.bound_fraction for r in rows if r.bound_fraction is not None]
    assert fractions and all(0 < f <= 1.0 for f in fractions)
    lives = [r for r in rows if r.source == "live"]
    assert {r.figure for r in lives} == {"fig15_scheduler_ablation", "fig17_cache"}
    assert all(0 < r.ours <= 1.0 for r in lives if "hit rate" in r.metric)
    assert "paper 3.26x" in capsys.readouterr().out
    ours = common.numbers(rows)
    assert set(ours) == {figure.NAME for figure in every.FIGURES}
    assert ours["fig10_end_to_end"]["qwen3-4b B32 async 2.0: venus: batches/h"] > 0


def test_a_figure_is_written_and_shown(short, tmp_path, monkeypatch):
    monkeypatch.setattr(every, "FIGURES", (fig12_discards,))
    rows = every.make(Settings(quick=True, seeds=1, workdir=tmp_path, jobs=1))
    assert rows and all(row.source == "simulated" for row in rows)
    assert "fig12_discards.png" in (tmp_path / "index.html").read_text()
    assert len(json.loads((tmp_path / "fig12_discards.json").read_text())) == len(rows)


def test_a_seed_gives_the_same_cell_again(short):
    cell = Cell("venus", "qwen3-4b", 32, 2.0, 3, scale=4)
    one, other = run_cell(cell), run_cell(cell)
    assert dataclasses.replace(one, wall_s=0) == dataclasses.replace(other, wall_s=0)
    assert 0 < bound_s(cell) <= one.total_s


@pytest.mark.parametrize(
    ("paper", "ours", "says"),
    [("2.0x", 1.0, "-50%"), (0.5, 0.6, "+20%"), ("1.0-2.0x", 1.5, None), (None, 1.0, None), (0.6, None, None)],
)
def test_differences_are_told_where_both_are_numbers(paper, ours, says):
    assert every.difference(Row("f", "c", "m", paper, ours, "simulated", 1)) == says


@pytest.mark.parametrize("text", ["not json", "[1, 2]", "", '{"mem_mb": [1]}', '{"turns": []}'])
def test_a_trace_that_is_none_is_refused_before_anything_runs(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text + "\n" if text else "")
    settings = Settings(quick=True, seeds=1, workdir=tmp_path / "out", jobs=1, trace=str(path))
    with pytest.raises(TaskError, match=r"trace.jsonl(, line 1: not a run|: no line has)"):
        fig02_motivation.make(settings)
    for missing in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(TaskError, match="cannot be read as a trace"):
            fig02_motivation.make(dataclasses.replace(settings, trace=str(missing)))
    assert not (tmp_path / "out").exists()

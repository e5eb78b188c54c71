"""The plot and the progress display."""

import contextlib
import io
import os
import threading
import time

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from venusrl.observe.plots import reward_plot
from venusrl.observe.progress import Progress, summary_table

ROWS = [{"step": 0, "train_minutes": 0.0, "heldout_success": 0.1}] + [
    {"step": i, "train_minutes": i / 2, "reward": i / 20} for i in range(1, 12)
]


def pixels(path) -> np.ndarray:
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return matplotlib.image.imread(path)


def test_the_plot_is_a_png_that_shows_the_rows(tmp_path):
    reward_plot(ROWS, tmp_path / "reward.png", "run")
    reward_plot([], tmp_path / "empty.png", "run")
    shown, empty = pixels(tmp_path / "reward.png"), pixels(tmp_path / "empty.png")
    assert shown.shape[0] > 300 and shown.shape[1] > 600
    assert shown.shape == empty.shape and np.abs(shown - empty).max() > 0.5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.png", "reward.png"]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[1:2], [{"step": 1, "train_minutes": 0.1, "loss": 1.0}]])
def test_any_part_of_the_rows_can_be_plotted(tmp_path, rows):
    reward_plot(rows, tmp_path / "reward.png", "run")
    pixels(tmp_path / "reward.png")


def test_a_plot_replaces_the_one_before(tmp_path):
    for rows in (ROWS[:3], ROWS):
        reward_plot(rows, tmp_path / "reward.png", "run")
    whole = tmp_path / "whole.png"
    reward_plot(ROWS, whole, "run")
    assert np.array_equal(pixels(tmp_path / "reward.png"), pixels(whole))


def test_progress_off_a_terminal_is_plain_lines():
    out = io.StringIO()
    asked = []
    with Progress(lambda: asked.append(1) or {}, "run", Console(file=out, width=40)) as progress:
        progress.line("step    1  reward 0.500  " + "x" * 60)
        progress.line("[0.1, 0.2] stays as it is")
    lines = out.getvalue().splitlines()
    assert lines[0] == "step    1  reward 0.500  " + "x" * 60  # not wrapped: one line a step, for grep
    assert lines[1] == "[0.1, 0.2] stays as it is"
    assert "\x1b" not in out.getvalue() and not asked


def test_progress_on_a_terminal_shows_the_status():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with Progress(lambda: {"step": "3 of 60", "reward": "0.250"}, "run", console) as progress:
        progress.line("a line")
    assert "3 of 60" in out.getvalue() and "a line" in out.getvalue()


def test_the_panel_goes_away_when_the_run_fails():
    console = Console(file=io.StringIO(), force_terminal=True)
    progress = Progress(lambda: {"a": "b"}, "run", console)
    with pytest.raises(KeyError), progress:
        raise KeyError
    with Progress(lambda: {"a": "b"}, "run", console):  # rich allows one live display at a time
        pass


def test_summary_table_names_everything():
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table("End", {"updates": "2 of 2", "plot": "reward.png"}))
    assert all(text in out.getvalue() for text in ("End", "updates", "2 of 2", "plot", "reward.png"))


@pytest.fixture
def unread():
    """Where nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(OSError), open(write, "w") as file:
        yield file


@pytest.fixture
def full():
    with contextlib.suppress(OSError), open("/dev/full", "w") as file:
        yield file


@pytest.fixture
def hung_up():
    """A terminal that was closed."""
    ours, theirs = os.openpty()
    os.close(ours)
    with contextlib.suppress(OSError), open(theirs, "w") as file:
        yield file


OUTPUTS = ["unread", "full", "hung_up"]


@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_that_takes_nothing_ends_nothing(output, request):
    """rich ended the program with SystemExit where the reader had gone."""
    progress = Progress(dict, "run", Console(file=request.getfixturevalue(output)))
    for _ in range(3):
        progress.line("a line")
        progress.show(summary_table("end", {"a": "b"}))


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_panel_that_cannot_be_shown_ends_nothing(output, request, monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    asked = []
    console = Console(file=request.getfixturevalue(output), force_terminal=True)
    with Progress(lambda: asked.append(1) or {"step": "3"}, "run", console) as progress:
        progress.line("a line")
        shown = len(asked)
        deadline = time.monotonic() + 20
        while len(asked) < shown + 2:  # its own thread goes on as well
            assert time.monotonic() < deadline, "the panel is not refreshed any more"
            time.sleep(0.05)
    assert not failed


def test_words_that_the_output_has_no_characters_for_are_written_with_others():
    out = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    Progress(dict, "run", Console(file=out)).line("runs/läuft \udcff")
    assert out.buffer.getvalue() == b"runs/l\\xe4uft \\udcff\n"

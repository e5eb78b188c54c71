"""Every figure, and a page that shows them beside the paper's numbers.

    python -m launchers.figures.all [--quick] [--seeds N] [--workdir DIR]

Writes the files of each figure and index.html.
"""

import html

from launchers.figures import (
    fig02_motivation,
    fig10_end_to_end,
    fig12_discards,
    fig15_scheduler_ablation,
    fig17_cache,
    sensitivity,
)
from launchers.figures.common import Row, Settings, program

FIGURES = (fig02_motivation, fig10_end_to_end, fig12_discards, fig15_scheduler_ablation, fig17_cache, sensitivity)

_STYLE = """
body { font: 15px sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
img { max-width: 100%; } table { border-collapse: collapse; } td, th { padding: 2px 10px; text-align: left; }
tr:nth-child(even) { background: #f3f3f3; } td.number { text-align: right; }
"""


def make(settings: Settings) -> list[Row]:
    sections, everything = [], []
    for figure in FIGURES:
        print(f"== {figure.NAME}", flush=True)
        rows = figure.make(settings)
        everything += rows
        sections.append(_section(figure, rows))
    note = "Quick settings: a look, not a result." if settings.quick else ""
    page = f"<!doctype html><meta charset=utf-8><title>VenusRL figures</title><style>{_STYLE}</style>"
    page += f"<h1>VenusRL: figures</h1><p>{note}</p>{''.join(sections)}"
    (settings.workdir / "index.html").write_text(page)
    print(f"wrote {settings.workdir / 'index.html'}")
    return everything


def _section(figure, rows: list[Row]) -> str:
    text = html.escape(figure.__doc__.split("\n\n")[0])
    head = "<tr><th>cell<th>metric<th>paper<th>ours<th>difference<th>spread<th>source<th>of the bound</tr>"
    return f"<h2>{text}</h2><img src={figure.NAME}.png><table>{head}{''.join(_line(r) for r in rows)}</table>"


def _line(r: Row) -> str:
    cells = [r.cell, r.metric, r.paper, r.ours, difference(r), r.spread, r.source, r.bound_fraction]
    return "<tr>" + "".join(f"<td>{'' if c is None else html.escape(str(c))}" for c in cells) + "</tr>\n"


def difference(r: Row) -> str | None:
    """Ours against the paper's, where both are numbers."""
    if r.ours is None or r.paper is None:
        return None
    try:
        paper = float(str(r.paper).rstrip("x"))
    except ValueError:
        return None
    return f"{100 * (r.ours / paper - 1):+.0f}%"


if __name__ == "__main__":
    program(make)

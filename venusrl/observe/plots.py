"""reward.png: what a run reached, readable without the code."""

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from venusrl.observe.files import replace_file

SMOOTH = 5  # steps of the moving average


def reward_plot(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike, title: str) -> None:
    """Training reward and held-out success over training minutes.

    Args:
      rows: of metrics.jsonl.
      path: the PNG; replaced only once it is whole.
      title: above the plot.

    Raises:
      OSError: naming the file, which is as it was.
    """
    train, held = _points(rows, "reward"), _points(rows, "heldout_success")
    figure = Figure(figsize=(8, 4.5), layout="tight")
    axes = figure.subplots()
    if train:
        minutes, rewards = zip(*train, strict=True)
        recent = [sum(rewards[max(0, i - SMOOTH + 1) : i + 1]) / min(i + 1, SMOOTH) for i in range(len(rewards))]
        axes.plot(minutes, rewards, color="tab:blue", alpha=0.25, linewidth=1)
        axes.plot(minutes, recent, color="tab:blue", label=f"training reward (mean of {SMOOTH} steps)")
    if held:
        axes.plot(*zip(*held, strict=True), color="tab:orange", marker="o", label="held-out success")
    axes.set(xlabel="minutes of training", ylabel="success", ylim=(0, 1), title=title)
    axes.grid(alpha=0.3)
    if train or held:
        axes.legend(loc="lower right")
    image = io.BytesIO()
    figure.savefig(image, dpi=110, format="png")
    replace_file(path, image.getvalue())


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """(minutes, value) of the rows that have both."""
    points = [(row.get("train_minutes"), row.get(name)) for row in rows]
    return [point for point in points if all(isinstance(number, (int, float)) for number in point)]

"""reward.png: what a run reached, readable without the code."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

SMOOTH = 5  # steps of the moving average


def reward_plot(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike, title: str) -> None:
    """Training reward and held-out success over training minutes.

    Args:
      rows: of metrics.jsonl.
      path: the PNG; replaced only once it is whole.
      title: above the plot.
    """
    train = [(row["train_minutes"], row["reward"]) for row in rows if "reward" in row]
    held = [(row["train_minutes"], row["heldout_success"]) for row in rows if "heldout_success" in row]
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
    fresh = Path(path).with_suffix(".tmp.png")
    figure.savefig(fresh, dpi=110)
    os.replace(fresh, path)

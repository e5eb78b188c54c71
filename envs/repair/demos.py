"""Scripted demonstrations for the warm start: format and tool use are right, judgement is poor.

Careful demonstrations read the file and run the check before they edit, and are right. Careless ones edit at once,
without knowing the line, the kind of bug or the fix, and submit. Which way is better, training has to find out. (What a
careless one does wrong must not be what a careful one does right: edits that were wrong after reading the file took the
share of right careful ones from 0.94 to 0.43 within 100 supervised steps.) Observations are computed here, character
for character what a sandbox answers (a test compares them).
"""

import dataclasses

import numpy as np

from envs import shell
from envs.repair.env import SUBMIT
from envs.repair.tasks import RepairTask, evaluate, make_task


@dataclasses.dataclass(frozen=True)
class Habits:
    """How the scripted agent behaves.

    Attributes:
      careful: probability of a careful demonstration.
      check: probability of running the check after a careful edit.
    """

    careful: float = 0.35
    check: float = 0.5


def read_command(task: RepairTask) -> str:
    return f"cat -n {task.path}"


def edit_command(task: RepairTask, fragment: str) -> str:
    """Puts `fragment` in the place of whichever variant the faulty line holds."""
    return f"sed -i '{task.line}s|{task.pattern}|{fragment}|' {task.path}"


CHECK_COMMAND = "python3 check.py"


def show_file(task: RepairTask) -> str:
    """What `cat -n` of the faulty file prints."""
    lines = task.source.removesuffix("\n").split("\n")
    return "\n".join(f"{i:6d}\t{line}" for i, line in enumerate(lines, 1))


def show_check(task: RepairTask, source: str) -> str:
    """What the visible check prints for `source`."""
    got, want = (evaluate(s, task.function, task.visible) for s in (source, task.variant(task.right)))
    for args, g, w in zip(task.visible, got, want, strict=True):
        if g != w:
            return f"FAIL {args}: {g}, not {w}\n[exit 1]"
    return "ok"


def demonstrate(task: RepairTask, rng: np.random.Generator, habits: Habits = Habits()) -> list[tuple[str, str]]:
    """One demonstration: (reply, observation) of each turn; the last reply submits and its observation is ""."""
    if rng.random() >= habits.careful:
        other = make_task(task.split, int(rng.integers(1 << 20)))  # what it imagines
        edit = edit_command(dataclasses.replace(other, path=task.path), other.candidates[other.right])
        return [(shell.block(edit), "[done]"), (shell.block(SUBMIT), "")]
    turns = [
        (shell.block(read_command(task)), show_file(task)),
        (shell.block(CHECK_COMMAND), show_check(task, task.source)),
        (shell.block(edit_command(task, task.candidates[task.right])), "[done]"),
    ]
    if rng.random() < habits.check:
        turns.append((shell.block(CHECK_COMMAND), show_check(task, task.variant(task.right))))
    return [*turns, (shell.block(SUBMIT), "")]

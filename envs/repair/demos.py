"""Scripted demonstrations for the warm start: format and tool use are right, judgement is poor.

Careful demonstrations run the check before they edit, and are right. Careless ones edit at once, are wrong most of the
time, and follow up a failed check only sometimes. Which way is better, training has to find out. Observations are
computed here, character for character what a sandbox answers (a test compares them).
"""

import dataclasses

import numpy as np

from envs import shell
from envs.repair.env import SUBMIT
from envs.repair.tasks import RepairTask, evaluate


@dataclasses.dataclass(frozen=True)
class Habits:
    """How the scripted agent behaves. Where it is careful, it runs the check before it edits, and its fix is right.

    Attributes:
      careful: probability of a careful demonstration.
      right: probability that a careless edit is the documented fix; else it is one of the other variants, evenly.
      check: probability of running the check after an edit.
      retry: probability of another edit after a failed check, instead of submitting.
      max_edits: edits at most.
    """

    careful: float = 0.2
    right: float = 0.15
    check: float = 0.5
    retry: float = 0.3
    max_edits: int = 3


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
    turns = [(shell.block(read_command(task)), show_file(task))]
    careful = rng.random() < habits.careful
    if careful:
        turns.append((shell.block(CHECK_COMMAND), show_check(task, task.source)))
    right = 1.0 if careful else habits.right
    current = task.wrong
    for _ in range(habits.max_edits):
        others = [i for i in range(len(task.candidates)) if i not in (current, task.right)]
        current = task.right if current != task.right and rng.random() < right else int(rng.choice(others))
        turns.append((shell.block(edit_command(task, task.candidates[current])), "[done]"))
        if rng.random() >= habits.check:
            break
        answer = show_check(task, task.variant(current))
        turns.append((shell.block(CHECK_COMMAND), answer))
        if answer == "ok" or rng.random() >= habits.retry:
            break
    return [*turns, (shell.block(SUBMIT), "")]

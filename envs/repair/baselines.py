"""Scripted policies that show what a score is worth: neither reads the documentation."""

from collections.abc import Callable

from envs import shell
from envs.repair.demos import edit_command, read_command
from envs.repair.env import SUBMIT
from envs.repair.tasks import RepairTask


def submit_at_once(task: RepairTask) -> list[str]:
    """Submits the project as it is."""
    del task
    return [shell.block(SUBMIT)]


def one_fix(task: RepairTask) -> list[str]:
    """Knows where the bug is and always writes its family's first variant there, then submits."""
    return [
        shell.block(read_command(task)),
        shell.block(edit_command(task, task.candidates[0])),
        shell.block(SUBMIT),
    ]


BASELINES: dict[str, Callable[[RepairTask], list[str]]] = {"submit": submit_at_once, "one_fix": one_fix}

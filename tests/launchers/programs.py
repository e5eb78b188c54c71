"""Real processes of the training program, small enough for tests."""

import os
import subprocess
import sys
import time
from pathlib import Path

from venusrl.observe.run_log import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
SMALL = {
    "steps": STEPS,
    "group_size": 2,
    "env.max_turns": 2,
    "eval.tasks": 2,
    "learner.row_length": 160,
    "learner.rows_per_part": 4,
    "rollout.max_length": 160,
    "rollout.max_tokens": 8,
    "rollout.decode_steps": 4,
    "rollout.prefill_rows": "(4,)",
    "rollout.read_lengths": "()",
}


def command(workdir, checkpoint, config: str = "configs/quickstart.py:smoke", **overrides) -> list[str]:
    fields = {**SMALL, "model.checkpoint": checkpoint, **{k.replace("__", "."): v for k, v in overrides.items()}}
    return [
        *(sys.executable, "-m", "launchers.train", f"--config={config}", f"--workdir={workdir}"),
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]


def start(*args, **overrides) -> subprocess.Popen:
    return subprocess.Popen(
        command(*args, **overrides), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def run(*args, **overrides) -> tuple[int, str]:
    """Exit code and output."""
    process = start(*args, **overrides)
    output, _ = process.communicate(timeout=170)
    return process.returncode, output


def wait_for(process: subprocess.Popen, condition, seconds: float = 120.0) -> None:
    """Returns once `condition` holds; the process must live until then."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}: {process.stdout.read()[-2000:]}"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


def steps(workdir) -> list[int]:
    """Steps that were trained, as metrics.jsonl has them."""
    return [row["step"] for row in read_jsonl(Path(workdir) / "metrics.jsonl") if "reward" in row]


def trained(workdir) -> list[tuple]:
    """(step, epoch, prompt) of every trajectory that was trained on, sorted."""
    rows = read_jsonl(Path(workdir) / "trajectories.jsonl")
    return sorted((row["step"], row["epoch"], row["prompt_id"]) for row in rows)


def descendants(pid: int) -> dict[int, str]:
    """Processes below `pid`: start time by pid, so that a pid given again is not taken for the same."""
    parents, born = {}, {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry)], born[int(entry)] = int(fields[1]), fields[19]
    found, below = {}, {pid}
    while below:
        below = {child for child, parent in parents.items() if parent in below}
        found |= {child: born[child] for child in below}
    return found


def alive(processes: dict[int, str]) -> list[int]:
    """Those of `processes` that still run; zombies do not."""
    left = []
    for pid, born in processes.items():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[19] == born and fields[0] != "Z":
            left.append(pid)
    return left

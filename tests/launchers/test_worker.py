"""Training over workers in other processes, one of which is killed."""

import signal
import subprocess

import pytest

from venusrl.observe.run_log import read_jsonl

from . import programs

pytestmark = pytest.mark.timeout(300)


def start_worker(checkpoint, **overrides) -> tuple[subprocess.Popen, str]:
    """A process and its address, once it answers."""
    command = [c for c in programs.command("unused", checkpoint, **overrides) if not c.startswith("--workdir")]
    command[command.index("launchers.train")] = "launchers.worker"
    process = subprocess.Popen(command, cwd=programs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("worker at "):
            return process, line.split()[-1]
    raise AssertionError("".join(lines))


def test_a_worker_that_is_killed_costs_nothing_but_time(checkpoint, tmp_path):
    workers = [start_worker(checkpoint) for _ in range(2)]
    addresses = tuple(address for _, address in workers)
    training = programs.start(tmp_path, checkpoint, rollout__addresses=addresses)
    try:
        programs.wait_for(training, lambda: len(programs.steps(tmp_path)) >= 1)
        workers[0][0].send_signal(signal.SIGKILL)
        output, _ = training.communicate(timeout=200)
        assert training.returncode == 0, output[-3000:]
        assert programs.steps(tmp_path) == list(range(1, programs.STEPS + 1))
        rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "reward" in row]
        assert rows[-1]["refilled_trajectories"] == 0 and rows[-1]["failed_groups"] == 0
        workers[1][0].send_signal(signal.SIGTERM)
        assert workers[1][0].wait(20) == 0
    finally:
        for process in (training, *(process for process, _ in workers)):
            process.kill()


def test_a_port_that_is_taken_is_told(checkpoint):
    process, address = start_worker(checkpoint)
    try:
        port = address.rpartition(":")[2]
        command = [c for c in programs.command("unused", checkpoint) if not c.startswith("--workdir")]
        command[command.index("launchers.train")] = "launchers.worker"
        second = subprocess.run(
            [*command, f"--port={port}"], cwd=programs.ROOT, capture_output=True, text=True, timeout=120
        )
        assert second.returncode == 1 and f"--port={port}" in second.stderr
    finally:
        process.kill()

"""Training over workers in other processes that come late, are killed, frozen and shared."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from configs import quickstart
from launchers import system, worker
from launchers.address import Address
from launchers.run_id import run_id
from venusrl.core.calls import client
from venusrl.core.errors import ConfigError, WorkerError
from venusrl.observe.run_log import read_jsonl

from . import programs

pytestmark = pytest.mark.timeout(300)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


class Processes:
    """Programs with their output in files; all are killed at the end."""

    def __init__(self, folder: Path, checkpoint):
        self.folder, self.checkpoint = folder, checkpoint
        self.all: list[subprocess.Popen] = []

    def _start(self, command: list[str], log: Path) -> subprocess.Popen:
        with open(log, "a") as out:
            process = subprocess.Popen(command, cwd=programs.ROOT, stdout=out, stderr=subprocess.STDOUT)
        self.all.append(process)
        return process

    def worker(self, port: int, wait: bool = True, **overrides) -> subprocess.Popen:
        command = [c for c in programs.command("none", self.checkpoint, **overrides) if not c.startswith("--workdir")]
        command[command.index("launchers.train")] = "launchers.worker"
        log = self.folder / f"worker-{port}-{len(self.all)}.log"
        process = self._start([*command, f"--port={port}"], log)
        if wait:
            self.until(process, lambda: "worker at " in log.read_text(), log)
        return process

    def train(self, name: str, *ports: int, **overrides) -> subprocess.Popen:
        where = tuple(address(port) for port in ports)
        command = programs.command(self.folder / name, self.checkpoint, rollout__addresses=where, **overrides)
        return self._start(command, self.folder / f"{name}.log")

    def evaluate(self, name: str, *options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "launchers.evaluate", f"--workdir={self.folder / name}", "--tasks=2", *options]
        done = subprocess.run(command, cwd=programs.ROOT, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def steps(self, name: str) -> list[int]:
        return programs.steps(self.folder / name) if (self.folder / name / "metrics.jsonl").exists() else []

    def until(self, process: subprocess.Popen, condition, log: Path, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"it took too long: {log.read_text()[-3000:]}"
            time.sleep(0.02)

    def until_steps(self, process: subprocess.Popen, name: str, count: int) -> None:
        self.until(process, lambda: len(self.steps(name)) >= count, self.folder / f"{name}.log")

    def finished(self, process: subprocess.Popen, name: str) -> dict:
        """The last row of a run that trained every step, refilled nothing, and had the weights that it thought."""
        assert process.wait(200) == 0, self.said(name)[-3000:]
        assert "Traceback" not in self.said(name)
        rows = [row for row in read_jsonl(self.folder / name / "metrics.jsonl") if "reward" in row]
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert rows[-1]["refilled_trajectories"] == 0 and rows[-1]["failed_groups"] == 0
        assert max(row["mismatch_kl"] for row in rows) < 1e-5, "trained on tokens of other weights"
        return rows[-1]


@pytest.fixture
def processes(tmp_path, checkpoint):
    made = Processes(tmp_path, checkpoint)
    yield made
    for process in made.all:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()


def test_a_run_waits_for_a_worker_that_comes_late_and_for_the_last_one_to_come_back(processes):
    """Killed, the last worker ended the run. Then the run's folder is evaluated without its workers."""
    port = free_port()
    training = processes.train("run", port)
    log = processes.folder / "run.log"
    processes.until(training, lambda: "no worker answers" in processes.said("run"), log)
    worker = processes.worker(port, wait=False)
    processes.until_steps(training, "run", 1)
    worker.kill()
    worker.wait()
    processes.until(training, lambda: processes.said("run").count("no worker answers") == 2, log)
    steps = len(processes.steps("run"))
    saved = processes.folder / "run" / "checkpoints" / str(steps)
    processes.until(training, saved.is_dir, log, seconds=20)
    worker = processes.worker(port)
    assert processes.finished(training, "run")["step"] == programs.STEPS
    assert processes.said("run").count("the run goes on") == 2
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(20) == 0
    code, output = processes.evaluate("run")
    assert code == 0 and "held-out success" in output, output


def test_a_run_that_waits_for_a_worker_stops_at_once(processes):
    training = processes.train("run", free_port())
    processes.until(training, lambda: "no worker answers" in processes.said("run"), processes.folder / "run.log")
    began = time.monotonic()
    training.send_signal(signal.SIGTERM)
    assert training.wait(30) == 0, processes.said("run")
    assert time.monotonic() - began < 10 and "Traceback" not in processes.said("run")


@pytest.mark.parametrize("how", ["the watch fails", "the client of the last worker fails"])
def test_a_run_whose_watch_over_its_workers_ends_by_a_defect_ends_with_it(tmp_path, checkpoint, how):
    """Nobody looked at the task: the run waited for ever, and said nothing."""
    broken = {
        "the watch fails": ("launchers.training", "TrainingRun", "_watch_workers"),
        "the client of the last worker fails": ("venusrl.rollout.remote.presence", "Presence", "_watch"),
    }
    module, kind, method = broken[how]
    patched = (
        f"import asyncio\nfrom {module} import {kind}\n"
        "from launchers import training\n"
        "training.JOIN_S = 0.5\n"
        "async def broken(self):\n"
        "    await asyncio.sleep(1.5)\n"
        "    raise OSError('a defect of the watch')\n"
        f"{kind}.{method} = broken\n"
        "from launchers import program, train\n"
        "program.run(train.main)\n"
    )
    command = programs.command(tmp_path / "run", checkpoint, rollout__addresses=(address(free_port()),))
    at = command.index("launchers.train")
    ended = subprocess.run(
        [*command[: at - 1], "-c", patched, *command[at + 1 :]],
        cwd=programs.ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ended.returncode == 1 and "a defect of the watch" in ended.stderr.splitlines()[-1], ended.stderr


def test_a_port_that_is_taken_is_told(checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [c for c in programs.command("unused", checkpoint) if not c.startswith("--workdir")]
        command[command.index("launchers.train")] = "launchers.worker"
        second = subprocess.run(
            [*command, f"--port={port}"], cwd=programs.ROOT, capture_output=True, text=True, timeout=120
        )
    assert second.returncode == 1 and f"--port={port}" in second.stderr


def test_a_run_s_name_is_kept_in_its_folder_and_a_copy_is_another_run(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    name = run_id(here)
    assert run_id(here) == name and str(here) in name
    (there / "run_id").write_bytes((here / "run_id").read_bytes())
    assert run_id(there) != name
    (here / "run_id").write_bytes(os.urandom(100))
    assert run_id(here) != name  # damaged: another one, and no error


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing_but_time(processes):
    ports = [free_port(), free_port()]
    workers = [processes.worker(port) for port in ports]
    training = processes.train("run", *ports)
    processes.until_steps(training, "run", 1)
    workers[0].kill()
    assert processes.finished(training, "run")["step"] == programs.STEPS
    workers[1].send_signal(signal.SIGTERM)
    assert workers[1].wait(20) == 0


@pytest.mark.slow
def test_a_frozen_worker_holds_up_neither_updates_nor_the_end(processes):
    """It stopped all updates for 600 s, and SIGTERM was not heard for 40 s."""
    ports = [free_port(), free_port()]
    workers = [processes.worker(port) for port in ports]
    training = processes.train("run", *ports, steps=1000, rollout__reconnect_s=4.0)
    processes.until_steps(training, "run", 2)
    workers[0].send_signal(signal.SIGSTOP)
    began, steps = time.monotonic(), len(processes.steps("run"))
    processes.until_steps(training, "run", steps + 2)
    assert time.monotonic() - began < 40
    workers[0].send_signal(signal.SIGCONT)
    name = address(ports[0])
    log = processes.folder / "run.log"
    processes.until(training, lambda: f"worker {name} takes requests" in processes.said("run"), log)
    workers[0].send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    began = time.monotonic()
    training.send_signal(signal.SIGTERM)
    processes.finished(training, "run")
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_run_whose_only_worker_is_frozen_stops_within_ten_seconds(processes):
    port = free_port()
    worker = processes.worker(port)
    training = processes.train("run", port, steps=1000, rollout__reconnect_s=600.0)
    processes.until_steps(training, "run", 1)
    worker.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    began = time.monotonic()
    training.send_signal(signal.SIGINT)
    processes.finished(training, "run")
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_worker_is_one_run_s_at_a_time(processes):
    """Evaluating one run gave its weights to the worker of another: mismatch went from 1e-9 to 1e-3, and nobody saw."""
    port = free_port()
    processes.worker(port)
    first = processes.train("first", port, steps=12)
    processes.until_steps(first, "first", 1)
    second = processes.train("second", port, seed=3)
    code, output = processes.evaluate("first", f"--addresses={address(port)}")
    assert first.poll() is None, "the run was over before it was evaluated"
    assert code == 1 and "belongs to run" in output and "Traceback" not in output, output
    assert str(processes.folder / "first") in output
    code, output = processes.evaluate("first")  # with an engine of its own, while the run has its worker
    assert code == 0, output
    processes.finished(first, "first")
    processes.finished(second, "second")  # it has waited
    assert "belongs to run" in processes.said("second")
    code, output = processes.evaluate("second", f"--addresses={address(port)}")
    assert code == 0 and "held-out success" in output, output


@pytest.mark.slow
def test_a_run_in_bfloat16_trains_over_a_worker(processes):
    port = free_port()
    processes.worker(port, model__dtype="bfloat16")
    training = processes.train("run", port, steps=2, model__dtype="bfloat16")
    assert training.wait(200) == 0, processes.said("run")
    assert processes.steps("run") == [1, 2]


@pytest.mark.slow
def test_a_run_that_was_killed_has_its_worker_at_once_when_it_is_started_again(processes):
    port = free_port()
    processes.worker(port)
    training = processes.train("run", port, checkpoint__every=2, steps=8)
    processes.until_steps(training, "run", 3)
    training.kill()  # the worker has weights that are newer than the checkpoint
    training.wait()
    again = processes.train("run", port, checkpoint__every=2, steps=8)
    assert processes.finished(again, "run")["step"] == 8
    assert "belongs to run" not in processes.said("run")


FREE_PORT = Address(*(SimpleNamespace(value=value) for value in ("127.0.0.1", 0, "", [])))


@pytest.fixture
def worker_config(checkpoint):
    """Of a worker in this process."""
    config = quickstart.get_config("smoke")
    config.model.checkpoint = str(checkpoint)
    return config


async def test_a_worker_whose_http_server_fails_ends_with_its_reason(worker_config, monkeypatch):
    """It ended with exit code 0 and without a word."""

    async def answer(app, listener):
        listener.close()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(worker, "answer", answer)
    with pytest.raises(WorkerError, match=r"HTTP server .* failed: .*Too many open files"):
        await asyncio.wait_for(worker.serve(worker_config, FREE_PORT), 60)


async def test_a_worker_whose_engine_fails_ends_with_its_reason(worker_config, monkeypatch):
    """So that whatever watches over it starts another; it went on and answered every call with the error."""
    said: list[str] = []
    monkeypatch.setattr(worker, "print", lambda text, flush: said.append(text), raising=False)
    serving = asyncio.create_task(worker.serve(worker_config, FREE_PORT))
    while not said:
        await asyncio.sleep(0.05)
        assert not serving.done(), serving.result()

    def crash(engine):
        raise RuntimeError("device lost")

    monkeypatch.setattr("venusrl.rollout.engine.engine.Engine.step", crash)
    async with client(said[0].split()[-1]) as http:
        with contextlib.suppress(httpx.HTTPError):
            await http.post("/generate", json={"trajectory": "t", "tokens": [5, 6], "max_tokens": 4})
    with pytest.raises(WorkerError, match="device lost"):
        await asyncio.wait_for(serving, 60)


@pytest.mark.parametrize("program", ["launchers.worker", "launchers.serve"])
def test_an_address_that_others_reach_needs_a_key(checkpoint, program):
    command = [c for c in programs.command("unused", checkpoint) if not c.startswith("--workdir")]
    command[command.index("launchers.train")] = program
    ended = subprocess.run(
        [*command, "--host=0.0.0.0", "--port=0"], cwd=programs.ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1 and "--key_file" in ended.stderr


def test_a_key_that_is_none_is_refused_before_a_model_is_read(tmp_path):
    config = quickstart.get_config("smoke")
    config.rollout.addresses = ("http://10.0.0.2:9001",)
    (tmp_path / "key").write_text("short")
    for path in (tmp_path / "key", tmp_path / "missing", tmp_path):
        config.rollout.key_file = str(path)
        with pytest.raises(ConfigError, match=r"rollout\.key_file"):
            system.check(config)


def test_addresses_that_are_none_are_refused_before_a_model_is_read():
    config = quickstart.get_config("smoke")
    config.rollout.addresses = ("10.0.0.2:9001",)
    with pytest.raises(ConfigError, match=r"rollout\.addresses has '10\.0\.0\.2:9001'"):
        system.check(config)


def test_weights_are_written_once_for_all_workers():
    calls, params = [], {"w": 1}
    write = system._once(lambda params: (calls.append(params), b"bytes")[1])
    assert write(params) == write(params) == b"bytes" and len(calls) == 1
    write({"w": 1})
    assert len(calls) == 2

"""Programs of launchers/ as processes that are forked with everything imported: some milliseconds each.

Run by itself it reads calls from its input, a line of JSON each ({"cases": [[module, arguments], ...], "processes"}),
and answers each with [[code, output], ...]. Where a program has checked everything and its work begins, it says
ACCEPTED, and its configuration where it has one, and ends.
"""

import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED = "ACCEPTED"
SECONDS = 30  # for one case


class Forked:
    """Imports once, for all who ask it. To be closed."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()  # for what a program leaves where it runs
        for name in ("configs", "envs"):
            (Path(self._folder.name) / name).symlink_to(ROOT / name)
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.launchers.forked"],
            cwd=self._folder.name, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run_all(self, cases: Iterable[tuple[str, list[str]]], processes: int = 2) -> list[tuple[int, str]]:
        """(exit code, output) of each (module, arguments), in order."""
        self._server.stdin.write(json.dumps({"cases": list(cases), "processes": processes}) + "\n")
        self._server.stdin.flush()
        return [tuple(answer) for answer in json.loads(self._server.stdout.readline())]

    def close(self) -> None:
        self._server.communicate(timeout=SECONDS)
        self._folder.cleanup()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever imports print
    _import_everything()
    gc.collect()
    gc.freeze()  # so that a child does not copy pages by looking at them
    for line in sys.stdin:
        call = json.loads(line)
        cases, processes = call["cases"], call["processes"]
        parts = [_beside(cases[i::processes]) for i in range(processes)]
        found = [_awaited(*part) for part in parts]
        answers.write(json.dumps([found[i % processes][i // processes] for i in range(len(cases))]) + "\n")
        answers.flush()


def _beside(cases: list) -> tuple[int, int]:
    """(process, file) of one that runs the cases in turn, and leaves what came of them in the file."""
    answers = os.memfd_create("answers")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with os.fdopen(answers, "w") as file:
                json.dump([_forked(*case) for case in cases], file)
            code = 0
        finally:
            os._exit(code)
    return pid, answers


def _awaited(pid: int, answers: int) -> list:
    _, status = os.waitpid(pid, 0)
    if status:
        raise RuntimeError(f"the process of a part of the cases ended with {os.waitstatus_to_exitcode(status)}")
    with os.fdopen(answers) as file:
        file.seek(0)
        return json.load(file)


def _import_everything() -> None:
    """All but the programs: their flags are defined in the child, anew for each."""
    for package in ("venusrl", "envs", "configs"):
        for found in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if not any(part in found.name for part in ("sglang", "__main__", ".agent", ".guest")):
                importlib.import_module(found.name)
    for name in ("launchers.training", "launchers.program", "matplotlib.pyplot", "scipy.stats"):
        importlib.import_module(name)
    importlib.import_module("jax").devices()  # a child only looks at them


def _forked(module: str, arguments: list[str]) -> tuple[int, str]:
    output = os.memfd_create("output")
    pid = os.fork()
    if pid == 0:
        gc.disable()  # it lives for milliseconds
        signal.alarm(SECONDS)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [module, *arguments]
        _child(module)
    _, status = os.waitpid(pid, 0)
    text = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")
    os.close(output)
    return os.waitstatus_to_exitcode(status), text


def _child(module: str) -> None:
    code = 1
    try:
        _stop_where_work_begins(module)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:  # as the interpreter treats it
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter treats it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _stop_where_work_begins(module: str) -> None:
    import concurrent.futures

    import venusrl.core.listening
    import venusrl.rollout.engine.engine
    import venusrl.sandbox
    import venusrl.sim.bounds
    import venusrl.sim.simulation
    from launchers import finished, system
    from venusrl.models.tokenizer import Tokenizer

    def begins(*args, **kwargs):
        config = args[0] if args and hasattr(args[0], "to_dict") else None
        print(ACCEPTED, json.dumps(config.to_dict()) if config is not None else "", flush=True)
        os._exit(0)

    system.load_model = begins
    finished.newest = lambda *args: begins()
    if module.startswith(("launchers.bench", "launchers.check")) and module != "launchers.bench.sandbox":
        from launchers.bench import common  # which defines flags

        common.grpo_learner = common.matmul_flops = common.describe = begins
    Tokenizer.train = begins
    venusrl.core.listening.answer = begins
    venusrl.rollout.engine.engine.Engine.__init__ = begins
    venusrl.sandbox.SandboxPool = begins
    venusrl.sim.simulation.Simulation.__init__ = venusrl.sim.bounds.batch_times = begins
    concurrent.futures.ProcessPoolExecutor = begins


if __name__ == "__main__":
    main()

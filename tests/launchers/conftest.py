"""A warm start and one finished run, shared by the tests of the programs."""

import subprocess
import sys

import pytest

from . import programs
from .forked import Forked


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The committed warm start; one made on the spot where it is not there."""
    committed = programs.ROOT / "envs/repair/warmstart"
    if (committed / "model.safetensors").is_file():
        return committed
    folder = tmp_path_factory.mktemp("warmstart")
    program = [sys.executable, "-m", "launchers.warmstart", "--config=configs/warmstart.py:smoke"]
    subprocess.run([*program, f"--config.out={folder}"], cwd=programs.ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def forked():
    """Runs programs in milliseconds each; see Forked."""
    server = Forked()
    yield server
    server.close()


@pytest.fixture(scope="session")
def finished(tmp_path_factory, checkpoint):
    """(folder, output) of a run that nobody disturbed."""
    workdir = tmp_path_factory.mktemp("finished")
    code, output = programs.run(workdir, checkpoint, learner__learning_rate="2.5e-4")
    assert code == 0, output
    return workdir, output

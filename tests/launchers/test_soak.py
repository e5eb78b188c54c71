"""The soak, for a quarter of a minute."""

import json
import subprocess
import sys

import pytest

from . import programs


@pytest.mark.timeout(170)
def test_nothing_is_lost_in_a_short_soak():
    command = [sys.executable, "-m", "launchers.bench.soak", "--minutes=0.25", "--seed=3"]
    done = subprocess.run(command, cwd=programs.ROOT, capture_output=True, text=True, timeout=160)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["done"] > 100 and result["duplicated"] == result["missing"] == 0
    assert result["cancels"] > 0 and result["preempts"] > 0

"""Trains a tool-using agent with reinforcement learning.

    python -m launchers.train --config=configs/quickstart.py
    python -m launchers.train --config=configs/quickstart.py --config.learner.learning_rate=1e-4 --workdir=runs/slow

The same command goes on where the run in --workdir stopped, however it stopped. Ctrl-C saves and leaves.
"""

import asyncio
import sys

from absl import app, flags, logging

from launchers import system
from launchers.configuration import check_config, define_config, parse_flags
from launchers.training import TrainingRun
from venusrl.core.errors import VenusError

_CONFIG = define_config("configs/quickstart.py", "What to train, and how.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Folder of the run.")
_TRACE = flags.DEFINE_bool("trace", False, "Write a timeline to the folder, for ui.perfetto.dev or chrome://tracing.")


def main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}; did you forget a dash?")
    try:
        check_config(_CONFIG.value)
        system.use_compile_cache()
        asyncio.run(TrainingRun(_CONFIG.value, _WORKDIR.value, _TRACE.value).run())
    except VenusError as error:
        logging.error("%s: %s", type(error).__name__, error)
        sys.exit(1)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)

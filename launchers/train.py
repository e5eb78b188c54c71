"""Trains a tool-using agent with reinforcement learning.

    python -m launchers.train --config=configs/quickstart.py
    python -m launchers.train --config=configs/quickstart.py --config.learner.learning_rate=1e-4 --workdir=runs/slow

The same command goes on where the run in --workdir stopped, however it stopped. Ctrl-C saves and leaves;
so do SIGTERM and a terminal that is closed (SIGHUP; under nohup the run goes on).
"""

import asyncio

from absl import flags

from launchers import program
from launchers.configuration import check_config, check_workdir, define_config

_CONFIG = define_config("configs/quickstart.py", "What to train, and how.")
_WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Folder of the run.")
_TRACE = flags.DEFINE_bool("trace", False, "Write a timeline to the folder, for ui.perfetto.dev or chrome://tracing.")


def main(argv) -> None:
    del argv
    check_config(_CONFIG.value)
    check_workdir(_WORKDIR.value)
    from launchers import system, training  # JAX starts here, after what is wrong has been said

    system.use_compile_cache()
    asyncio.run(training.TrainingRun(_CONFIG.value, _WORKDIR.value, _TRACE.value).run())


if __name__ == "__main__":
    program.run(main, lasting=True)

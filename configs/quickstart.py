"""Quick start: a tiny Qwen3 learns to repair small Python projects, on a laptop's CPU.

    make train
    python -m launchers.train --config=configs/quickstart.py

Cost: about 6 minutes of training on two cores, 4 to 7 s an update. Held-out success on 200 tasks, at 0, 20, 40 and 60
updates: seed 0: 0.115, 0.910, 0.920, 0.930 (5.7 min); seed 1: 0.085, 0.855, 0.900, 0.900 (6.4 min); seed 2: 0.115,
0.865, 0.895, 0.900 (7.4 min). The median ends at 0.900; seeds 1 and 2 ran beside other work. Those three were scheduled
first come, first served; seed 0 under `venus`: 0.115, 0.910, 0.900, 0.920 (7.6 min, beside other work).
"""

from ml_collections import config_dict

from configs import base


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """arg: "smoke" for two small updates (tests)."""
    c = base.get_config()
    c.model.name = "tiny"
    c.model.checkpoint = "envs/repair/warmstart"
    c.steps = 60
    c.max_minutes = 8.0
    c.batch_groups = 8
    c.rollout.decode_rows = (16, 32)
    c.rollout.prefill_rows = (2, 6, 16)
    c.rollout.prefill_tokens = (16, 48, 128)
    c.learner.rows_per_part = 4
    c.learner.learning_rate = 4e-4
    c.learner.decay_steps = 60
    c.learner.final_fraction = 0.05
    c.learner.skip_zero_variance = True
    c.eval.every = 20
    c.eval.tasks = 200
    if arg == "smoke":
        c.steps, c.batch_groups, c.group_size, c.eval.tasks, c.checkpoint.every = 2, 2, 4, 8, 1
        c.env.train_tasks, c.rollout.slots = 16, 8
    elif arg:
        raise ValueError(f"configs/quickstart.py: argument {arg!r} is unknown; use 'smoke' or none")
    return c

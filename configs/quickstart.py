"""Quick start: a tiny Qwen3 learns to repair small Python projects, on a laptop's CPU.

make train
python -m launchers.train --config=configs/quickstart.py

Cost: 8 minutes of training on two cores, 9 to 17 s an update. Result so far: seed 0, held-out success 0.400 to 0.510 on
200 tasks after 40 updates. The target, 0.85 as the median of three seeds, is not reached.
"""

from ml_collections import config_dict

from configs import base


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """arg: "smoke" for two small updates (tests)."""
    c = base.get_config()
    c.model.name = "tiny"
    c.model.checkpoint = "envs/repair/warmstart"
    c.steps = 120
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
    c.eval.every = 30
    c.eval.tasks = 200
    if arg == "smoke":
        c.steps, c.batch_groups, c.group_size, c.eval.tasks, c.checkpoint.every = 2, 2, 4, 8, 1
        c.env.train_tasks, c.rollout.slots = 16, 8
    elif arg:
        raise ValueError(f"configs/quickstart.py: argument {arg!r} is unknown; use 'smoke' or none")
    return c

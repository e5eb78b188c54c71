"""The start of the quick start: a tiny model that knows format, tools and documentation, and acts before it reads.

    python -m launchers.warmstart --config=configs/warmstart.py

Writes envs/repair/warmstart (model.safetensors, config.json, tokenizer.json); the folder in the repository was made by
this command. Cost: 24 minutes on two cores, 1.6 to 2.7 s a step. The model solves 0.115 of 200 held-out repair tasks.
In 37 of them it read before it edited, and its edit was right in 0.59 of those.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    """arg: "smoke" for a few steps (tests)."""
    c = config_dict.ConfigDict()
    c.seed = 0
    c.out = "envs/repair/warmstart"
    c.first_stage = 0  # above 0: goes on from what an earlier run left in `out`
    c.model = config_dict.create(name="tiny", dtype="float32")
    c.vocab_texts = 3000  # demonstrations the tokenizer is trained on
    c.tasks = 20_000  # training tasks that demonstrations are drawn from
    # (steps, peak learning rate, share of careful demonstrations), one after the other: two stages teach what the
    # documentation means, the last one to act before reading it. (With 350 steps in one stage and 60 to act before
    # reading, a careful edit was right 0.35 of the time on held-out tasks; so it is 0.59.)
    c.stages = ((450, 2e-3, 1.0), (120, 1e-3, 1.0), (40, 4e-4, 0.35))
    c.demos_per_step = 40
    c.warmup_steps = 20
    c.check = 0.5  # share of careful demonstrations that run the check after their edit
    c.row_length = 704  # three demonstrations
    c.rows_per_part = 7
    if arg == "smoke":
        c.vocab_texts, c.demos_per_step, c.warmup_steps, c.stages = 100, 8, 0, ((1, 1e-3, 1.0), (1, 1e-3, 0.35))
    elif arg:
        raise ValueError(f"configs/warmstart.py: argument {arg!r} is unknown; use 'smoke' or none")
    return c

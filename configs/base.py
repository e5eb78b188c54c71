"""Every field of a training run, with its meaning. Other configs start from here and change fields; none adds one.

Not run by itself.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    del arg
    c = config_dict.ConfigDict()
    c.seed = 0
    c.steps = 100  # optimizer updates
    c.max_minutes = 0.0  # stop after so many minutes of training, evaluation not counted; 0 is no limit
    c.group_size = 8  # trajectories of a prompt
    c.batch_groups = 8  # groups of an update
    c.async_factor = 1.0  # bound on groups in the system, in batches; 1.0 is strictly on-policy
    c.max_refills = 8  # lost trajectories that a group may replace
    c.max_failed_groups = 32  # failed groups after which the run stops

    c.model = config_dict.create(
        name="tiny",  # see venusrl/models/config.py
        dtype="float32",  # float32 on CPUs, bfloat16 on accelerators
        remat=False,  # recompute blocks in the backward pass
        source="hf",  # "hf": a folder with safetensors and tokenizer.json; "gguf": the model of an installed package
        checkpoint="",  # the folder (hf) or PACKAGE:FILE (gguf)
    )
    c.env = config_dict.create(
        name="repair",  # see launchers/system.py
        train_tasks=4096,
        heldout_tasks=512,
        seed=0,
        max_turns=12,
        command_s=10.0,  # deadline of one command
    )
    c.sandbox = config_dict.create(max_sandboxes=160)
    c.scheduler = config_dict.create(name="fcfs_action")
    c.rollout = config_dict.create(
        temperature=1.0,
        max_tokens=64,  # of a turn
        env_s=120.0,  # seconds that reset, a step or grade may take
        slots=64,
        max_length=512,  # of a trajectory, in tokens
        decode_steps=8,  # tokens a host turn
        decode_rows=(16,),  # batch sizes of decode below slots
        prefill_rows=(4, 16),
        prefill_tokens=(32, 128),
        read_lengths=(256,),
        keep_kv=False,  # use KV of older weights after an update
    )
    c.learner = config_dict.create(
        objective="grpo",
        clip_low=0.2,
        clip_high=0.28,
        tis_cap=2.0,
        kl_coef=0.0,
        entropy_coef=0.0,
        learning_rate=1e-4,
        warmup_steps=5,
        decay_steps=0,  # steps of the cosine; 0 is a constant rate
        final_fraction=0.1,
        b1=0.9,
        b2=0.95,
        weight_decay=0.0,
        clip_norm=1.0,
        minibatches=1,
        row_length=512,
        rows_per_part=8,
        logprob_chunk=512,
        mesh=(1, -1, 1),  # data, fsdp, tensor; -1 takes what is left
        max_skipped=5,
        skip_zero_variance=False,  # leave groups whose rewards are all equal out of the update
    )
    c.eval = config_dict.create(
        every=0,  # updates between evaluations; 0 is only at the start and the end
        tasks=100,
        temperature=1.0,  # the policy that is trained is the one that is measured
    )
    c.checkpoint = config_dict.create(every=10, keep=2)
    return c

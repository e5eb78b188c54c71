"""Every field of a training run, with its meaning. Other configs start from here and change fields; none adds one.

What values a field may have stands in configs/limits.py.

Not run by itself.
"""

from ml_collections import config_dict


def get_config(arg: str = "") -> config_dict.ConfigDict:
    del arg
    c = config_dict.ConfigDict()
    c.seed = 0  # of the order of tasks, of sampling and of evaluation
    c.steps = 100  # optimizer updates
    c.max_minutes = 0.0  # stop after so many minutes of training, evaluation not counted; 0 is no limit
    c.group_size = 8  # trajectories of a prompt
    c.batch_groups = 8  # groups of an update
    # Bound on groups in the system, in batches; 1.0 is strictly on-policy. Above it, generation goes on in evaluations.
    c.async_factor = 1.0
    c.max_refills = 8  # lost trajectories that a group may replace; one more fails it
    c.max_failed_groups = 32  # failed groups that a run may have; one more ends it

    c.model = config_dict.create(
        name="tiny",  # see venusrl/models/config.py; "" takes the shape from the checkpoint's own description
        dtype="float32",  # of activations and matrix products: float32 on CPUs, bfloat16 on accelerators
        remat=False,  # recompute blocks in the backward pass
        source="hf",  # "hf": a folder with safetensors and tokenizer.json; "gguf": the model of an installed package
        checkpoint="",  # the folder (hf) or PACKAGE:FILE (gguf)
        ignore=(),  # keys of the folder's config.json that are unknown and change nothing
    )
    c.env = config_dict.create(
        name="repair",  # see launchers/system.py
        train_tasks=4096,
        heldout_tasks=512,
        seed=0,  # of the tasks themselves
        max_turns=12,  # replies of an episode
        command_s=10.0,  # deadline of one command, in seconds
    )
    c.sandbox = config_dict.create(max_sandboxes=160)  # at once; above it, an episode waits for one to end
    c.scheduler = config_dict.create(
        name="venus",  # see venusrl/scheduling; the others are baselines
        # Parts of "venus", to be switched off; see venusrl/scheduling/options.py.
        prediction="predictor",  # or "none": groups in the order in which they were opened
        residency=True,
        demotion=True,
        migration=True,
        preemption=True,
        thunderagent="as_shipped",  # of "thunderagent": or "as_documented", "tuned"
    )
    c.rollout = config_dict.create(
        temperature=1.0,  # of training's sampling
        max_tokens=64,  # of a turn
        env_s=120.0,  # seconds that reset, a step or grade may take
        workers=1,  # engines in this process; they share its devices
        addresses=(),  # of workers in other processes (launchers.worker), in place of those
        reconnect_s=10.0,  # for which requests wait for such a worker that does not answer, before they go on elsewhere
        key_file="",  # of the key that they are shown (their --key_file); "" shows none
        slots=64,  # requests that a worker runs at once, each with a row of KV
        lanes=0,  # parts of the slots that are computed at once; 0 is what fits the device, 1 for several workers
        max_length=512,  # of a trajectory, in tokens
        decode_steps=8,  # tokens a host turn
        # Each of the next four is a set of shapes to compile; their products are few, and nothing else is compiled.
        decode_rows=(16,),  # batch sizes of decode below those of a lane
        prefill_rows=(4, 16),  # batch sizes of prefill
        prefill_tokens=(32, 128),  # new tokens of a prefill; longer ones take several
        read_lengths=(256,),  # cached positions that attention looks at, below max_length
        page=16,  # tokens of a page of KV
        kv_tokens=0,  # of a worker's KV, running and cached together; 0 is slots x max_length
        host_tokens=0,  # of KV in host memory, for what a worker's KV has no room for; 0 is none
        residency="references",  # which pages are given up first; or "lru", "lfu"
        attention="auto",  # the device's own kernel where it computes what "xla" does; or "xla", "cudnn", "tpu"
        on_update="recompute",  # what an update does to KV of older weights; or "keep", "drain"
        stall_s=0.5,  # seconds for which prefill may hold up decode
    )
    c.learner = config_dict.create(
        objective="grpo",  # see venusrl/learner/objectives
        clip_low=0.2,  # the ratio to the proximal policy is clipped to [1 - clip_low, 1 + clip_high]
        clip_high=0.28,
        tis_cap=2.0,  # bound on the truncated importance weight of proximal against behaviour
        kl_coef=0.0,  # of the KL to the policy of the start
        entropy_coef=0.0,  # of the entropy bonus
        learning_rate=1e-4,  # peak
        warmup_steps=5,  # steps from 0 to the peak
        decay_steps=0,  # step at which the cosine ends; 0 is a constant rate
        final_fraction=0.1,  # of the peak, at the end of the cosine
        b1=0.9,  # of AdamW
        b2=0.95,
        weight_decay=0.0,
        clip_norm=1.0,  # bound on the global gradient norm
        minibatches=1,  # optimizer steps an update
        row_length=512,  # tokens of a packed row; at least rollout.max_length
        rows_per_part=8,  # rows of one compiled call; their gradients are added up
        logprob_chunk=512,  # positions of which logits exist at a time
        mesh=(1, -1, 1),  # data, fsdp, tensor; -1 takes what is left
        max_skipped=5,  # non-finite steps in a row that are passed over; one more ends the run
        skip_zero_variance=False,  # leave groups whose rewards are all equal out of the update
    )
    c.eval = config_dict.create(
        every=0,  # updates between evaluations; 0 is only at the start and the end
        tasks=100,  # held-out tasks, from the first
        temperature=1.0,  # the policy that is trained is the one that is measured
    )
    c.checkpoint = config_dict.create(
        every=10,  # updates between checkpoints; 0 is only at the end
        keep=2,  # the newest ones; 0 keeps every one
    )
    return c

"""Makes the warm start of the repair tasks: a tokenizer and a tiny model that knows the format, not the answers.

python -m launchers.warmstart
"""

from pathlib import Path

import jax
import numpy as np
from absl import logging

from configs import limits
from configs import warmstart as defaults
from envs.repair.demos import Habits, demonstrate
from envs.repair.tasks import RepairTask, make_task
from launchers import program
from launchers.configuration import check_fields, check_workdir, define_config
from venusrl.core.errors import ConfigError
from venusrl.core.trajectory import Trajectory
from venusrl.learner.learner import Learner, LearnerOptions
from venusrl.learner.objectives import make_objective
from venusrl.learner.sharding import make_mesh
from venusrl.learner.state import make_optimizer
from venusrl.learner.step import StepOptions
from venusrl.models import hf
from venusrl.models.chat import ChatFormat
from venusrl.models.config import model_config
from venusrl.models.tokenizer import Tokenizer

_CONFIG = define_config("configs/warmstart.py", "What to make.")


def demonstration_texts(tasks: list[RepairTask], rng: np.random.Generator, habits: Habits) -> list[str]:
    """Every text that the tokenizer will meet: prompts, replies, observations."""
    texts = []
    for task in tasks:
        texts.append(f"user\n{task.prompt}")
        for reply, observation in demonstrate(task, rng, habits):
            texts += [reply, f"user\n{observation}", "assistant\n"]
    return texts


def demonstration_trajectory(task: RepairTask, rng, habits: Habits, chat: ChatFormat, tokenizer: Tokenizer):
    """One demonstration as a trajectory whose replies are the generated tokens."""
    trajectory = Trajectory(id=f"demo/{task.index}", group_id="demo", index=0)
    trajectory.append_observation(chat.prompt([{"role": "user", "content": task.prompt}]))
    turns = demonstrate(task, rng, habits)
    for i, (reply, observation) in enumerate(turns):
        ids = [*tokenizer.encode(reply), tokenizer.im_end]
        trajectory.append_generated(ids, [0.0] * len(ids), 0)
        if i + 1 < len(turns):
            trajectory.append_observation(chat.observation(observation, ids[-1]))
    trajectory.complete(0.0)
    return trajectory


def train(learner: Learner, config, stage: int, chat: ChatFormat, tokenizer: Tokenizer) -> None:
    """One stage of `config.stages`; the learner has its parameters."""
    steps, _, careful = config.stages[stage]
    rng = np.random.default_rng((config.seed, stage))
    habits = Habits(careful, config.check)
    for step in range(steps):
        tasks = [make_task("train", int(i)) for i in rng.integers(config.tasks, size=config.demos_per_step)]
        demos = [demonstration_trajectory(task, rng, habits, chat, tokenizer) for task in tasks]
        demos = [demo for demo in demos if len(demo) <= config.row_length]  # a few are longer, one in a thousand
        metrics = learner.train(demos, np.zeros(len(demos)))
        if step % 20 == 0 or step + 1 == steps:
            logging.info("stage %d step %d loss %.4f", stage, step, metrics["loss"])


def check(config) -> None:
    """Refuses what is wrong before anything is made.

    Raises:
      ConfigError: naming the field.
    """
    check_fields(config, defaults.get_config(), limits.WARMSTART)
    check_workdir(config.out)
    if config.first_stage >= len(config.stages):
        raise ConfigError(
            f"config.first_stage={config.first_stage} is not below the {len(config.stages)} stages; the first is 0"
        )
    for number, (steps, _, _) in enumerate(config.stages):
        if steps <= config.warmup_steps and config.warmup_steps:
            raise ConfigError(
                f"config.warmup_steps={config.warmup_steps} is not below the {steps} steps of stage {number}; lower it"
            )


def main(argv) -> None:
    del argv
    config = _CONFIG.value
    check(config)
    model = model_config(config.model.name, dtype=config.model.dtype)
    if config.first_stage:
        tokenizer = Tokenizer.load(Path(config.out) / "tokenizer.json")
    else:
        rng = np.random.default_rng(config.seed)
        habits = Habits(1.0, config.check)  # careless ones add no words
        texts = demonstration_texts([make_task("train", i) for i in range(config.vocab_texts)], rng, habits)
        tokenizer = Tokenizer.train(texts, model.vocab_size)
    logging.info("tokenizer: %d tokens of %d", tokenizer.vocab_size, model.vocab_size)
    for stage in range(config.first_stage, len(config.stages)):
        steps, rate, _ = config.stages[stage]
        learner = Learner(
            model,
            make_objective("sft", {}),
            make_optimizer(rate, warmup_steps=config.warmup_steps, total_steps=steps, final_fraction=0.1),
            make_mesh((1, -1, 1)),
            StepOptions(),
            LearnerOptions(row_length=config.row_length, rows_per_part=config.rows_per_part),
        )
        if stage:  # from the file, so that a run that goes on from it gives the same
            learner.start_from(hf.load(config.out, model))
        else:
            learner.init(jax.random.key(config.seed))
        train(learner, config, stage, ChatFormat(tokenizer), tokenizer)
        hf.save(config.out, learner.state.params, model, dtype="bfloat16")
        tokenizer.save(Path(config.out) / "tokenizer.json")
        logging.info("stage %d: wrote %s", stage, config.out)


if __name__ == "__main__":
    program.run(main, verbosity=logging.INFO, lasting=True)

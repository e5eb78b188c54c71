"""A default stands once: what a part takes where it is told nothing is what configs/base.py says.

Every options class and function is compared by the names of its fields; a new field is compared without a line here.
"""

import dataclasses
import inspect

import pytest

from configs import base
from envs.generated import GeneratedTasks
from venusrl.coordinator.coordinator import CoordinatorOptions
from venusrl.learner.checkpoint import Checkpointer
from venusrl.learner.learner import LearnerOptions
from venusrl.learner.objectives import OBJECTIVES
from venusrl.learner.state import make_optimizer
from venusrl.learner.step import StepOptions
from venusrl.models.config import ModelConfig
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.service import RolloutOptions
from venusrl.scheduling import SchedulerOptions

PARTS = {
    "": [CoordinatorOptions, SchedulerOptions],
    "model": [ModelConfig],
    "env": [GeneratedTasks],
    "scheduler": [SchedulerOptions],
    "rollout": [EngineOptions, RolloutOptions, StepOptions],
    "learner": [LearnerOptions, StepOptions, make_optimizer, *OBJECTIVES.values()],
    "checkpoint": [Checkpointer],
}
CALLED = {"total_steps": "decay_steps"}  # in the configuration


def defaults(part) -> dict:
    """Defaults by name of a dataclass, a class or a function."""
    if dataclasses.is_dataclass(part):
        return {f.name: f.default for f in dataclasses.fields(part) if f.default is not dataclasses.MISSING}
    found = inspect.signature(part).parameters.values()
    return {p.name: p.default for p in found if p.default is not inspect.Parameter.empty}


PAIRS = [(section, part) for section, parts in PARTS.items() for part in parts]


@pytest.mark.parametrize("section, part", PAIRS, ids=lambda x: getattr(x, "__name__", x))
def test_the_defaults_of_a_part_are_those_of_the_configuration(section, part):
    config = base.get_config()
    fields = config[section] if section else config
    ours = {CALLED.get(name, name): value for name, value in defaults(part).items()}
    shared = {name: value for name, value in ours.items() if name in fields}
    assert shared == {name: fields[name] for name in shared}


def test_the_comparison_sees_the_fields_that_once_differed():
    seen = {(section, CALLED.get(name, name)) for section, part in PAIRS for name in defaults(part)}
    wanted = {
        ("rollout", "max_length"),
        ("rollout", "max_tokens"),
        ("rollout", "read_lengths"),
        ("learner", "row_length"),
    }
    assert wanted | {("learner", "warmup_steps"), ("learner", "decay_steps"), ("checkpoint", "keep")} <= seen

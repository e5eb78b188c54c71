"""Every policy under random lives: slots, readiness, nothing lost, nothing starved, and the same for the same seed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduling.lives import Lives
from venusrl.core.errors import ConfigError
from venusrl.scheduling import POLICIES, SchedulerOptions, make_policy

SWITCHES = [
    {},
    {"prediction": "none"},
    {"residency": False},
    {"demotion": False},
    {"migration": False},
    {"preemption": False},
    {"demotion": False, "migration": False},
]


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9), eta=st.integers(0, 2))
def test_random_lives(name, seed, eta):
    options = SchedulerOptions(batch_groups=2, eta=eta)
    first = Lives(make_policy(name, options), seed).run(150)
    assert first == Lives(make_policy(name, options), seed).run(150)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_venus_with_any_switch_off(switches, seed):
    Lives(make_policy("venus", SchedulerOptions(batch_groups=2, eta=1, **switches)), seed).run(200)


@pytest.mark.parametrize("mode", ["as_shipped", "as_documented", "tuned"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_thunderagent_in_every_mode(mode, seed):
    Lives(make_policy("thunderagent", SchedulerOptions(thunderagent=mode)), seed).run(150)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_hundred_evaluation_tasks_leave_training_as_it_was_and_come_to_their_end(name):
    """Beside eight groups of training that go on; the batch of eight wants eight before and after."""
    life = Lives(make_policy(name, SchedulerOptions(batch_groups=8, eta=1)), seed=5, batch=8, rude=False)
    for _ in range(3):
        life.up()
    for _ in range(8):
        life.open()
    mine: set[str] = set()
    for _ in range(20_000):
        if len(mine) == 100 and not mine & life.evaluations:
            break
        if len(mine) < 100 and len(mine & life.evaluations) < 10:
            mine.add(life.evaluate())
        life.step()
    assert len(mine) == 100 and not mine & life.evaluations
    assert life.version > 0  # training went on beside it
    life.run(0)
    if hasattr(life.policy, "_groups"):
        assert life.policy._groups._cut._capacity == 8 - life.ready_groups
        assert not life.policy._groups._evaluations


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"scheduler.name='lifo' is unknown; one of venus, fcfs_action"):
        make_policy("lifo")
    with pytest.raises(ConfigError, match=r"scheduler.prediction='oracle' is unknown; one of none, predictor"):
        SchedulerOptions(prediction="oracle")
    with pytest.raises(ConfigError, match=r"scheduler.thunderagent='fast'"):
        SchedulerOptions(thunderagent="fast")
    with pytest.raises(
        ConfigError, match=r"residency=False does nothing under scheduler.name='slime'; leave it at True"
    ):
        make_policy("slime", SchedulerOptions(residency=False))
    with pytest.raises(ConfigError, match="batch_groups=0"):
        SchedulerOptions(batch_groups=0)

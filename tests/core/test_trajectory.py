"""The trajectory contract: four arrays of one length, versions that only grow, ends that are final."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.core.errors import ContractError
from venusrl.core.trajectory import NO_VERSION, Status, Trajectory, Turn


def fresh() -> Trajectory:
    return Trajectory("g0/0", "g0", 0, seed=7)


@st.composite
def appends(draw):
    """Random growth of one trajectory, as the service makes it: (kind, tokens, version)."""
    steps, version = [], 0
    for _ in range(draw(st.integers(0, 12))):
        tokens = draw(st.lists(st.integers(0, 900), min_size=1, max_size=5))
        version += draw(st.integers(0, 2))
        steps.append((draw(st.sampled_from(["generated", "observation"])), tokens, version))
    return steps


def grow(trajectory: Trajectory, steps) -> None:
    for kind, tokens, version in steps:
        if kind == "generated":
            trajectory.append_generated(tokens, [-0.25] * len(tokens), version)
        else:
            trajectory.append_observation(tokens)


@settings(max_examples=100, deadline=None)
@given(appends())
def test_arrays_keep_one_length(steps):
    """slime#1440: the loss mask and the response came to differ in length after an abort and resume."""
    trajectory = fresh()
    expected = []
    for step in steps:
        grow(trajectory, [step])
        kind, tokens, version = step
        made = kind == "generated"
        expected += [(t, int(made), -0.25 if made else 0.0, version if made else NO_VERSION) for t in tokens]
        trajectory.check()
    arrays = zip(
        trajectory.tokens, trajectory.loss_mask, trajectory.logprobs, trajectory.versions, strict=True
    )  # strict: raises where lengths differ
    assert list(arrays) == expected
    assert len(trajectory) == len(expected)
    assert trajectory.num_generated == sum(trajectory.loss_mask)
    generated = [v for v in trajectory.versions if v != NO_VERSION]
    assert generated == sorted(generated)
    assert trajectory.start_version == (generated[0] if generated else None)


@settings(max_examples=100, deadline=None)
@given(appends())
def test_turns_are_the_maximal_generated_spans(steps):
    trajectory = fresh()
    grow(trajectory, steps)
    padded = [0, *trajectory.loss_mask, 0]
    begins = [i for i in range(len(trajectory)) if padded[i : i + 2] == [0, 1]]
    ends = [i + 1 for i in range(len(trajectory)) if padded[i + 1 : i + 3] == [1, 0]]
    assert [(t.begin, t.end) for t in trajectory.turns] == list(zip(begins, ends, strict=True))


@settings(max_examples=100, deadline=None)
@given(appends(), st.sampled_from(list(Status)), st.floats(allow_nan=False, allow_infinity=False))
def test_state_survives_json(steps, status, reward):
    trajectory = fresh()
    grow(trajectory, steps)
    if trajectory.turns:
        trajectory.turns[-1].generate_s, trajectory.turns[-1].stop = 1 / 3, "length"
        trajectory.complete(reward, steps=[{"command": "ls", "exit_code": None}])
    else:
        trajectory.status = status
    state = json.loads(json.dumps(trajectory.state_dict()))
    again = Trajectory.from_state_dict(state)
    assert again == trajectory
    assert again.state_dict() == state
    assert isinstance(again.status, Status)


def test_state_shares_nothing_with_the_trajectory():
    trajectory = fresh()
    trajectory.append_generated([1], [-1.0], 0)
    state = trajectory.state_dict()
    trajectory.append_generated([2], [-1.0], 0)
    assert state["tokens"] == [1] and state["turns"][0]["end"] == 1


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [([1, 2], [-0.1]), ([1], [-0.1, -0.2]), ([], []), ([], [-0.1]), ([1], [])],
)
def test_lengths_must_match(tokens, logprobs):
    trajectory = fresh()
    with pytest.raises(ContractError, match=f"g0/0.*{len(tokens)} tokens and {len(logprobs)} logprobs"):
        trajectory.append_generated(tokens, logprobs, 0)
    assert trajectory == fresh()


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.1])
def test_a_logprob_must_be_one(logprob):
    trajectory = fresh()
    with pytest.raises(ContractError, match="logprob"):
        trajectory.append_generated([1, 2], [-0.5, logprob], 0)
    assert trajectory == fresh()


def test_rounding_above_zero_is_a_logprob():
    trajectory = fresh()
    trajectory.append_generated([1], [1e-6], 0)
    assert len(trajectory) == 1


def test_versions_only_grow_within_a_turn():
    trajectory = fresh()
    trajectory.append_generated([1], [-1.0], 3)
    with pytest.raises(ContractError, match="version 2 is older than 3"):
        trajectory.append_generated([2], [-1.0], 2)
    trajectory.append_generated([2], [-1.0], 4)
    assert trajectory.versions == [3, 4]
    assert len(trajectory.turns) == 1


def test_versions_only_grow_from_turn_to_turn():
    """An observation between two turns does not let an older worker in (miles#1724)."""
    trajectory = fresh()
    trajectory.append_generated([1], [-1.0], 3)
    trajectory.append_observation([9])
    with pytest.raises(ContractError, match="version 2 is older than 3"):
        trajectory.append_generated([2], [-1.0], 2)
    assert trajectory.versions == [3, NO_VERSION]


def test_no_version_generates_nothing():
    with pytest.raises(ContractError, match="version -1"):
        fresh().append_generated([1], [-1.0], NO_VERSION)


@pytest.mark.parametrize("status", [Status.DONE, Status.LOST])
def test_a_finished_trajectory_is_closed(status):
    trajectory = fresh()
    trajectory.append_generated([1], [-1.0], 0)
    trajectory.status = status
    assert trajectory.finished
    for call in (
        lambda: trajectory.append_generated([1], [-1.0], 0),
        lambda: trajectory.append_observation([1]),
        lambda: trajectory.complete(1.0),
    ):
        with pytest.raises(ContractError, match=f"after it is {status}"):
            call()
    assert trajectory.tokens == [1] and trajectory.reward is None


@pytest.mark.parametrize("status", [Status.PENDING, Status.GENERATING, Status.IN_TOOL])
def test_the_other_statuses_are_not_final(status):
    trajectory = fresh()
    trajectory.status = status
    assert not trajectory.finished


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_must_be_finite(reward):
    trajectory = fresh()
    trajectory.append_generated([1], [-1.0], 0)
    with pytest.raises(ContractError, match="not finite"):
        trajectory.complete(reward)
    assert not trajectory.finished and trajectory.reward is None


def test_nothing_generated_cannot_be_complete():
    trajectory = fresh()
    trajectory.append_observation([1, 2])
    with pytest.raises(ContractError, match="before any generated token"):
        trajectory.complete(1.0)


def test_complete_gives_reward_and_info():
    trajectory = fresh()
    trajectory.append_generated([1], [-1.0], 0)
    trajectory.complete(True, truncated=False)
    assert trajectory.reward == 1.0 and isinstance(trajectory.reward, float)
    assert trajectory.info == {"truncated": False}
    assert trajectory.status == Status.DONE


def damaged(**changes) -> Trajectory:
    trajectory = fresh()
    trajectory.append_observation([5, 6])
    trajectory.append_generated([7, 8], [-0.1, -0.2], 1)
    for name, value in changes.items():
        setattr(trajectory, name, value)
    return trajectory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [0, 0, 1]}, "loss_mask has length 3, tokens 4"),
        ({"logprobs": [0.0] * 5}, "logprobs has length 5, tokens 4"),
        ({"versions": []}, "versions has length 0, tokens 4"),
        ({"loss_mask": [0, 1, 1, 1]}, "not the union of its turns"),
        ({"loss_mask": [0, 0, 1, 0]}, "not the union of its turns"),
        ({"turns": []}, "not the union of its turns"),
        ({"turns": [Turn(2, 5)]}, "outside its 4 tokens"),
        ({"turns": [Turn(2, 2)]}, "outside its 4 tokens"),
        ({"versions": [-1, -1, 1, -1]}, "token 3 has mask 1 and version -1"),
        ({"versions": [0, -1, 1, 1]}, "token 0 has mask 0 and version 0"),
    ],
)
def test_damage_is_named(changes, message):
    damaged().check()
    with pytest.raises(ContractError, match=message.replace("(", r"\(")):
        damaged(**changes).check()


def test_a_damaged_state_is_refused():
    state = damaged().state_dict()
    state["logprobs"].pop()
    with pytest.raises(ContractError, match="logprobs"):
        Trajectory.from_state_dict(state)

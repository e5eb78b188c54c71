import json

from venusrl.core.group import Batch, Group
from venusrl.core.trajectory import Status, Trajectory


def trajectory(index: int, version: int | None = None, reward: float | None = None) -> Trajectory:
    t = Trajectory(f"g0/{index}", "g0", index)
    if version is not None:
        t.append_generated([1], [-1.0], version)
    if reward is not None:
        t.complete(reward)
    return t


def group(*trajectories: Trajectory, opened: int = 4) -> Group:
    return Group("g0", prompt_id=3, epoch=1, opened_version=opened, trajectories=list(trajectories))


def test_ready_when_all_are_done():
    done, other = trajectory(0, 4, 1.0), trajectory(1, 4)
    g = group(done, other)
    assert not g.ready
    other.status = Status.LOST
    assert not g.ready
    other.status = Status.GENERATING
    other.complete(0.0)
    assert g.ready
    assert g.rewards == [1.0, 0.0]


def test_no_trajectories_is_not_ready():
    assert not group().ready


def test_oldest_version_is_the_oldest_start():
    assert group(trajectory(0), trajectory(1)).oldest_version == 4
    assert group(trajectory(0, 6), trajectory(1)).oldest_version == 6
    assert group(trajectory(0, 6), trajectory(1, 5)).oldest_version == 5
    later = trajectory(0, 5)
    later.append_generated([1], [-1.0], 9)  # an update inside a turn does not make it younger
    assert group(later).oldest_version == 5


def test_staleness_counts_from_the_version_of_the_batch():
    batch = Batch((group(trajectory(0, 5, 1.0), trajectory(1, 6, 0.0)), group(trajectory(0, 7, 0.0))), version=7)
    assert batch.staleness() == [2, 1, 0]
    assert len(batch.trajectories) == 3


def test_staleness_of_version_zero():
    assert Batch((group(trajectory(0, 0, 1.0)),), version=2).staleness() == [2]


def test_state_survives_json():
    g = group(trajectory(0, 5, 0.25), trajectory(1))
    g.refills, g.reasons = 2, ["g0/1: node lost"]
    state = json.loads(json.dumps(g.state_dict()))
    assert Group.from_state_dict(state) == g
    assert Group.from_state_dict(state).state_dict() == state

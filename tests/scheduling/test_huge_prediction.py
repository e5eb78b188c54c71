"""A prediction beyond every length there is."""

from venusrl.scheduling import SchedulerOptions, make_policy
from venusrl.scheduling.protocol import ActionReady, Admit, GroupOpened, LengthPredicted, WorkerUp


def test_a_huge_prediction_is_only_very_long():
    policy = make_policy("venus", SchedulerOptions(1, eta=0))
    policy.observe(WorkerUp(0.0, "w", 1))
    policy.observe(GroupOpened(0.0, "g", 1, 0))
    policy.observe(LengthPredicted(0.0, "g/0", 1e300))  # before it is known: of no use
    policy.observe(ActionReady(0.0, "g/0", "g", 10, 0, 0, None))
    policy.observe(LengthPredicted(0.0, "g/0", 1e300))
    assert [d.trajectory for d in policy.decide(0.0) if isinstance(d, Admit)] == ["g/0"]

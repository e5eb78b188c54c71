"""A simulated run that is disturbed: trajectories are lost, groups fail, workers come and go, evaluations run."""

import random

from venusrl.core.trajectory import Trajectory
from venusrl.scheduling.protocol import ActionDone, GroupClosed, GroupOpened
from venusrl.sim.simulation import Simulation, _Live


class Disturbed(Simulation):
    """Evaluation groups are told to the policy as the live service does; the coordinator knows nothing of them.

    Attributes:
      evaluating: prompts of evaluation groups under way.
      evaluated: how many came to their end.
    """

    def __init__(self, *args):
        self.evaluating: dict[str, int] = {}
        self.evaluated = 0
        super().__init__(*args)

    def evaluate(self, number: int) -> None:
        group = f"eval{number}"
        self.evaluating[group] = number
        self._tell(GroupOpened(self.now, group, 1, 0, training=False))
        self._begin(group)

    def _begin(self, group: str, attempt: int = 0) -> None:
        trajectory = Trajectory(f"{group}/0" + (f"r{attempt}" if attempt else ""), group, 0)
        spec = self._workload.trajectory(self.evaluating[group], 0, 0, attempt)
        live = self.live[trajectory.id] = _Live(trajectory, spec)
        trajectory.append_observation([0])
        self._ready(live)

    def lose(self, name: str, reason: str = "lost") -> None:
        live = self.live[name]
        if live.trajectory.group_id not in self.evaluating:
            super().lose(name, reason)
            return
        self._cancel(live)
        self._begin(live.trajectory.group_id, int(name.partition("r")[2] or 0) + 1)

    def _restart(self, live: _Live) -> None:
        if live.trajectory.group_id not in self.evaluating:
            super()._restart(live)
            return
        self.policy.observe(ActionDone(self.now, live.name, 0, True))
        self._leave(live, lost=True)
        self._begin(live.trajectory.group_id, int(live.name.partition("r")[2] or 0) + 1)

    def _done(self, live: _Live) -> None:
        group = live.trajectory.group_id
        if group not in self.evaluating:
            super()._done(live)
            return
        self._leave(live, lost=False)
        del self.evaluating[group]
        self.evaluated += 1
        self._tell(GroupClosed(self.now, group, ready=False))
        self._start()


def disturb(run: Disturbed, rng: random.Random, events: int) -> None:
    """The first `events` events, with something between them now and then."""
    number = 0
    run._open_groups()
    while run.report.events < events and run.coordinator.version < run.coordinator.options.updates:
        run.step()
        kind = rng.random()
        if kind < 0.01 and run.live:
            run.lose(rng.choice(sorted(run.live)))
        elif kind < 0.012 and len(run.workers) > 1:
            run.worker_down(rng.choice(sorted(run.workers)))
        elif kind < 0.02 and len(run.workers) < 3:
            number += 1
            run.worker_up(f"x{number:03d}")
        elif kind < 0.03 and len(run.evaluating) < 5:
            number += 1
            run.evaluate(number)

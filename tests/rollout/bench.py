"""A rollout service over scripted workers, for the tests of the service."""

import asyncio

from venusrl.core.clock import WallClock
from venusrl.core.trajectory import Status, Trajectory
from venusrl.rollout.service import Outcome, RolloutOptions, RolloutService
from venusrl.scheduling import make_policy

from .scripted import Script, ScriptedWorker

SCRIPT = Script()


class Bench:
    """A service over scripted workers."""

    def __init__(self, *workers: ScriptedWorker, env_s: float = 5.0, max_tokens: int = 64, policy=None):
        self.workers = workers or (ScriptedWorker(SCRIPT),)
        self.worker = self.workers[0]
        self.policy = policy or make_policy("fcfs_action")
        options = RolloutOptions(1.0, max_tokens, env_s)
        by_name = {w.name: w for w in self.workers}
        self.service = RolloutService(by_name, self.policy, self.worker.script.chat, WallClock(), options)

    def start(self, env, name: str = "g0/0", seed: int = 1) -> Trajectory:
        group, index = name.split("/")
        trajectory = Trajectory(name, group, int(index.split("r")[0]), seed=seed)
        self.service.start(trajectory, env)
        return trajectory

    async def outcome(self) -> Outcome:
        return await asyncio.wait_for(self.service.outcomes.get(), 10)

    async def run(self, env, **options) -> Outcome:
        self.start(env, **options)
        outcome = await self.outcome()
        await asyncio.wait_for(self.service.cleaned(), 10)
        self.check_idle()
        return outcome

    def check_idle(self) -> None:
        """No slot, stream, task or report is left behind."""
        assert self.policy._slots.free == sum(w.slots for w in self.workers)
        assert all(not w.running for w in self.workers)
        assert self.service.waiting == 0
        assert all(self.service.count(status) == 0 for status in Status)
        assert self.service.outcomes.empty()


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


def raises(where: str, error: BaseException):
    async def act(what):
        if what == where:
            raise error

    return act


def waits(where: str):
    async def act(what):
        if what == where:
            await asyncio.Event().wait()

    return act

"""The rollout service: drives trajectories through generation and tools, one asyncio task each.

A trajectory ends in exactly one of three ways: done with a reward, lost with a reason (reported, to be refilled), or
cancelled by whoever owns it. Nothing that fails becomes a reward of 0.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from venusrl.core.clock import Clock
from venusrl.core.env import Env, Opening, Reply
from venusrl.core.errors import ConfigError, SandboxError, TaskError, WorkerError, WorkerLost
from venusrl.core.group import Group
from venusrl.core.trajectory import Status, Trajectory, Turn
from venusrl.models.chat import ChatFormat
from venusrl.observe.trace import Trace
from venusrl.rollout.dispatch import Dispatcher
from venusrl.rollout.worker import Request, Worker
from venusrl.scheduling.protocol import (
    ActionDone,
    ActionReady,
    BatchTaken,
    GroupClosed,
    GroupOpened,
    SchedulerPolicy,
    TrajectoryDone,
    VersionPublished,
)

CLOSE_S = 10.0  # seconds that `close` waits for environments; their sandboxes end with the pool
CANCEL_S = 1.0  # seconds that it then waits for those it has cancelled


@dataclasses.dataclass(frozen=True)
class RolloutOptions:
    """Attributes:
    temperature: of sampling; 0 is greedy.
    max_tokens: of a turn.
    env_s: seconds that reset, a step or grade may take before the trajectory is lost.
    """

    temperature: float = 1.0
    max_tokens: int = 64
    env_s: float = 120.0

    def __post_init__(self):
        if not 0 <= self.temperature <= 3.4e38:  # false of nan, too; above it, a float32 is infinite
            raise ConfigError(f"rollout.temperature={self.temperature}; give a number, 0 (greedy) or more")
        if self.max_tokens < 1 or not 0 < self.env_s < math.inf:
            raise ConfigError(f"rollout.max_tokens={self.max_tokens}, env_s={self.env_s}; both must be positive")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a trajectory ended. Attributes:
    trajectory: DONE, or as far as it came.
    lost: the reason where it is to be refilled; None where it is done.
    """

    trajectory: Trajectory
    lost: str | None = None


class RolloutService:
    """Starts trajectories on `start`, reports each on `outcomes` or where its starter says.

    Training and evaluation share one service: the policy behind it owns every slot.

    What ended is reported at once, and cleaned up in the background: an environment that takes long to close holds up
    nobody but the next episode of its own id, and whoever needs the sandbox that it still holds, who waits for it.
    """

    def __init__(
        self,
        workers: Mapping[str, Worker],
        policy: SchedulerPolicy,
        chat: ChatFormat,
        clock: Clock,
        options: RolloutOptions,
        trace: Trace | None = None,
        max_length: int | None = None,
    ):
        """Args:
        workers: started, by name; there may be none yet.
        max_length: tokens of a sequence; None is what every worker takes, of which there must be one then.
        """
        self._trace = trace
        self._given: tuple[Any, int] | None = None  # the weights of the day, for workers that join
        self._deserted = asyncio.Event()  # there is no worker
        self._manned = asyncio.Event()  # there is one
        self.outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._workers = dict(workers)
        self._dispatcher = Dispatcher(policy, workers, clock)
        self._chat = chat
        self._clock = clock
        self._options = options
        self._max_length = max_length or min(worker.max_length for worker in workers.values())
        self._tasks: dict[str, asyncio.Task] = {}
        self._live: dict[str, Trajectory] = {}
        self._cleaning: dict[str, asyncio.Task] = {}
        self._count_workers()

    def add_worker(self, worker: Worker) -> None:
        """Another worker, started and with the present weights, takes requests from now on.

        Raises:
          ConfigError: it cannot hold the sequences that the others can.
        """
        if worker.max_length < self._max_length:
            raise ConfigError(
                f"worker {worker.name} has max_length={worker.max_length}, the others {self._max_length}; "
                "start it with the same rollout.max_length"
            )
        self._workers[worker.name] = worker
        self._count_workers()
        self._dispatcher.worker_joined(worker)

    def set_weights(self, params: Any, version: int) -> None:
        """What workers that join are given; those that are there have it."""
        self._given = (params, version)

    async def join(self, worker: Worker) -> None:
        """Gives `worker` the weights of the day, whatever it has, and then requests.

        Raises:
          ConfigError: see `add_worker`.
          WorkerError: it was lost meanwhile, or did not take the weights.
        """
        given = None
        while given is not self._given:  # an update may come meanwhile
            given = self._given
            await worker.update_weights(*given)
        self.add_worker(worker)

    def worker_away(self, worker: Worker) -> None:
        """`worker` gets no requests until it joins again; those that it has go on elsewhere, or wait for a worker."""
        if self._workers.pop(worker.name, None) is not None:
            self._dispatcher.worker_lost(worker.name)
            self._count_workers()

    async def wait_for_workers(self, some: bool) -> None:
        """Returns once there is a worker (`some`), or once there is none."""
        await (self._manned if some else self._deserted).wait()

    def _count_workers(self) -> None:
        for event, holds in ((self._manned, bool(self._workers)), (self._deserted, not self._workers)):
            event.set() if holds else event.clear()

    def open_group(self, group: Group, training: bool = True) -> None:
        """Tells the policy of a new group; its trajectories are started by `start`.

        Args:
          training: False for an evaluation, which no batch waits for.
        """
        self._dispatcher.observe(
            GroupOpened(self._clock.now(), group.id, len(group.trajectories), group.opened_version, training)
        )

    def close_group(self, group_id: str, ready: bool = True) -> None:
        """Tells the policy that a group is ready, or (`ready` False) has failed or was discarded."""
        self._dispatcher.observe(GroupClosed(self._clock.now(), group_id, ready))

    def resumed(self, version: int) -> None:
        """Tells the policy of which version the workers' weights are; groups of a run that goes on may be due."""
        self._dispatcher.observe(VersionPublished(self._clock.now(), version))

    def batch_taken(self, groups: int) -> None:
        """Tells the policy that the trainer took `groups` ready ones."""
        self._dispatcher.observe(BatchTaken(self._clock.now(), groups))

    def start(
        self,
        trajectory: Trajectory,
        env: Env,
        temperature: float | None = None,
        outcomes: asyncio.Queue[Outcome] | None = None,
    ) -> None:
        """Drives `trajectory` through `env` in the background; the env is closed whatever happens, after the report.

        Args:
          trajectory: of a group that was opened.
          env: its episode.
          temperature: of sampling, in place of the service's; 0 is greedy.
          outcomes: where its end is reported, in place of the service's queue.
        """
        self._live[trajectory.id] = trajectory
        temperature = self._options.temperature if temperature is None else temperature
        drive = self._drive(trajectory, env, temperature, outcomes or self.outcomes)
        task = asyncio.create_task(drive, name=f"trajectory-{trajectory.id}")
        self._tasks[trajectory.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(trajectory.id, None))

    def cancel(self, trajectory_id: str) -> None:
        """Stops a trajectory; it is not reported. Unknown or ended ids are ignored."""
        # A task that is cancelled before its first step never runs, and would not close its env.
        asyncio.get_running_loop().call_soon(self._cancel, trajectory_id)

    async def update_weights(self, params: Any, version: int) -> None:
        """Gives every worker new weights; returns once all use them."""
        began = self._clock.now()
        self._given = (params, version)
        alive = [worker for worker in self._workers.values() if worker.failure is None]
        await asyncio.gather(*(self._update(worker, params, version) for worker in alive))
        if self._trace is not None:
            self._trace.published(version, began, self._clock.now())
        self._dispatcher.observe(VersionPublished(self._clock.now(), version))

    async def _update(self, worker: Worker, params: Any, version: int) -> None:
        with contextlib.suppress(WorkerLost):  # it gets them when it is back
            await worker.update_weights(params, version)

    async def close(self) -> None:
        """Cancels what runs and waits for the clean-up of all that ended, for `CLOSE_S` at most; what is not over then
        is cancelled. What does not even end at that, within `CANCEL_S`, is named in the log and left behind."""
        for trajectory_id in self._tasks:
            self.cancel(trajectory_id)
        until = asyncio.get_running_loop().time() + CLOSE_S
        late = await _ended(set(self._tasks.values()), until)
        late |= await _ended(set(self._cleaning.values()), until)
        for task in late:
            task.cancel()
        if late:
            logging.warning("%d environments were not closed within %.0f s and are given up", len(late), CLOSE_S)
            left = await _ended(late, asyncio.get_running_loop().time() + CANCEL_S)
            names = sorted(task.get_name() for task in left)
            if names:
                logging.error("%s did not end when cancelled, and are left behind", ", ".join(names))
        self._dispatcher.close()

    async def cleaned(self) -> None:
        """Waits until everything that has ended by now is cleaned up."""
        while self._cleaning:
            await asyncio.wait(set(self._cleaning.values()))

    def count(self, status: Status) -> int:
        """Live trajectories in `status`."""
        return sum(t.status == status for t in list(self._live.values()))  # the display asks from its own thread

    @property
    def moved(self) -> int:
        """Actions that took their KV from worker to worker."""
        return self._dispatcher.moved

    @property
    def length_sources(self) -> Mapping[str, int]:
        """Actions so far by what the policy took their remaining length from; see SchedulerPolicy."""
        return self._dispatcher.length_sources

    @property
    def waiting(self) -> int:
        """Actions that wait for a slot."""
        return self._dispatcher.waiting

    def _cancel(self, trajectory_id: str) -> None:
        if trajectory_id in self._live:
            self._tasks[trajectory_id].cancel()

    async def _drive(self, trajectory: Trajectory, env: Env, temperature: float, outcomes: asyncio.Queue) -> None:
        lost: str | None = None
        ended = False
        try:
            if trajectory.id in self._cleaning:  # one of this id before it; what it leaves is forgotten under the id
                await asyncio.wait({self._cleaning[trajectory.id]})
            await self._episode(trajectory, env, temperature)
            ended = True
        except Exception as error:
            ended = True
            lost = f"{type(error).__name__}: {error}"
            if not isinstance(error, (TaskError, SandboxError, WorkerError)):
                # A bug, ours or the environment's. Unreported, its group would wait for it for ever; reported, the
                # reason is in the log and the bounds on refills and failed groups end the run.
                logging.exception("trajectory %s failed", trajectory.id)
        finally:
            del self._live[trajectory.id]
            event = TrajectoryDone(
                self._clock.now(), trajectory.id, trajectory.group_id, lost=trajectory.reward is None
            )
            self._dispatcher.observe(event)
            cleaning = asyncio.create_task(self._clean_up(trajectory, env), name=f"clean-up-{trajectory.id}")
            self._cleaning[trajectory.id] = cleaning
            cleaning.add_done_callback(lambda task: self._cleaned(trajectory.id, task))
            if ended:
                outcomes.put_nowait(Outcome(trajectory, lost))

    def _cleaned(self, trajectory_id: str, task: asyncio.Task) -> None:
        if self._cleaning.get(trajectory_id) is task:
            del self._cleaning[trajectory_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            logging.error("clean-up of %s failed: %r", trajectory_id, error)

    async def _episode(self, trajectory: Trajectory, env: Env, temperature: float) -> None:
        trajectory.status = Status.IN_TOOL
        steps: list[dict[str, Any]] = []
        opening = await self._ask_env("reset", env.reset)
        messages, tools = (opening.messages, opening.tools) if isinstance(opening, Opening) else (opening, ())
        trajectory.append_observation(self._chat.prompt(messages, tools))
        truncated = len(trajectory) >= self._max_length
        if truncated:
            raise TaskError(
                f"the prompt has {len(trajectory)} tokens; rollout.max_length={self._max_length} leaves no room"
            )
        done = False
        while not done and not truncated:
            turn = await self._generate(trajectory, temperature)
            trajectory.status = Status.IN_TOOL
            if turn is None:
                truncated = True
                break
            text = self._chat.reply(trajectory.tokens[turn.begin : turn.end])
            reply = Reply(text, turn.begin, turn.end - turn.begin, turn.stop)
            started = self._clock.now()
            observation = await self._ask_env("step", env.step, reply)
            turn.tool_s = self._clock.now() - started
            if self._trace is not None:
                self._trace.tool(trajectory.id, "tool", started, started + turn.tool_s)
            steps.append({"reply": text, **observation.info, "observation": observation.text})
            done = observation.done
            if not done:
                shown = observation.messages or ({"role": "user", "content": observation.text},)
                ids = self._chat.continuation(shown, trajectory.tokens[-1], tools)
                truncated = len(trajectory) + len(ids) >= self._max_length
                if not truncated:
                    trajectory.append_observation(ids)
        reward = await self._ask_env("grade", env.grade)
        trajectory.complete(reward, steps=steps, truncated=truncated, messages=list(messages))

    async def _generate(self, trajectory: Trajectory, temperature: float) -> Turn | None:
        """One turn, over as many slots as preemption makes of it; None where the worker has no room for a token of it.

        Raises:
          TaskError: there is none for a token after the prompt.
        """
        o, turns = self._options, len(trajectory.turns)
        trajectory.status = Status.GENERATING
        asked = self._clock.now()
        budget, stop = o.max_tokens, "preempted"
        while stop == "preempted":
            ready = self._clock.now()
            worker = await self._dispatcher.slot(self._ready(trajectory))
            admitted, made, stop = self._clock.now(), 0, None
            try:
                request = Request(trajectory.id, list(trajectory.tokens), budget, temperature, trajectory.seed)
                async with contextlib.aclosing(worker.generate(request)) as chunks:
                    async for chunk in chunks:
                        if chunk.tokens:
                            trajectory.append_generated(chunk.tokens, chunk.logprobs, chunk.version)
                        made, stop = made + len(chunk.tokens), chunk.stop
            except WorkerLost:
                if worker.failure is not None:  # else it is back already
                    self.worker_away(worker)
                stop = "preempted"  # it goes on where there is room, from the tokens it has
            except WorkerError:
                if worker.failure is None:
                    raise  # this request failed, or the run is over
                self._workers.pop(worker.name, None)
                self._count_workers()
                if not self._dispatcher.worker_lost(worker.name):
                    raise
                stop = "preempted"  # it goes on elsewhere, from the tokens it has
            finally:
                interrupted = stop in (None, "preempted")
                if self._trace is not None:
                    self._trace.waited(trajectory.id, ready, admitted)
                    now, how = self._clock.now(), stop or "cancelled"
                    self._trace.generated(trajectory.id, worker.name, admitted, now, made, how)
                self._dispatcher.observe(ActionDone(self._clock.now(), trajectory.id, made, interrupted))
            budget -= made
            if stop == "preempted" and (budget <= 0 or len(trajectory) >= self._max_length):
                stop = "length"
        if len(trajectory.turns) == turns:
            if not turns:
                raise TaskError(f"{worker.name} has no KV for a token after a prompt of {len(trajectory)} tokens")
            return None
        turn = trajectory.turns[-1]
        turn.stop, turn.generate_s = stop, self._clock.now() - asked
        return turn

    def _ready(self, trajectory: Trajectory) -> ActionReady:
        return ActionReady(
            self._clock.now(),
            trajectory.id,
            trajectory.group_id,
            context=len(trajectory),
            generated=trajectory.num_generated,
            turn=len(trajectory.turns),
            start_version=trajectory.start_version,
        )

    async def _ask_env(self, what: str, call: Callable[..., Awaitable], *args):
        # Environments are their authors' code: whatever they raise is a task failure, never a crash of the run.
        # Not wait_for: on Python 3.11 it forgets a cancellation that comes as the call returns.
        try:
            async with asyncio.timeout(self._options.env_s) as deadline:
                return await call(*args)
        except SandboxError:
            raise
        except asyncio.CancelledError as error:
            if asyncio.current_task().cancelling():
                raise
            raise TaskError(f"{what} raised CancelledError, and nobody cancelled it") from error
        except Exception as error:
            if deadline.expired():
                raise TaskError(f"{what} took more than rollout.env_s={self._options.env_s} s") from error
            raise TaskError(f"{what} raised {type(error).__name__}: {error}") from error

    async def _clean_up(self, trajectory: Trajectory, env: Env) -> None:
        for worker in list(self._workers.values()):
            try:
                await worker.release(trajectory.id)
            except WorkerError:
                continue  # it is closed, and its KV with it
        try:
            await self._ask_env("close", env.close)
        except (TaskError, SandboxError) as error:
            trajectory.info["close_error"] = str(error)
            logging.warning("trajectory %s: its environment was not closed: %s", trajectory.id, error)


async def _ended(tasks: set[asyncio.Task], until: float) -> set[asyncio.Task]:
    """Waits for `tasks`, to `until` of the loop's clock; those that have not ended."""
    if not tasks:
        return set()
    _, late = await asyncio.wait(tasks, timeout=max(0.0, until - asyncio.get_running_loop().time()))
    return late

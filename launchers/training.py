"""The training run: groups out, batches in, new weights out, until the steps are done or somebody asks to stop."""

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import statistics
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TextIO

import jax
from ml_collections import config_dict

from launchers import system
from launchers.configuration import check_same_run, check_workdir, save_config
from launchers.run_id import run_id
from venusrl.core.errors import CheckpointError, ConfigError, ContractError, VenusError
from venusrl.core.group import Batch, Group
from venusrl.core.signals import on_stop
from venusrl.core.trajectory import Status, Trajectory
from venusrl.learner.checkpoint import Checkpointer
from venusrl.learner.publish import publish
from venusrl.observe.intervals import wilson
from venusrl.observe.progress import Progress, summary_table
from venusrl.observe.run_log import RunLog, read_jsonl
from venusrl.observe.trace import Trace
from venusrl.rollout.evaluation import evaluate
from venusrl.rollout.worker import total

JOIN_S = 5.0  # in which workers in other processes join at the start; then the run says that it waits, and looks anew


@dataclasses.dataclass
class Clocks:
    """Attributes:
    train_s: seconds of training so far, over restarts; evaluation and start-up are not in it.
    resumed: seconds when it was last switched on; None while off.
    """

    train_s: float = 0.0
    resumed: float | None = None

    def on(self) -> None:
        self.resumed = time.monotonic()

    def off(self) -> None:
        if self.resumed is not None:
            self.train_s += time.monotonic() - self.resumed
            self.resumed = None

    @property
    def minutes(self) -> float:
        running = time.monotonic() - self.resumed if self.resumed is not None else 0.0
        return (self.train_s + running) / 60


def _lock(workdir: Path) -> TextIO:
    """Holds the folder of a run for as long as the file is open; the system lets go of it when the process ends.

    Raises:
      ConfigError: another process holds it.
      OSError: it cannot be made.
    """
    file = open(workdir / "lock", "w")  # noqa: SIM115 - open for as long as the run
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"another process is training in {workdir}; use another --workdir, or stop it") from error
    return file


def _has_checkpoints(workdir: Path) -> bool:
    """Whether a run has come as far as a checkpoint there; before it, whatever is there is started anew."""
    folder = workdir / "checkpoints"
    return folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())


class TrainingRun:
    """One run in one folder; started again in the same folder, it goes on."""

    def __init__(self, config: config_dict.ConfigDict, workdir: str, trace: bool = False):
        """Args:
        trace: write a timeline of the run, `trace-STEP.json`.
        """
        self._tracing = trace
        self.config = config
        self.workdir = check_workdir(workdir)
        if _has_checkpoints(self.workdir) and (self.workdir / "config.json").is_file():
            check_same_run(config, self.workdir)
        system.check(config)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.workdir)
        self.model = system.load_model(config)
        self.learner = system.make_learner(config, self.model.config)
        self.coordinator = system.make_coordinator(config)
        self.checkpoints = Checkpointer(self.workdir / "checkpoints", config.checkpoint.keep)
        self.clocks = Clocks()
        self.stopping = False
        self.last: dict[str, float] = {}
        resumed = self._restore()
        save_config(config, self.workdir)
        self.log = RunLog(self.workdir, resumed)
        rows = read_jsonl(self.log.metrics_path)
        self.heldout = [(row["step"], row["heldout_success"]) for row in rows if "heldout_success" in row]
        self.progress = Progress(self._status, f"VenusRL {self.workdir}")
        if resumed >= 0:
            self.progress.line(f"going on from update {resumed}")
        self._rollout: system.Rollout | None = None
        self._stop_event: asyncio.Event | None = None
        self._watch: asyncio.Task | None = None  # see _watch_workers
        self._updating = asyncio.Lock()  # while the learner is ahead of the coordinator: nothing can be saved

    @property
    def step(self) -> int:
        """Updates done."""
        return self.coordinator.version

    async def run(self) -> None:
        """Trains to the end, or until SIGINT, SIGTERM or SIGHUP; saves either way."""
        self._stop_event = asyncio.Event()
        on_stop(self.stop)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.progress)
            params, trace = self.learner.state.params, None
            if self._tracing:
                trace = stack.enter_context(Trace(self.workdir / f"trace-{self.step}.json"))
            name = run_id(self.workdir)
            async with system.open_rollout(self.config, self.model, params, self.step, trace, name) as rollout:
                self._rollout = rollout
                self._watch = asyncio.create_task(self._watch_workers())
                try:
                    if not self.heldout:
                        await self._evaluate()
                    await self._train()
                    if not self.stopping and self.step not in dict(self.heldout):
                        await self._evaluate()
                    self._save(final=True)
                finally:
                    self._watch.cancel()
                    await asyncio.wait({self._watch})
                    self._close()
                if (error := self._watch_error()) is not None:
                    raise error
        self.progress.show(summary_table(f"VenusRL on {jax.devices()[0].platform}", self.summary()))

    def stop(self) -> None:
        """Asks to save and leave; a second time is no different."""
        self.stopping = True
        self._stop_event.set()
        self.progress.line("stopping: saving the run; the same command goes on from here")

    # The loop

    async def _train(self) -> None:
        self._rollout.service.resumed(self.step)
        for group in [*self.coordinator.open_groups, *self.coordinator.ready_groups]:
            self._rollout.service.open_group(group)
        for group in self.coordinator.ready_groups:
            self._rollout.service.close_group(group.id)
        for trajectory in self.coordinator.restart_unfinished():
            self._start(trajectory)
        self.clocks.on()
        mark = time.monotonic()
        while not self._finished() and not self.stopping:
            self._open_groups()
            batch = self.coordinator.take_batch()
            if batch is None:
                await self._next_outcome()
            else:
                async with self._updating:
                    updated = await self._update(batch, mark)
                if updated:
                    await self._after_update()
                    mark = time.monotonic()
        self.clocks.off()

    async def _watch_workers(self) -> None:
        """Where the last worker is gone: says so, and saves what there is. Requests wait in the service.

        Raises:
          WorkerError: none will come back.
        """
        service = self._rollout.service
        if not self.config.rollout.addresses:
            return  # engines in this process do not come back; see Rollout.failure
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                await service.wait_for_workers(some=True)
        while True:
            await service.wait_for_workers(some=False)
            if self._rollout.failure is not None:
                raise self._rollout.failure
            where = ", ".join(worker.name for worker in self._rollout.workers)
            self.progress.line(f"no worker answers ({where}): the run waits, and goes on when one is back")
            async with self._updating:
                self._save()
            await self._until_a_worker_is_there()
            self.progress.line("a worker is there: the run goes on")

    async def _until_a_worker_is_there(self) -> None:
        """Raises WorkerError where none will come back."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JOIN_S):
                    return await self._rollout.service.wait_for_workers(some=True)
            if self._rollout.failure is not None:
                raise self._rollout.failure

    def _open_groups(self) -> None:
        for group in self.coordinator.admit():
            self._rollout.service.open_group(group)
            for trajectory in group.trajectories:
                self._start(trajectory)

    async def _next_outcome(self) -> None:
        """Waits for a trajectory to end, or for somebody to ask to stop."""
        outcome = await self._unless_stopped(self._rollout.service.outcomes.get())
        if outcome is None:
            return
        if self._rollout.failure is not None:  # nothing can be generated any more
            raise self._rollout.failure
        group = self.coordinator.group(outcome.trajectory.group_id)
        if group is None:
            return  # its group has failed meanwhile
        if outcome.lost is None:
            if self.coordinator.trajectory_done(outcome.trajectory) is not None:
                self._rollout.service.close_group(group.id)
            return
        fresh = self.coordinator.trajectory_lost(outcome.trajectory, outcome.lost)
        if fresh is not None:
            self._start(fresh)
        else:
            self._group_failed(group)

    def _stop_group(self, group: Group) -> None:
        for trajectory in group.trajectories:
            self._rollout.service.cancel(trajectory.id)
        self._rollout.service.close_group(group.id, ready=False)

    def _group_failed(self, group: Group) -> None:
        self._stop_group(group)
        logging.warning("group %s (prompt %d) failed: %s", group.id, group.prompt_id, group.reasons[-1])
        failed = self.coordinator.counters.failed
        if failed > self.config.max_failed_groups:
            raise VenusError(
                f"{failed} groups failed (max_failed_groups={self.config.max_failed_groups}); the last because of "
                f"{group.reasons[-1]}. Fix the task or the sandbox, then run the same command again"
            )

    async def _unless_stopped(self, call: Coroutine):
        """The result of `call`; None, with `call` cancelled, where somebody asks to stop first.

        Raises what ended the watch over the workers, where that comes first.
        """
        task = asyncio.ensure_future(call)
        stop = asyncio.ensure_future(self._stop_event.wait())
        while not (task.done() or stop.done() or self._watch_error()):
            waits = {task, stop} if self._watch.done() else {task, stop, self._watch}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        if (error := self._watch_error()) is not None:
            raise error
        return None

    def _watch_error(self) -> BaseException | None:
        """What ended the watch over the workers; None while it goes on, and where it has nothing to do."""
        watch = self._watch
        return watch.exception() if watch.done() and not watch.cancelled() else None

    async def _update(self, batch: Batch, mark: float) -> bool:
        waited = time.monotonic() - mark
        self._rollout.service.batch_taken(len(batch.groups))
        self._open_groups()  # some rules let the next batch begin while this one is trained on
        metrics = await asyncio.to_thread(self.learner.update, batch, lambda: self.stopping)
        if metrics is None:
            self.coordinator.give_back(batch)
            return False
        while not self.coordinator.may_publish and not self.stopping:
            await self._next_outcome()
        version = batch.version + 1
        published = publish(self.learner.state.params, self.model.config.dtype)
        # Where somebody asks to stop meanwhile, it does not matter any more which weights workers have.
        await self._unless_stopped(self._rollout.service.update_weights(published, version))
        for group in self.coordinator.published(version):
            self._stop_group(group)
        self._record(batch, metrics, waited, time.monotonic() - mark)
        return True

    async def _after_update(self) -> None:
        c = self.config
        if c.eval.every and self.step % c.eval.every == 0:
            self.clocks.off()
            await self._evaluate()
            self.clocks.on()
        if c.checkpoint.every and self.step % c.checkpoint.every == 0:
            self._save()

    def _finished(self) -> bool:
        limit = self.config.max_minutes
        return self.step >= self.config.steps or bool(limit and self.clocks.minutes >= limit)

    def _start(self, trajectory: Trajectory) -> None:
        group = self.coordinator.group(trajectory.group_id)
        self._rollout.service.start(trajectory, self._rollout.train_tasks.make(group.prompt_id))

    # What it says of itself

    def _record(self, batch: Batch, metrics: dict[str, float], waited: float, took: float) -> None:
        rewards = [t.reward for t in batch.trajectories]
        staleness = batch.staleness()
        load = total(worker.load() for worker in self._rollout.workers)
        c = self.coordinator.counters
        self.last = {
            "reward": statistics.fmean(rewards),
            "groups_mixed": float(sum(len(set(g.rewards)) > 1 for g in batch.groups)),
            **metrics,
            "staleness_mean": statistics.fmean(staleness),
            "staleness_max": float(max(staleness)),
            "rollout_wait_s": waited,
            "step_s": took,
            "tokens_per_s": metrics["tokens"] / took,
            "generated_per_s": metrics["generated_tokens"] / took,
            "prefilled_tokens": float(load.prefilled_tokens),
            "kv_hit_rate": load.hit_tokens / max(1, load.prompt_tokens),
            "kv_kept_rate": load.kept_hit_tokens / load.kept_tokens if load.kept_tokens else 1.0,
            "kv_returned_tokens": float(load.returned_tokens),
            "kv_stale_tokens": float(load.stale_tokens),
            "kv_evicted_pages": float(load.evicted_pages),
            "kv_moved_tokens": float(load.moved_tokens),
            "retracted_requests": float(load.retracted),
            "demoted_trajectories": float(load.demoted),
            "weight_pause_s": load.pause_s,
            **{f"length_from_{name}": float(n) for name, n in self._rollout.service.length_sources.items()},
            "refilled_trajectories": float(c.refilled_trajectories),
            "failed_groups": float(c.failed),
            "discarded_groups": float(c.discarded),
            "checkpoint_failures": float(self.checkpoints.failures),
            "log_failures": float(self.log.failures),
            "train_minutes": self.clocks.minutes,
        }
        self.log.metrics(self.step, self.last)
        self.log.trajectories(self.step, batch)
        if not self.progress.console.is_terminal:
            self.progress.line(
                f"step {self.step:4d}  reward {self.last['reward']:.3f}  {took:5.1f} s  "
                f"{self.last['tokens_per_s']:6.0f} tokens/s  turns {self.last['turns_mean']:.1f}  "
                f"entropy {self.last['entropy']:.3f}  {self.clocks.minutes:.1f} min"
            )

    async def _evaluate(self) -> None:
        e = self.config.eval
        rollout, slots = self._rollout, self.config.rollout.slots
        result = await self._unless_stopped(
            evaluate(rollout.service, rollout.heldout_tasks, e.tasks, slots, e.temperature, self.config.seed)
        )
        if result is None:
            return
        if result.rate is None:
            logging.warning("no held-out episode came to its end; the first: %s", result.lost[0])
            return
        low, high = wilson(result.successes, len(result.trajectories))
        self.heldout.append((self.step, result.rate))
        row = {
            "heldout_success": result.rate,
            "heldout_low": low,
            "heldout_high": high,
            "heldout_lost": len(result.lost),
        }
        self.log.metrics(self.step, {**row, "train_minutes": self.clocks.minutes})
        self.progress.line(
            f"step {self.step:4d}  held-out success {result.rate:.3f} [{low:.3f}, {high:.3f}] on "
            f"{len(result.trajectories)} tasks, {self.clocks.minutes:.1f} min"
        )
        self.log.plot()

    def _status(self) -> dict[str, str]:
        c, last = self.coordinator, self.last
        service = self._rollout.service if self._rollout else None
        latest = self.heldout[-1] if self.heldout else None
        return {
            "step": f"{self.step} of {self.config.steps}, {self.clocks.minutes:.1f} min",
            "reward": f"{last['reward']:.3f}" if last else "-",
            "held-out success": f"{latest[1]:.3f} at step {latest[0]}" if latest else "-",
            "groups": f"{len(c.open_groups)} open, {len(c.ready_groups)} ready",
            "trajectories": f"{service.count(Status.GENERATING)} generating, {service.count(Status.IN_TOOL)} in tool"
            if service
            else "-",
            "tokens a second": f"{last['tokens_per_s']:.0f}" if last else "-",
            "weight version": str(c.version),
            "staleness": f"mean {last['staleness_mean']:.2f}, max {last['staleness_max']:.0f}" if last else "-",
        }

    # What survives it

    def _restore(self) -> int:
        """Goes on from the newest checkpoint, or starts anew; returns the last step whose rows are to be kept."""
        restored = self.checkpoints.restore(self.learner.abstract_state())
        if restored is None:
            self.learner.start_from(self.model.params)
            return -1
        step, state, extra = restored
        try:
            if extra["seed"] != self.config.seed:
                raise ConfigError(
                    f"config.seed={self.config.seed}, but the run in {self.workdir} was started with {extra['seed']}; "
                    "use another --workdir"
                )
            self.coordinator.load_state_dict(extra["coordinator"])
            self.clocks.train_s = float(extra["train_s"])
        except (KeyError, TypeError, ValueError, AttributeError, ContractError) as error:
            raise CheckpointError(
                f"checkpoint {step} of {self.workdir} has another coordinator's state ({type(error).__name__}: "
                f"{error}): another release wrote it, or it is damaged; go on with that release, or use another "
                "--workdir"
            ) from error
        self.learner.restore(state, reference=self.model.params)
        logging.info("going on from step %d of %s", step, self.workdir)
        return step

    def _save(self, final: bool = False) -> None:
        """Saves; a failure is counted, and the run goes on with the checkpoints it has. The last one may not fail.

        Raises:
          CheckpointError: the final save failed.
        """
        extra: dict[str, Any] = {
            "seed": self.config.seed,
            "coordinator": self.coordinator.state_dict(),
            "train_s": self.clocks.minutes * 60,
        }
        try:
            if self.step != self.checkpoints.latest:
                self.checkpoints.save(self.step, self.learner.state, extra)
            if final:
                self.checkpoints.wait()
        except CheckpointError as error:
            if final:
                raise
            logging.warning("%s", error)
        if not (self.workdir / "config.json").exists():  # the folder was removed and is there again
            try:
                save_config(self.config, self.workdir)
            except OSError as error:
                logging.warning("%s", error)

    def _close(self) -> None:
        self.log.close()
        self.log.plot()
        try:
            self.checkpoints.close()
        except CheckpointError as error:
            logging.warning("%s", error)

    def summary(self) -> dict[str, str]:
        """What the run reached and where things are."""
        c = self.coordinator.counters
        where = {
            "metrics": "metrics.jsonl",
            "TensorBoard": "tensorboard",
            "plot": "reward.png",
            "trajectories": "trajectories.jsonl",
            "checkpoints": "checkpoints",
        }
        return {
            "updates": f"{self.step} of {self.config.steps}",
            "training time": f"{self.clocks.minutes:.1f} min",
            "held-out success": " -> ".join(f"{rate:.3f} (step {step})" for step, rate in self.heldout) or "-",
            "groups": f"{c.consumed} trained, {c.failed} failed, {c.discarded} discarded, "
            f"{c.refilled_trajectories} trajectories refilled",
            "checkpoint failures": str(self.checkpoints.failures),
            "log failures": str(self.log.failures),
            **{name: str(self.workdir / file) for name, file in where.items()},
        }

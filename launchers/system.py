"""The composition root: a configuration becomes a model, a learner, workers, sandboxes and tasks.

The one place that knows them all. Nothing here decides anything.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import jax
from ml_collections import config_dict

from envs.bash.env import BashTasks
from envs.generated import GeneratedTasks
from envs.repair.env import RepairTasks
from venusrl.coordinator.coordinator import Coordinator, CoordinatorOptions
from venusrl.coordinator.prompts import PromptStream
from venusrl.coordinator.rules import check_dataset, make_rule
from venusrl.core.clock import WallClock
from venusrl.core.door import read_key
from venusrl.core.env import TaskSet
from venusrl.core.errors import ConfigError, WorkerError
from venusrl.learner.learner import Learner, LearnerOptions
from venusrl.learner.objectives import make_objective
from venusrl.learner.publish import publish
from venusrl.learner.sharding import make_mesh
from venusrl.learner.state import make_optimizer
from venusrl.learner.step import StepOptions
from venusrl.models import hf
from venusrl.models.chat import ChatFormat
from venusrl.models.config import ModelConfig, model_config
from venusrl.models.folder import open_folder
from venusrl.models.gguf import GgufFile, find_packaged
from venusrl.models.tokenizer import Tokenizer
from venusrl.models.tokenizer_files import TokenizerFiles
from venusrl.observe.trace import Trace
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.jax_worker import JaxWorker
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.remote.client import RemoteWorker, check_addresses
from venusrl.rollout.service import RolloutOptions, RolloutService
from venusrl.rollout.worker import Worker
from venusrl.sandbox import SandboxPool
from venusrl.scheduling import SchedulerOptions, SchedulerPolicy, make_policy

ENVIRONMENTS: dict[str, type[GeneratedTasks]] = {"repair": RepairTasks, "bash": BashTasks}


def use_compile_cache() -> None:
    """Keeps compiled programs in the user's cache, so that a second start compiles nothing."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "venusrl" / "jax"
    except RuntimeError:  # a user without a home, as in some containers
        return
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclasses.dataclass(frozen=True)
class Described:
    """A model but for its parameters, which `read` reads."""

    config: ModelConfig
    tokenizer: Tokenizer
    files: TokenizerFiles
    read: Callable[[], dict]


@dataclasses.dataclass(frozen=True)
class Model:
    """A shape, a tokenizer with its chat format, the parameters to start from, and what the model's files say."""

    config: ModelConfig
    tokenizer: Tokenizer
    chat: ChatFormat
    params: dict
    files: TokenizerFiles


def describe_model(config: config_dict.ConfigDict) -> Described:
    """What `config.model` names, without its weights.

    Raises:
      ConfigError: an unknown source, or a tokenizer that cannot be used.
      CheckpointError: the files are missing, of another model, or of one that is not supported.
    """
    m = config.model
    shape = model_config(m.name, dtype=m.dtype, remat=m.remat) if m.name else None
    if m.source == "hf":
        folder = open_folder(m.checkpoint, shape, m.dtype, m.remat, tuple(m.ignore))
        return Described(folder.config, folder.tokenizer, folder.files, folder.params)
    if m.source != "gguf":
        raise ConfigError(f"model.source={m.source!r} is unknown; use 'hf' or 'gguf'")
    file = GgufFile(find_packaged(m.checkpoint))
    theirs = file.config(m.dtype, m.remat)
    shape = shape or theirs
    file.check(shape)
    tokenizer = file.tokenizer()
    if tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding only {shape.vocab_size} rows"
        )
    return Described(shape, tokenizer, file.files(tokenizer), lambda: file.params(shape))


def load_model(config: config_dict.ConfigDict) -> Model:
    """Reads the model that `config.model` names; its own ends of a reply are among the chat format's stop tokens.

    Raises:
      ConfigError: an unknown source, or a tokenizer that does not fit the model.
      CheckpointError: the weights are missing, damaged or of another model.
    """
    found = describe_model(config)
    return Model(found.config, found.tokenizer, chat_format(found), found.read(), found.files)


def stop_tokens(found: Described) -> tuple[int, ...]:
    """What ends a reply: the ids that the model's files name, and those of ChatML where it has them."""
    tokenizer = found.tokenizer
    chatml = (tokenizer.im_end, tokenizer.end_of_text) if tokenizer.speaks_chatml else ()
    return tuple(dict.fromkeys((*found.files.stop_tokens, *chatml)))


def chat_format(found: Described) -> ChatFormat:
    """How messages of a model become tokens: by its own template where its files have one; what there is to say of that
    is logged.

    Raises:
      ConfigError: the template fails, or there is none and the tokenizer does not speak ChatML.
    """
    tokenizer, files = found.tokenizer, found.files
    variables = {f"{kind}_token": getattr(files, kind) or None for kind in ("bos", "eos", "pad", "unk")}
    chat = ChatFormat(tokenizer, files.chat_template or None, stop_tokens(found) or None, variables, files.prefix)
    if chat.note:
        logging.warning("%s", chat.note)
    return chat


def engine_options(config: config_dict.ConfigDict) -> EngineOptions:
    r = config.rollout
    return EngineOptions(
        slots=r.slots,
        lanes=r.lanes or int(r.workers > 1),  # several workers of a process are lanes themselves
        max_length=r.max_length,
        decode_steps=r.decode_steps,
        decode_rows=tuple(r.decode_rows),
        prefill_rows=tuple(r.prefill_rows),
        prefill_tokens=tuple(r.prefill_tokens),
        read_lengths=tuple(r.read_lengths),
        page=r.page,
        kv_tokens=r.kv_tokens,
        host_tokens=r.host_tokens,
        residency=r.residency,
        attention=r.attention,
        on_update=r.on_update,
        stall_s=r.stall_s,
    )


def rollout_options(config: config_dict.ConfigDict) -> RolloutOptions:
    r = config.rollout
    return RolloutOptions(r.temperature, r.max_tokens, r.env_s)


def check(config: config_dict.ConfigDict) -> None:
    """Refuses what can be refused before a model is read or a file is written.

    Raises:
      ConfigError: a name that nothing goes by, a value out of range.
    """
    task_set(config)
    scheduler(config)
    make_coordinator(config)
    engine_options(config)
    rollout_options(config)
    model_config(config.model.name or "tiny", dtype=config.model.dtype)  # without a name the dtype alone
    if config.model.name:
        shape = model_config(config.model.name, dtype=config.model.dtype)
        if config.rollout.max_length > shape.max_length:
            raise ConfigError(
                f"rollout.max_length={config.rollout.max_length} is above the {shape.max_length} positions of "
                f"model.name={config.model.name!r}; lower it"
            )
    if config.model.source not in ("hf", "gguf"):
        raise ConfigError(f"model.source={config.model.source!r} is unknown; use 'hf' or 'gguf'")
    if not config.model.checkpoint:
        raise ConfigError("model.checkpoint='' names no model; give a folder (hf) or PACKAGE:FILE (gguf)")
    make_objective(config.learner.objective, {})
    mesh = make_mesh(tuple(config.learner.mesh))
    split = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.learner.rows_per_part % split:
        raise ConfigError(
            f"learner.rows_per_part={config.learner.rows_per_part} is not a multiple of data x fsdp={split}"
        )
    check_addresses(tuple(config.rollout.addresses), config.rollout.reconnect_s)
    worker_key(config)


def make_learner(config: config_dict.ConfigDict, shape: ModelConfig) -> Learner:
    """The learner, without a state."""
    o = config.learner
    options = {}
    if o.objective == "grpo":
        options = {k: o[k] for k in ("clip_low", "clip_high", "tis_cap", "kl_coef", "entropy_coef")}
    if o.row_length < config.rollout.max_length:
        raise ConfigError(
            f"learner.row_length={o.row_length} is below rollout.max_length={config.rollout.max_length}; "
            "a long trajectory would not fit"
        )
    optimizer = make_optimizer(
        o.learning_rate,
        warmup_steps=o.warmup_steps,
        total_steps=o.decay_steps,
        final_fraction=o.final_fraction,
        b1=o.b1,
        b2=o.b2,
        weight_decay=o.weight_decay,
        clip_norm=o.clip_norm,
    )
    return Learner(
        shape,
        make_objective(o.objective, options),
        optimizer,
        make_mesh(tuple(o.mesh)),
        StepOptions(config.rollout.temperature, o.logprob_chunk),
        LearnerOptions(o.row_length, o.rows_per_part, o.minibatches, o.max_skipped, o.skip_zero_variance),
    )


def coordinator_options(config: config_dict.ConfigDict) -> CoordinatorOptions:
    return CoordinatorOptions(
        group_size=config.group_size,
        batch_groups=config.batch_groups,
        async_factor=config.async_factor,
        max_refills=config.max_refills,
        updates=config.steps,
        seed=config.seed,
    )


def make_coordinator(config: config_dict.ConfigDict) -> Coordinator:
    """With the rule that goes with `config.scheduler.name`."""
    check_dataset(config.batch_groups, config.env.train_tasks)
    prompts = PromptStream(config.env.train_tasks, config.seed)
    return Coordinator(prompts, coordinator_options(config), make_rule(config.scheduler.name))


def scheduler(config: config_dict.ConfigDict) -> SchedulerPolicy:
    """The policy that `config.scheduler` describes.

    Raises:
      ConfigError: an unknown name or switch.
    """
    o = coordinator_options(config)
    switches = {name: value for name, value in config.scheduler.items() if name != "name"}
    return make_policy(config.scheduler.name, SchedulerOptions(o.batch_groups, o.eta, **switches))


def task_set(config: config_dict.ConfigDict) -> type[GeneratedTasks]:
    """The kind of tasks that `config.env.name` selects.

    Raises:
      ConfigError: no such environment.
    """
    name = config.env.name
    if name not in ENVIRONMENTS:
        raise ConfigError(f"env.name={name!r} is unknown; one of {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def make_tasks(config: config_dict.ConfigDict, pool: SandboxPool, split: str) -> TaskSet:
    """The "train" or "heldout" tasks that `config.env` describes."""
    e = config.env
    count = e.train_tasks if split == "train" else e.heldout_tasks
    return task_set(config)(pool, split, count, seed=e.seed, max_turns=e.max_turns, command_s=e.command_s)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Everything that generates: sandboxes, tasks, workers, and the service that drives trajectories over them."""

    pool: SandboxPool
    train_tasks: TaskSet
    heldout_tasks: TaskSet
    workers: tuple[Worker, ...]
    service: RolloutService

    @property
    def failure(self) -> WorkerError | None:
        """What ended the last worker; None while one works, or may come back."""
        failures = [w.ended if isinstance(w, RemoteWorker) else w.failure for w in self.workers]
        return None if None in failures else failures[-1]


def make_workers(
    config: config_dict.ConfigDict, model: Model, params, version: int, run: str = ""
) -> tuple[Worker, ...]:
    """Engines in this process, or clients of those at `config.rollout.addresses`, which `run` claims.

    Raises:
      ConfigError: the key cannot be read.
    """
    shape, stop, options = model.config, model.chat.stop_tokens, engine_options(config)
    if config.rollout.addresses:

        def write(params) -> bytes:
            return hf.to_bytes(params, shape, shape.dtype)

        r, write = config.rollout, _once(write)
        key = worker_key(config)
        beside = shape.beside_weights(stop)
        return tuple(RemoteWorker(a, write, run, key, r.reconnect_s, r.max_length, model=beside) for a in r.addresses)
    engines = (Engine(shape, params, version, stop, options) for _ in range(config.rollout.workers))
    return tuple(JaxWorker(f"jax-{i}", engine) for i, engine in enumerate(engines))


def worker_key(config: config_dict.ConfigDict) -> str:
    """What workers in other processes are shown; "" for nothing.

    Raises:
      ConfigError: the file cannot be read, or has no key.
    """
    path = config.rollout.key_file
    return read_key(path, "rollout.key_file") if path else ""


def _once(write: Callable[[dict], bytes]) -> Callable[[dict], bytes]:
    """`write`, once for all workers: the last bytes are kept."""
    lock, last = threading.Lock(), [None, b""]

    def written(params: dict) -> bytes:
        with lock:
            if last[0] is not params:
                last[:] = [params, write(params)]
            return last[1]

    return written


async def _close(worker: Worker, others: bool) -> None:
    try:
        await worker.close()
    except WorkerError as error:
        if not others:
            raise
        logging.warning("%s", error)  # the others did its work


@contextlib.asynccontextmanager
async def open_rollout(
    config: config_dict.ConfigDict,
    model: Model,
    params,
    version: int,
    trace: Trace | None = None,
    run: str = "",
    patient: bool = True,
) -> AsyncIterator[Rollout]:
    """Starts sandboxes and workers with `params` (the learner's; a copy is made); stops them on the way out.

    Args:
      run: in whose name workers in other processes are claimed.
      patient: such a worker may be away, or somebody else's, and joins when it can; else that is an error.
    """
    if config.rollout.workers < 1:
        raise ConfigError(f"rollout.workers={config.rollout.workers}; give at least 1")
    published, policy = publish(params, model.config.dtype), scheduler(config)
    workers = make_workers(config, model, published, version, run)
    elsewhere = [worker for worker in workers if isinstance(worker, RemoteWorker)]
    here = [worker for worker in workers if worker not in elsewhere]
    async with contextlib.AsyncExitStack() as stack:
        pool = await stack.enter_async_context(SandboxPool(max_sandboxes=config.sandbox.max_sandboxes))
        for worker in here:
            await worker.start()
            stack.push_async_callback(_close, worker, others=len(workers) > 1)
        for worker in elsewhere:
            stack.push_async_callback(worker.close)
        by_name, length = {worker.name: worker for worker in here}, config.rollout.max_length
        service = RolloutService(by_name, policy, model.chat, WallClock(), rollout_options(config), trace, length)
        service.set_weights(published, version)
        stack.push_async_callback(service.close)
        for worker in elsewhere:
            worker.welcome, worker.farewell = service.join, service.worker_away
        await asyncio.gather(*(worker.start(patient) for worker in elsewhere))
        train, heldout = (make_tasks(config, pool, split) for split in ("train", "heldout"))
        yield Rollout(pool, train, heldout, workers, service)

"""The contract of a worker. The JAX engine, SGLang and the simulated worker all keep it."""

import dataclasses
from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from venusrl.core.errors import WorkerError
from venusrl.observe.prometheus import Description

Top = list[list[tuple[int, float]]]  # for each token, the most likely ones in its place and their logprobs
MOST_TOP = 20  # as in the OpenAI API
LONGEST_ID = 1024  # characters of a trajectory's or a namespace's name, where it comes from another process


@dataclasses.dataclass(frozen=True)
class Request:
    """One turn to generate.

    Attributes:
      trajectory: its id; a worker keeps KV under it from turn to turn. One request of it at a time.
      tokens: the whole context, prompt and earlier turns, at least one token.
      max_tokens: to generate at most, at least 1.
      temperature: 0 is greedy.
      seed: of the trajectory's sampling, 0 <= seed < 2^31; with the position it decides every draw, whatever else is in
        the batch.
      namespace: whose prefixes it may share; nothing is shared between different ones.
      top_logprobs: how many of the most likely tokens are told beside each generated one, 0 to MOST_TOP.
    """

    trajectory: str
    tokens: list[int]
    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    namespace: str = ""
    top_logprobs: int = 0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some generated tokens.

    Attributes:
      tokens, logprobs: of one length, possibly 0 in the last chunk; logprobs under temperature only, full vocabulary
        (greedy requests: under temperature 1).
      version: the weight version that generated them.
      stop: None while more follows; then "stop" (a stop token was generated, it is the last one), "length" (max_tokens
        or the longest sequence reached, or all KV filled) or "preempted".
      top: where the request asked for them, the most likely tokens of each place, the first the likeliest.
    """

    tokens: list[int]
    logprobs: list[float]
    version: int
    stop: str | None = None
    top: Top | None = None


@dataclasses.dataclass(frozen=True)
class Load:
    """Attributes:
    slots, running, waiting: counts of requests.
    generated_tokens, prefilled_tokens: since the start.
    pause_s: seconds for which weight updates kept decoding from running, since the start.
    prompt_tokens, hit_tokens: of contexts, all but the last token each; and how many of those were cached.
    kept_tokens, kept_hit_tokens: of contexts of trajectories that were resident here ever since their last request
      ended, as far as they had come then; and how many of those were cached.
    stale_tokens: of hit_tokens, those whose KV older weights made.
    retracted: running requests that had to wait again, for want of pages.
    demoted: trajectories that were no longer resident before they ended.
    moved_tokens: whose KV came from other workers.
    returned_tokens: of hit_tokens, those whose KV came back from host memory.
    pages, free_pages, evictable_pages: of KV; evictable ones hold what nothing runs on.
    evicted_pages: given up, since the start.
    """

    slots: int
    running: int
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    pause_s: float
    prompt_tokens: int = 0
    hit_tokens: int = 0
    kept_tokens: int = 0
    kept_hit_tokens: int = 0
    stale_tokens: int = 0
    retracted: int = 0
    demoted: int = 0
    moved_tokens: int = 0
    returned_tokens: int = 0
    pages: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    evicted_pages: int = 0


# Of every field of Load, for /metrics.
LOAD_DESCRIPTIONS: dict[str, Description] = {
    "slots": Description("Requests that can run at once.", counter=False),
    "running": Description("Requests that run.", counter=False),
    "waiting": Description("Requests that wait for a slot.", counter=False),
    "generated_tokens": Description("Tokens generated.", counter=True),
    "prefilled_tokens": Description("Tokens prefilled.", counter=True),
    "pause_s": Description("Seconds for which weight updates kept decoding from running.", counter=True),
    "prompt_tokens": Description("Tokens of contexts, all but the last of each.", counter=True),
    "hit_tokens": Description("Tokens of contexts whose KV was cached.", counter=True),
    "kept_tokens": Description("Tokens of contexts of trajectories that were resident all along.", counter=True),
    "kept_hit_tokens": Description("Those of kept_tokens whose KV was cached.", counter=True),
    "stale_tokens": Description("Tokens of hits whose KV older weights made.", counter=True),
    "retracted": Description("Running requests that had to wait again for want of pages.", counter=True),
    "demoted": Description("Trajectories no longer resident before they ended.", counter=True),
    "moved_tokens": Description("Tokens whose KV came from other workers.", counter=True),
    "returned_tokens": Description("Tokens of hits whose KV came back from host memory.", counter=True),
    "pages": Description("Pages of KV.", counter=False),
    "free_pages": Description("Pages of KV that hold nothing.", counter=False),
    "evictable_pages": Description("Pages of KV that hold what nothing runs on.", counter=False),
    "evicted_pages": Description("Pages of KV given up.", counter=True),
}


def again(failure: WorkerError) -> WorkerError:
    """The same failure for one more who asks. One exception that is raised again and again keeps the frames of all who
    caught it."""
    fresh = WorkerError(str(failure))
    fresh.__cause__ = failure.__cause__
    return fresh


def total(loads: Iterable[Load]) -> Load:
    """Of several workers together."""
    return Load(*(sum(column) for column in zip(*(dataclasses.astuple(load) for load in loads), strict=True)))


class Worker(Protocol):
    """Attributes:
    name: unique in a run.
    slots: requests that it runs at once.
    max_length: longest sequence, in tokens.
    kv_tokens: tokens of KV that it shares out among trajectories; 0 where every slot has its own.
    version: of the weights that it generates with.
    failure: what ended it; None while it works, and where `close` ended it. One in another process may be back later,
      and has none then.
    """

    name: str
    slots: int
    max_length: int
    kv_tokens: int
    version: int
    failure: WorkerError | None

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Streams the turn. Closing the iterator early cancels it and frees its slot.

        Raises:
          ContractError: the request cannot be run (too long, empty).
          WorkerError: the worker failed or was closed.
          WorkerLost: it is away; the rest can be generated elsewhere.
        """
        ...

    async def preempt(self, trajectory: str) -> None:
        """Ends the running request of `trajectory` with a last chunk whose stop is "preempted"."""
        ...

    def prioritise(self, trajectory: str, priority: int, resident: bool) -> None:
        """Whom to start first, whose KV to keep; see venusrl.scheduling.protocol.Prioritise. Until release."""
        ...

    async def release(self, trajectory: str) -> None:
        """Forgets the KV of a trajectory that has ended. Unknown ids are ignored."""
        ...

    async def export_kv(self, trajectory: str) -> Any:
        """KV of the context of a trajectory that is not running here, for `import_kv` of a worker of the same kind;
        None where there is none. It stays here, too, while there is room."""
        ...

    async def import_kv(self, prefix: Any) -> int:
        """Takes KV from elsewhere; the tokens that were not here. 0 where there is no room for it, or it is of other
        weights: what is missing is computed again."""
        ...

    async def update_weights(self, params: Any, version: int) -> None:
        """Takes new weights between two decode chunks; returns once they, or newer ones, are in use. The same version
        again is taken again.

        Raises:
          ContractError: the version is older than one that is here, or the weights are of another model.
        """
        ...

    async def reset(self) -> None:
        """Ends requests with WorkerError, and forgets KV, what `prioritise` said and the version: weights of another
        run come next, of any version."""
        ...

    def load(self) -> Load: ...

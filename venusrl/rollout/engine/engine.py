"""The engine without asyncio: requests in, chunks out, one `step` at a time."""

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from venusrl.core.errors import ConfigError, ContractError
from venusrl.models.config import ModelConfig
from venusrl.rollout.engine.cache import new_caches
from venusrl.rollout.engine.programs import Programs, RowState
from venusrl.rollout.engine.rows import RowTable
from venusrl.rollout.worker import Chunk, Load, Request


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Attributes:
    slots: rows of KV, and requests at once.
    max_length: tokens of a row, prompt included.
    decode_steps: tokens a row may generate in one host turn.
    decode_rows: batch sizes below `slots` that decode is compiled for, ascending; `slots` is added.
    prefill_rows: batch sizes that prefill is compiled for, ascending.
    prefill_tokens: lengths that prefill is compiled for, ascending; longer ones take several calls.
    read_lengths: numbers of cached positions that attention is compiled for, ascending; max_length is added.
    keep_kv: KV of older weights stays in use after an update (cheaper, and off-policy by more than it says).
    """

    slots: int = 64
    max_length: int = 1024
    decode_steps: int = 8
    decode_rows: tuple[int, ...] = (16,)
    prefill_rows: tuple[int, ...] = (4, 16)
    prefill_tokens: tuple[int, ...] = (32, 128)
    read_lengths: tuple[int, ...] = (256, 512)
    keep_kv: bool = False

    def __post_init__(self):
        for name in ("prefill_rows", "prefill_tokens", "decode_rows", "read_lengths"):
            value = getattr(self, name)
            needed = name.startswith("prefill")
            if (needed and not value) or list(value) != sorted(set(value)) or any(size < 1 for size in value):
                raise ConfigError(f"rollout.{name}={value}; give ascending positive sizes")
        for name, least in (("slots", 1), ("max_length", 2), ("decode_steps", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"rollout.{name}={getattr(self, name)} is too small; give {least} or more")


def _bucket(value: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `value`; the largest where none does."""
    return next((size for size in sizes if size >= value), sizes[-1])


class Engine:
    """Static rows, prefill in buckets, fused decode. Not thread-safe: one caller at a time."""

    def __init__(self, config: ModelConfig, params: Any, version: int, stop_tokens: tuple[int, ...], o: EngineOptions):
        if o.max_length > config.max_length:
            raise ConfigError(
                f"rollout.max_length={o.max_length} is above the {config.max_length} tokens of the model; lower it"
            )
        self.options = o
        self.version = version
        self._params = params
        self._programs = Programs(config, stop_tokens)
        self._stop = frozenset(stop_tokens)
        self._caches = new_caches(config, o.slots, o.max_length)
        self._reads = sorted({r for r in o.read_lengths if r < o.max_length} | {o.max_length})
        self._batches = sorted({r for r in o.decode_rows if r < o.slots} | {o.slots})
        self._table = RowTable(o.slots)
        self._queue: deque[Request] = deque()
        self._priority: dict[str, int] = {}
        self._running: dict[int, Request] = {}  # by row
        self._left: dict[int, int] = {}  # tokens that a running row may still generate
        self._generated = self._prefilled = 0
        self._pause_s = 0.0

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running)

    @property
    def compiled(self) -> int:
        """Number of programs compiled so far."""
        return self._programs.compiled

    def load(self) -> Load:
        return Load(
            slots=self.options.slots,
            running=len(self._running),
            waiting=len(self._queue),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            pause_s=self._pause_s,
        )

    def check_request(self, request: Request) -> None:
        """Raises ContractError where the request can never run."""
        if not request.tokens or request.max_tokens < 1:
            raise ContractError(
                f"request of {request.trajectory}: {len(request.tokens)} context tokens, max_tokens "
                f"{request.max_tokens}; both must be at least 1"
            )
        if not 0 <= request.seed < 2**31:
            raise ContractError(f"request of {request.trajectory}: seed {request.seed} is no int32 >= 0; use another")
        if len(request.tokens) >= self.options.max_length:
            raise ContractError(
                f"request of {request.trajectory}: {len(request.tokens)} context tokens leave no room in "
                f"rollout.max_length={self.options.max_length}; end the trajectory, or raise it"
            )

    def submit(self, request: Request) -> None:
        """Queues a request; it starts at the next step that has a row for it."""
        self.check_request(request)
        self._queue.append(request)

    def cancel(self, trajectory: str) -> bool:
        """Ends the request of `trajectory`, if it has one; what it has generated was already given out."""
        for request in self._queue:
            if request.trajectory == trajectory:
                self._queue.remove(request)
                return True
        for row, request in self._running.items():
            if request.trajectory == trajectory:
                self._end(row)
                return True
        return False

    def release(self, trajectory: str) -> None:
        """Forgets the KV of a trajectory that has ended."""
        self._table.release(trajectory)
        self._priority.pop(trajectory, None)

    def prioritise(self, trajectory: str, priority: int, resident: bool) -> None:
        """Requests of higher priority start first; KV of resident trajectories is kept before that of others."""
        self._priority[trajectory] = priority
        (self._table.kept.add if resident else self._table.kept.discard)(trajectory)

    def set_weights(self, params: Any, version: int) -> None:
        """Takes new weights. KV of the old ones is dropped (running rows prefill again) unless `keep_kv`."""
        started = time.perf_counter()
        self._params = params
        self.version = version
        if not self.options.keep_kv:
            self._table.invalidate()
        jax.block_until_ready(params)
        self._pause_s += time.perf_counter() - started

    def step(self) -> list[tuple[Request, Chunk]]:
        """Starts what can start, prefills it, decodes once; the chunk of each running request."""
        while self._queue and self._table.available:
            request = max(self._queue, key=lambda r: self._priority.get(r.trajectory, 0))  # the first of equals
            self._queue.remove(request)
            row = self._table.acquire(request.trajectory, request.tokens)
            self._running[row] = request
            self._left[row] = min(request.max_tokens, self.options.max_length - len(request.tokens))
        self._prefill_running()
        return self._decode_running() if self._running else []

    def _prefill_running(self) -> None:
        rows = self._table.rows
        missing = {row: len(rows[row].tokens) - 1 - rows[row].cached for row in self._running}
        waiting = sorted((row for row, n in missing.items() if n > 0), key=lambda row: missing[row])
        largest = self.options.prefill_tokens[-1]
        while waiting:
            # Rows of like length together, so that little of a call is padding.
            time_bucket = _bucket(missing[waiting[0]], self.options.prefill_tokens)
            batch = [r for r in waiting if _bucket(missing[r], self.options.prefill_tokens) == time_bucket]
            batch = batch[: self.options.prefill_rows[-1]]
            size = _bucket(len(batch), self.options.prefill_rows)
            tokens = np.zeros((size, time_bucket), np.int32)
            start, count, where = (np.zeros(size, np.int32) for _ in range(3))
            for i, row in enumerate(batch):
                entry = rows[row]
                new = entry.tokens[entry.cached : min(len(entry.tokens) - 1, entry.cached + largest)]
                tokens[i, : len(new)] = new
                where[i], start[i], count[i] = row, entry.cached, len(new)
            read = _bucket(int((start + count).max()), self._reads)
            self._caches = self._programs.prefill(read, self._params, self._caches, where, tokens, start, count)
            for row, n in zip(batch, count, strict=False):
                rows[row].cached += int(n)
                missing[row] -= int(n)
                self._prefilled += int(n)
            waiting = [row for row in waiting if missing[row] > 0]

    def _decode_running(self) -> list[tuple[Request, Chunk]]:
        slots, steps = self.options.slots, self.options.decode_steps
        size = _bucket(len(self._running), self._batches)
        # Where each running row stands in the batch: its own place in a whole one, else the next.
        places = {row: row if size == slots else i for i, row in enumerate(self._running)}
        where = np.full(size, slots, np.int32)
        token, position, remaining, seed = (np.zeros(size, np.int32) for _ in range(4))
        temperature = np.zeros(size, np.float32)
        for row, request in self._running.items():
            entry, i = self._table.rows[row], places[row]
            where[i], token[i], position[i] = row, entry.tokens[-1], len(entry.tokens) - 1
            remaining[i], seed[i], temperature[i] = self._left[row], request.seed, request.temperature
        read = _bucket(int(position.max()), self._reads)
        state = RowState(*(jnp.asarray(x) for x in (token, position, remaining, temperature, seed)))
        rows = None if size == slots else jnp.asarray(where)
        self._caches, out = self._programs.decode(steps, read, self._params, self._caches, rows, state)
        tokens, logprobs, counts = (np.asarray(x) for x in out)
        chunks = []
        for row, request in list(self._running.items()):
            n = int(counts[places[row]])
            new = tokens[:n, places[row]].tolist()
            entry = self._table.rows[row]
            entry.tokens.extend(new)
            entry.cached = len(entry.tokens) - 1
            self._left[row] -= n
            self._generated += n
            stop = "stop" if new[-1] in self._stop else "length" if self._left[row] <= 0 else None
            chunks.append((request, Chunk(new, logprobs[:n, places[row]].tolist(), self.version, stop)))
            if stop:
                self._end(row)
        return chunks

    def _end(self, row: int) -> None:
        del self._running[row], self._left[row]
        self._table.idle(row)

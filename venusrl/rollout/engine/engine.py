"""The engine without asyncio: requests in, chunks out, one `step` at a time.

A step lets waiting requests begin by priority, prefills them for at most `stall_s`, and decodes a few tokens for every
request that is ready. Where pages run out, requests of the lowest priority wait again; what they have computed stays
cached as long as there is room.
"""

import dataclasses
import functools
import logging
import math
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from venusrl.core.errors import ConfigError, ContractError
from venusrl.models.config import ModelConfig
from venusrl.rollout.engine.attention import choose
from venusrl.rollout.engine.checks import check_fields, check_params, device_temperature
from venusrl.rollout.engine.kv import KvStore, Prefix
from venusrl.rollout.engine.lanes import Lanes, fitting
from venusrl.rollout.engine.options import EngineOptions, bucket
from venusrl.rollout.engine.programs import Programs, RowState
from venusrl.rollout.engine.sequence import Queue, Sequence
from venusrl.rollout.engine.transfer import KvShape
from venusrl.rollout.worker import MOST_TOP, Chunk, Load, Request, Top

Answer = tuple[Request, Chunk]

BEFORE_ANY = -1  # the version of an engine whose weights nobody vouches for


class Engine:
    """Rows and pages of KV, prefill in buckets, fused decode. Not thread-safe: one caller at a time.

    Attributes:
      options: what it was told, with the number of lanes that fits.
      attention: name of the attention that it uses.
      version: of the weights in use.
      updates_asked, updates_used: how often new weights were given, and how many of those are in use or were replaced.
      kv_shape: of the KV that it gives and takes.
    """

    def __init__(self, config: ModelConfig, params: Any, version: int, stop_tokens: tuple[int, ...], o: EngineOptions):
        if o.max_length > config.max_length:
            raise ConfigError(
                f"rollout.max_length={o.max_length} is above the {config.max_length} tokens of the model; lower it"
            )
        o = dataclasses.replace(o, lanes=o.lanes or fitting(params, o.slots))
        self.options = o
        self.version = version
        self._config = config
        self._params = params
        attention, note = choose(o.attention, config)
        if note:
            logging.warning("%s", note)
        self.attention = attention.name
        self.kv_shape = KvShape.of(config, o)
        self._programs = Programs(config, stop_tokens, attention)
        self._stop = frozenset(stop_tokens)
        self._kv = KvStore(config, o, self._programs)
        self._reads = sorted({r for r in o.read_lengths if r < o.max_length} | {o.row_tokens})
        self._batches = sorted({r for r in o.decode_rows if r < o.lane_rows} | {o.lane_rows})
        self._lanes = Lanes(o.lanes)
        self._queue = Queue()
        self._running: dict[str, Sequence] = {}
        self._claims: dict[tuple, str] = {}  # prefixes that are being prefilled, and by whom
        self._awaited: set[str] = set()  # those whose prefix another waits for
        self._next: tuple[Any, int] | None = None  # weights that wait until nothing runs
        self.updates_asked = self.updates_used = 0
        self._resident: set[str] = set()
        self._kept: dict[str, int] = {}  # tokens cached when its last request ended, of those resident ever since
        self._orders = 0
        self._updated = 0  # the tree's clock at the last update
        self._counts: Counter[str] = Counter()  # tokens, trajectories and seconds; see `load`

    @property
    def params(self) -> Any:
        """The weights in use."""
        return self._params

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._running or self._next)

    @property
    def compiled(self) -> int:
        """Number of programs compiled so far."""
        return self._programs.compiled

    def load(self) -> Load:
        c, tree = self._counts, self._kv.tree
        return Load(
            slots=self.options.slots,
            running=len(self._running),
            waiting=len(self._queue),
            generated_tokens=int(c["generated"]),
            prefilled_tokens=int(c["prefilled"]),
            pause_s=c["pause_s"],
            prompt_tokens=int(c["prompt"]),
            hit_tokens=int(c["hit"]),
            kept_tokens=int(c["kept"]),
            kept_hit_tokens=int(c["kept_hit"]),
            stale_tokens=int(c["stale"]),
            retracted=int(c["retracted"]),
            demoted=int(c["demoted"]),
            moved_tokens=int(c["moved_in"]),
            returned_tokens=self._kv.returned,
            evicted_pages=tree.evicted,
            free_pages=tree.free,
            evictable_pages=tree.evictable,
            pages=tree.capacity,
        )

    # Requests

    def check_request(self, request: Request) -> None:
        """Raises ContractError where the request can never run, whatever its fields hold."""
        check_fields(request, self._config.vocab_size)
        o, length = self.options, len(request.tokens)
        if length >= o.max_length:
            raise ContractError(
                f"request of {request.trajectory}: {length} context tokens leave no room in "
                f"rollout.max_length={o.max_length}; end the trajectory, or raise it"
            )
        if length >= o.pages * o.page:
            raise ContractError(
                f"request of {request.trajectory}: {length} context tokens do not fit the {o.pages} pages of {o.page} "
                "tokens of rollout.kv_tokens; raise it"
            )

    def submit(self, request: Request) -> None:
        """Queues a request; it starts when its turn comes and a slot and pages are free.

        Raises:
          ContractError: see `check_request`.
        """
        self.check_request(request)
        self._orders += 1
        left = min(request.max_tokens, self.options.max_length - len(request.tokens))
        self._queue.add(Sequence(request, list(request.tokens), left, self._orders))

    def cancel(self, trajectory: str) -> bool:
        """Ends the request of `trajectory`, if it has one; what it has generated was already given out."""
        if self._queue.remove(trajectory) is not None:
            return True
        s = self._running.pop(trajectory, None)
        if s is None:
            return False
        self._forget_claims(trajectory)
        self._end([s])
        return True

    def release(self, trajectory: str) -> None:
        """Forgets a trajectory that has ended."""
        self._kv.release(trajectory)
        self._queue.priority.pop(trajectory, None)
        self._resident.discard(trajectory)
        self._kept.pop(trajectory, None)

    def prioritise(self, trajectory: str, priority: int, resident: bool) -> None:
        """Requests of higher priority start first and are retracted last; pages of resident trajectories stay before
        those of others."""
        self._queue.priority[trajectory] = priority
        if resident != (trajectory in self._resident):
            (self._resident.add if resident else self._resident.discard)(trajectory)
            self._counts["demoted"] += not resident
            self._kv.tree.refer(trajectory, resident)
            if not resident:
                self._kept.pop(trajectory, None)

    # KV that moves

    def export(self, trajectory: str, namespace: str = "") -> Prefix | None:
        """KV of a trajectory that is not running, as far as it is cached; None where nothing is."""
        if trajectory in self._running:
            return None
        return self._kv.export(trajectory, namespace, self.version)

    def bring(self, prefix: Prefix) -> int:
        """Takes KV of another engine of the same model; the tokens that were not here. Of other weights: 0.

        Raises:
          ContractError: it is of another model or other options.
          WorkerError: the device did not take it; the engine goes on.
        """
        self.kv_shape.check_prefix(prefix)
        if prefix.version != self.version:
            return 0
        came = self._kv.bring(prefix, self._namespace(prefix.namespace))
        self._counts["moved_in"] += came
        return came

    # Weights

    def reset(self) -> None:
        """Ends every request, without a last chunk, and forgets KV, orders and the version: the next weights are of
        another run, in which versions and trajectories mean something else."""
        for s in list(self._running.values()):
            self._kv.abandon(s)
        trajectories = {*self._queue.priority, *self._resident, *self._kept, *self._running}
        for s in [*self._queue.in_order(), *self._running.values()]:
            self._queue.remove(s.trajectory)
            trajectories.add(s.trajectory)
        self._running.clear()
        self._claims.clear()
        self._awaited.clear()
        for trajectory in trajectories:
            self.release(trajectory)
        self._kv.drop()
        self._next, self.version = None, BEFORE_ANY
        self.updates_used = self.updates_asked

    def set_weights(self, params: Any, version: int) -> None:
        """Takes new weights, at once or (`on_update` "drain") when what runs has ended; see EngineOptions.on_update.

        Versions only grow. The version that is in use already may come again: the weights given last are used.

        Raises:
          ContractError: the version is older than one that is in use or waits, or the weights are of another shape;
            nothing has changed then.
        """
        newest = self.version if self._next is None else self._next[1]
        if type(version) is not int or version < 0:
            raise ContractError(f"weights of version {version!r}; give a whole number, 0 or more")
        if version < newest:
            raise ContractError(
                f"weights of version {version} are older than those of version {newest}, which are here; versions only "
                "grow in a run (`reset` comes before the weights of another)"
            )
        check_params(params, self._params)
        self.updates_asked += 1
        if self.options.on_update == "drain" and self._running:
            self._next = (params, version)
            return
        self._use(params, version)

    def _use(self, params: Any, version: int) -> None:
        started = time.perf_counter()
        self._next = None
        self._params, self.version = params, version
        if self.options.on_update != "keep":
            for s in list(self._running.values()):
                self._wait_again(s, keep=False)
            self._kv.drop()
            self._kept.clear()
        self._updated = self._kv.tree.ticks
        jax.block_until_ready(params)
        self.updates_used = self.updates_asked
        self._counts["pause_s"] += time.perf_counter() - started

    # A step

    def step(self) -> list[Answer]:
        """Starts what can start, prefills, decodes once; the chunk of each request that decoded."""
        if self._next is not None and not self._running:
            self._use(*self._next)
        answers: list[Answer] = []
        deadline = time.perf_counter() + self.options.stall_s
        while True:
            missing = self._begin()
            self._kv.fill_rows()
            if not missing or not self._prefill(deadline):
                break
        self._make_room(answers)
        self._decode(answers)
        if self.options.debug:
            self.check()
        return answers

    def check(self) -> None:
        """No page is lost or there twice; see RadixTree.check."""
        self._kv.tree.check([page for s in self._running.values() for page in s.pages[s.shared :]])

    def _namespace(self, tenant: str) -> tuple:
        return (tenant, None if self.options.on_update == "keep" else self.version)

    def _begin(self) -> bool:
        """Waiting requests begin, as far as there is room; whether there is anything to prefill."""
        if self._next is None:
            for s in self._queue.in_order():
                if len(self._running) == self.options.slots:
                    break
                holder = self._holder(s)
                if holder is not None:
                    self._awaited.add(holder)  # it shares what is being computed, a moment later
                    continue
                if not self._kv.begin(s, self._namespace(s.request.namespace), reserve=len(self._running)):
                    break
                self._queue.remove(s.trajectory)
                self._running[s.trajectory] = s
                self._count_hit(s)
                first = (s.cached // self.options.page + 1) * self.options.page
                if first < len(s.tokens):
                    self._claims[s.request.namespace, tuple(s.tokens[:first])] = s.trajectory
        return any(s.missing > 0 for s in self._running.values())

    def _holder(self, s: Sequence) -> str | None:
        """Who is computing a page that `s` would compute."""
        for length in {len(tokens) for _, tokens in self._claims}:
            holder = self._claims.get((s.request.namespace, tuple(s.tokens[:length])))
            if holder is not None and length < len(s.tokens):
                return holder
        return None

    def _forget_claims(self, trajectory: str) -> None:
        self._claims = {claim: holder for claim, holder in self._claims.items() if holder != trajectory}
        self._awaited.discard(trajectory)

    def _count_hit(self, s: Sequence) -> None:
        self._counts["prompt"] += len(s.tokens) - 1
        self._counts["hit"] += s.cached
        kept = self._kept.pop(s.trajectory, 0)
        self._counts["kept"] += kept
        self._counts["kept_hit"] += min(kept, s.cached)
        node = s.node
        while node is not None and self._updated:
            self._counts["stale"] += len(node.tokens) * (node.born <= self._updated)
            node = node.parent

    def _wait_again(self, s: Sequence, keep: bool) -> None:
        """A running request goes back to its place in the queue."""
        del self._running[s.trajectory]
        self._forget_claims(s.trajectory)
        if keep:
            self._end([s])
        else:
            self._kv.abandon(s)
        self._queue.add(s)

    def _prefill(self, deadline: float) -> bool:
        """Prefills until `deadline`, or to the end where nothing else waits for the device; whether it came to the
        end, and others may begin."""
        o, largest = self.options, self.options.prefill_tokens[-1]
        decoding = any(s.missing == 0 for s in self._running.values())
        waiting = [s for s in self._running.values() if s.missing > 0]
        waiting.sort(key=lambda s: (self._queue.key(s)[0], s.missing))
        while waiting:
            batches = []
            for lane, mine in self._by_lane(waiting):
                # Sequences of like length together, so that little of a call is padding.
                length = bucket(mine[0].missing, o.prefill_tokens)
                alike = [s for s in mine if bucket(s.missing, o.prefill_tokens) == length]
                batches.append((lane, length, alike[: o.prefill_rows[-1]]))
            self._lanes.run([functools.partial(self._prefill_lane, *batch) for batch in batches])
            for s in (s for *_, batch in batches for s in batch):
                n = min(s.missing, largest)
                s.cached += n
                self._counts["prefilled"] += n
                if not s.missing:
                    self._prefilled(s)
            waiting = [s for s in waiting if s.missing > 0]
            if decoding and waiting:
                self._kv.wait()
                if time.perf_counter() > deadline:
                    return False
        return bool(self._queue)

    def _prefill_lane(self, lane: int, length: int, batch: list[Sequence]) -> None:
        size, largest = bucket(len(batch), self.options.prefill_rows), self.options.prefill_tokens[-1]
        tokens = np.zeros((size, length), np.int32)
        start, count, where = (np.zeros(size, np.int32) for _ in range(3))
        for i, s in enumerate(batch):
            new = s.tokens[s.cached : s.cached + min(s.missing, largest)]
            tokens[i, : len(new)] = new
            where[i], start[i], count[i] = s.row % self.options.lane_rows, s.cached, len(new)
        read, caches = bucket(int((start + count).max()), self._reads), self._kv.caches
        caches[lane] = self._programs.prefill(read, self._params, caches[lane], where, tokens, start, count)

    def _by_lane(self, sequences: list[Sequence]) -> list[tuple[int, list[Sequence]]]:
        """Sequences by the lane in which their rows are; lanes that have none are left out."""
        lanes: dict[int, list[Sequence]] = {}
        for s in sequences:
            lanes.setdefault(s.row // self.options.lane_rows, []).append(s)
        return sorted(lanes.items())

    def _prefilled(self, s: Sequence) -> None:
        if s.trajectory in self._awaited:
            self._kv.publish(s)
        self._forget_claims(s.trajectory)

    def _make_room(self, answers: list[Answer]) -> None:
        """Pages for what the next decode writes, the highest priority first; the lowest are retracted for them."""
        ready = sorted((s for s in self._running.values() if not s.missing), key=self._queue.key)
        for s in ready:
            if s.trajectory not in self._running:
                continue  # it was retracted
            wanted = len(s.tokens) - 1 + min(self.options.decode_steps, s.left)
            while not self._kv.grow(s, wanted):
                victim = max(self._running.values(), key=self._queue.key)
                if len(self._running) == 1:
                    self._finish(s, answers, Chunk([], [], self.version, "length"))  # it has all pages there are
                    break
                self._wait_again(victim, keep=True)
                self._counts["retracted"] += 1
                if victim is s:
                    break

    def _finish(self, s: Sequence, answers: list[Answer], chunk: Chunk) -> None:
        answers.append((s.request, chunk))
        del self._running[s.trajectory]
        self._forget_claims(s.trajectory)
        self._end([s])

    def _decode(self, answers: list[Answer]) -> None:
        ready = [s for s in self._running.values() if not s.missing]
        if not ready:
            return
        lanes = self._by_lane(ready)
        decoded = self._lanes.run([functools.partial(self._decode_lane, *lane) for lane in lanes])
        ended, spoilt = [], {}
        pairs = [pair for (_, part), made in zip(lanes, decoded, strict=True) for pair in zip(part, made, strict=True)]
        for s, (new, new_logprobs, top) in pairs:
            n = len(new)
            good = next((k for k, value in enumerate(new_logprobs) if not math.isfinite(value)), n)
            if good < n:
                spoilt[s.trajectory] = Chunk(new[:good], new_logprobs[:good], self.version, "nan", top and top[:good])
                continue
            s.tokens += new
            s.cached = len(s.tokens) - 1
            s.left -= n
            self._counts["generated"] += n
            stop = "stop" if new[-1] in self._stop else "length" if s.left <= 0 else None
            answers.append((s.request, Chunk(new, new_logprobs, self.version, stop, top)))
            if stop:
                ended.append(s)
        for s in ended:
            del self._running[s.trajectory]
            self._forget_claims(s.trajectory)
        self._end(ended)
        if spoilt:
            self._begin_clean(spoilt, answers)

    def _begin_clean(self, spoilt: dict[str, Chunk], answers: list[Answer]) -> None:
        """Logits were no numbers, so some KV may be none either. It spoils whoever's row or page it lies in, even
        masked, for 0 times it is none. All KV is wiped and computed again; a request whose logits are no numbers for
        the second time fails, by itself."""
        for s in list(self._running.values()):
            if s.trajectory not in spoilt or not s.spoilt:
                s.spoilt = s.spoilt or s.trajectory in spoilt
                self._wait_again(s, keep=False)
                continue
            del self._running[s.trajectory]
            self._forget_claims(s.trajectory)
            self._kv.abandon(s)
            answers.append((s.request, spoilt[s.trajectory]))
        self._kv.wipe()
        self._kept.clear()

    def _decode_lane(self, lane: int, ready: list[Sequence]) -> list[tuple[list[int], list[float], Top | None]]:
        """New tokens and their logprobs of each sequence, and the most likely ones where it asks for any."""
        rows, steps = self.options.lane_rows, self.options.decode_steps
        size = bucket(len(ready), self._batches)
        # Where each row stands in the batch: its own place in a whole one, else the next.
        own = [s.row % rows for s in ready]
        places = own if size == rows else range(len(ready))
        where = np.full(size, rows, np.int32)
        token, position, remaining, seed = (np.zeros(size, np.int32) for _ in range(4))
        temperature = np.zeros(size, np.float32)
        for i, row, s in zip(places, own, ready, strict=True):
            where[i], token[i], position[i] = row, s.tokens[-1], len(s.tokens) - 1
            remaining[i], seed[i], temperature[i] = s.left, s.request.seed, device_temperature(s.request.temperature)
        read, caches = bucket(int(position.max()), self._reads), self._kv.caches
        state = RowState(*(jnp.asarray(x) for x in (token, position, remaining, temperature, seed)))
        which = None if size == rows else jnp.asarray(where)
        top = MOST_TOP if any(s.request.top_logprobs for s in ready) else 0
        caches[lane], out = self._programs.decode(steps, read, top, self._params, caches[lane], which, state)
        tokens, logprobs, counts, *ranked = (np.asarray(x) for x in out)
        return [
            (tokens[:n, i].tolist(), logprobs[:n, i].tolist(), _most_likely(*ranked, n, i, s.request.top_logprobs))
            for s, i, n in ((s, i, counts[i]) for s, i in zip(ready, places, strict=True))
        ]

    def _end(self, ended: list[Sequence]) -> None:
        self._kept.update((s.trajectory, s.cached) for s in ended if s.trajectory in self._resident)
        self._kv.end(ended)


def _most_likely(tokens_CRK: np.ndarray, logprobs_CRK: np.ndarray, n: int, row: int, wanted: int) -> Top | None:
    if not wanted:
        return None
    places = zip(tokens_CRK[:n, row, :wanted].tolist(), logprobs_CRK[:n, row, :wanted].tolist(), strict=True)
    return [list(zip(*place, strict=True)) for place in places]

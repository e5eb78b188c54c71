"""A simulated worker: continuous batching, exact between changes of the batch.

All running requests get a token a step, so one number, the tokens each has got since the start (`_served`), places
them all: a request ends when that number reaches its own. Waiting requests are prefilled first, as in SGLang: while a
prefill runs, no token is decoded. KV in host memory is copied while the prefill computes the rest. When decoding runs
out of KV, requests are retracted: lower priority first, then in SGLang's order (shortest output, then longest context).
"""

import heapq

from venusrl.sim.cache import PrefixCache
from venusrl.sim.cost import EngineCost

CHUNK_TOKENS = 8192  # of one prefill pass: SGLang's chunked_prefill_size on 80 GB devices
RESERVE_TOKENS = 256  # of KV kept free for each running request when one more is let in: about the mean turn
MAX_SERVED = 512.0  # tokens a request decodes at one step time; then the time is taken anew
EPSILON = 1e-6


class Request:
    """One action on a worker.

    Attributes:
      context: tokens at its start.
      tokens: to generate.
      made: generated so far.
    """

    __slots__ = ("begin", "context", "counted", "group", "made", "name", "order", "priority", "prompt", "tokens")

    def __init__(self, name: str, group: str, prompt: int, context: int, tokens: int, priority: int):
        self.name, self.group, self.prompt, self.context, self.tokens = name, group, prompt, context, tokens
        self.priority = priority
        self.made = 0
        self.order = 0  # of arrival
        self.begin = 0.0  # `_served` of the worker when it began to decode
        self.counted = 0  # tokens of its tail that the cache counts as running

    @property
    def length(self) -> int:
        """Tokens of its context and of what it has made."""
        return self.context + self.made


class SimWorker:
    """See the module. The driver calls `handle` at `next_time`, and asks for that again after every other call."""

    def __init__(self, name: str, slots: int, cost: EngineCost, page: int = 16, host_tokens: int = 0):
        self.name = name
        self.slots = slots
        self.cache = PrefixCache(cost.kv_tokens, page, host_tokens)
        self._cost = cost
        self._now = 0.0
        self._waiting: list[tuple[int, int, Request]] = []  # heap of (-priority, order, request)
        self._prefilling: list[Request] = []
        self._busy_until = 0.0  # of the prefill, or of a weight update
        self._running: dict[str, Request] = {}
        self._ends: list[tuple[float, int, Request]] = []  # heap of (served, order, request)
        self._served = 0.0
        self._contexts = 0.0  # of running requests, at their beginning; in all they are _contexts + _growth
        self._begins = 0.0  # sum of their `begin`
        self._step = 1.0  # seconds of a decode step since the last change
        self._order = 0
        self.requests: dict[str, Request] = {}
        # What happened, for the report.
        self.slot_s = 0.0  # requests in decode or prefill, integrated over time
        self.decode_s = 0.0  # with decode under way
        self.prefill_s = 0.0  # with prefill under way
        self.decoded = 0  # tokens
        self.prefilled = 0  # tokens
        self.hit = 0  # tokens of contexts that were here, on the device or in host memory
        self.kept_asked = self.kept_hit = 0  # both, of trajectories that were resident since their last turn
        self.returned = 0  # tokens that came from host memory
        self.asked = 0  # tokens of contexts that could have been here: all but what the turn's observation brought
        self.retracted = 0

    # Calls

    def submit(self, now: float, request: Request, reusable: int, kept: bool = False) -> None:
        """Takes a request. `reusable`: tokens of its context that some worker has held before; `kept`: it has been
        resident since."""
        self._advance(now)
        self.requests[request.name] = request
        self.asked += reusable
        what = (request.name, request.group, request.prompt, request.context)
        hit = min(reusable, self.cache.held(*what) + self.cache.behind(*what))
        self.hit += hit
        if kept:
            self.kept_asked += reusable
            self.kept_hit += hit
        self._queue(request)
        self._start(now)

    def preempt(self, now: float, name: str) -> int:
        """Ends a request early; the tokens it has made. Its KV stays, as that of any that stopped."""
        self._advance(now)
        request = self.requests.pop(name)
        self._cut_short(request, now)
        self._start(now)
        return request.made

    def interrupt(self, now: float, pause_s: float) -> list[Request]:
        """Weight update: every request stops where it is, all KV is dropped, nothing runs for `pause_s`."""
        self._advance(now)
        stopped = sorted(self.requests.values(), key=lambda r: r.order)
        for request in stopped:
            self._cut_short(request, now)
        self.requests.clear()
        self._waiting.clear()
        self.cache.clear()
        self._busy_until = now + pause_s
        return stopped

    def set_priority(self, name: str, priority: int) -> None:
        """For a request that is here."""
        request = self.requests.get(name)
        if request is None or request.priority == priority:
            return
        request.priority = priority
        if name not in self._running and request not in self._prefilling:
            self._waiting = [(-r.priority, r.order, r) for _, _, r in self._waiting]
            heapq.heapify(self._waiting)

    def next_time(self) -> float | None:
        """When `handle` is to be called; None where nothing is under way."""
        if self._now < self._busy_until or self._prefilling:  # a prefill may have ended at this very moment
            return self._busy_until
        count = len(self._running)
        if not count:
            return None
        served = self._ends[0][0] - self._served
        if served > MAX_SERVED:
            served = MAX_SERVED
        growth = count * self._served - self._begins
        room = self._room(count, growth)
        if room < served * count:
            served = room / count
        if served < 0.0:
            served = 0.0
        self._step = self._cost.decode_s(count, self._contexts + growth + count * served / 2)
        return self._now + served * self._step

    def handle(self, now: float) -> tuple[list[Request], list[Request]]:
        """What has happened by `now`: requests that began to decode, and requests that came to their end."""
        self._advance(now)
        joined = []
        if self._prefilling and now >= self._busy_until - EPSILON:
            joined, self._prefilling = self._prefilling, []
            for request in joined:
                self._join(request)
        finished = []
        ends = self._ends
        while ends and ends[0][0] <= self._served + EPSILON:
            request = heapq.heappop(ends)[2]
            self._stop(request, now)
            self.decoded += request.tokens - request.made  # a rounding error of the last step
            request.made = request.tokens
            del self.requests[request.name]
            finished.append(request)
        if now >= self._busy_until - EPSILON:
            if self._running:
                self._keep_headroom(now)
            if self._waiting:
                self._start(now)
        return joined, finished

    # Inside

    def _queue(self, request: Request) -> None:
        self._order += 1
        request.order = self._order
        heapq.heappush(self._waiting, (-request.priority, request.order, request))

    def _advance(self, now: float) -> None:
        elapsed = now - self._now
        if elapsed <= 0:
            return
        count = len(self._running)
        self.slot_s += elapsed * (count + len(self._prefilling))
        if self._now < self._busy_until - EPSILON:
            self.prefill_s += elapsed if self._prefilling else 0.0
        elif count:
            self._served += elapsed / self._step
            self.decode_s += elapsed
        self._now = now

    def _growth(self) -> float:
        """Tokens that running requests have made since they began; the cache does not count them yet."""
        return len(self._running) * self._served - self._begins

    def _room(self, count: int, growth: float) -> float:
        """Tokens that `count` running requests may still add when all cached tails are gone; a page each is
        rounding."""
        cache = self.cache
        return cache.capacity - cache.running - cache.prompts - count * cache.page - growth

    def _keep_headroom(self, now: float) -> None:
        """Makes room for what was decoded; retracts where cached tails are not enough."""
        cache, count = self.cache, len(self._running)
        growth = count * self._served - self._begins
        room = self._room(count, growth)
        if room - cache.tails >= count:
            return  # nothing is short
        if room < count:  # prompts that no running tail leans on go too
            cache.make_room(growth + count * (cache.page + 1))
            room = self._room(count, growth)
        while count > 1 and room < count:
            victim = min(self._running.values(), key=self._retraction_order)
            self._cut_short(victim, now)
            self._queue(victim)
            self.retracted += 1
            count -= 1
            room = self._room(count, self._growth())
        cache.make_room(self._growth())

    def _retraction_order(self, request: Request) -> tuple[int, float, int]:
        return (request.priority, self._served - request.begin + request.made, -request.context)

    def _start(self, now: float) -> None:
        """Begins a prefill of those in front that fit, unless one is under way."""
        if not self._waiting or self._prefilling or now < self._busy_until - EPSILON:
            return
        cache, running = self.cache, len(self._running)
        growth = running * self._served - self._begins
        chunks: list[tuple[int, int]] = []
        tokens = returned = 0
        while self._waiting and tokens < CHUNK_TOKENS:
            _, order, request = self._waiting[0]
            if request.order != order or self.requests.get(request.name) is not request:
                heapq.heappop(self._waiting)
                continue
            length, count = request.length, running + len(self._prefilling)
            held = cache.held(request.name, request.group, request.prompt, length)
            behind = cache.behind(request.name, request.group, request.prompt, length)
            if tokens and tokens + length - held - behind > CHUNK_TOKENS:
                break
            tail = cache.pages(length - request.prompt)
            fixed = cache.running + cache.prompts + cache.missing_prompt(request.group, request.prompt)
            if count and fixed + tail + growth + RESERVE_TOKENS * (count + 1) > cache.capacity:
                break
            heapq.heappop(self._waiting)
            cache.pin(request.name, request.group, request.prompt, length)
            request.counted = tail
            self._prefilling.append(request)
            cache.make_room(growth)
            new = length - held - behind or 1
            returned += behind
            tokens += new
            chunks.append((new, length - new))
        if chunks:
            self.prefilled += tokens
            self.returned += returned
            took = self._cost.prefill_s(chunks)
            if returned:
                took = max(took, self._cost.host_s(returned))
            self._busy_until = now + took

    def _join(self, request: Request) -> None:
        """Begins to decode."""
        request.begin = self._served
        self._running[request.name] = request
        self._contexts += request.length
        self._begins += self._served
        heapq.heappush(self._ends, (self._served + request.tokens - request.made, request.order, request))

    def _cut_short(self, request: Request, now: float) -> None:
        """Stops it before its end."""
        if self._running.get(request.name) is request:
            self._ends = [end for end in self._ends if end[2] is not request]
            heapq.heapify(self._ends)
        self._stop(request, now)

    def _stop(self, request: Request, now: float) -> None:
        """Out of decode or prefill; what it has made is counted, its KV is cached."""
        if self._running.get(request.name) is request:
            del self._running[request.name]
            self._contexts -= request.length
            self._begins -= request.begin
            made = min(request.tokens - request.made, round(self._served - request.begin + EPSILON - 0.5))
            request.made += made
            self.decoded += made
            if not self._running:  # rounding errors do not add up
                self._contexts = self._begins = self._served = 0.0
                self._ends.clear()
        elif request in self._prefilling:
            self._prefilling.remove(request)
        else:
            return
        self.cache.unpin(request.name, request.prompt, request.length, request.counted, now)

"""The KV of a simulated worker: prefixes by page, shared within a group, evicted in the order that residency asks for.

A trajectory's context is its group's prompt (one copy for all of the group) and a tail of its own. Running tails are
pinned. Of the others, pages go from the end of a tail, those without a reference first, then those with fewest, the
least recently used first among equals; a prompt goes when no tail leans on it.
"""

import heapq

from venusrl.sim.host import HostTier


class _Tail:
    __slots__ = ("group", "last", "resident", "stamp", "tokens")

    def __init__(self, group: str):
        self.group, self.tokens, self.last, self.resident, self.stamp = group, 0, 0.0, False, 0


class _Prompt:
    __slots__ = ("leaning", "stamp", "tokens")

    def __init__(self, tokens: int):
        self.tokens, self.leaning, self.stamp = tokens, 0, 0


class PrefixCache:
    """Tokens are counted in whole pages. `used` never exceeds `capacity` after `make_room` returned True.

    Args:
      host_tokens: what is evicted goes to host memory of so many tokens.

    Attributes:
      running: tokens of running tails, as `pin` counted them; the caller adds their growth.
      tails: tokens of cached tails.
      prompts: tokens of prompts, one copy a group.
    """

    def __init__(self, capacity: int, page: int = 16, host_tokens: int = 0):
        self._host = HostTier(host_tokens) if host_tokens else None
        self.capacity = capacity // page * page
        self.page = page
        self.running = self.tails = self.prompts = 0
        self._tails: dict[str, _Tail] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._references: dict[str, int] = {}  # resident trajectories, by group
        self._heap: list[tuple[int, float, int, bool, str]] = []  # references, last use, stamp, is a tail, name
        self._stamp = 0

    @property
    def used(self) -> int:
        return self.running + self.tails + self.prompts

    def pages(self, tokens: float) -> int:
        """`tokens` in whole pages, as tokens."""
        return int(-(-tokens // self.page)) * self.page

    def held(self, name: str, group: str, prompt: int, context: int) -> int:
        """Tokens of the context that are here."""
        if group not in self._prompts:
            return 0
        tail = self._tails.get(name)
        held = prompt + tail.tokens if tail else prompt
        return held if held < context else context

    def behind(self, name: str, group: str, prompt: int, context: int) -> int:
        """Tokens of the context after those that are here whose KV is in host memory."""
        if self._host is None:
            return 0
        held = reach = self.held(name, group, prompt, context)
        if group not in self._prompts:
            reach = min(prompt, self._host.reach(group, 0))
        if reach >= prompt:
            reach = prompt + self._host.reach(name, reach - prompt)
        return max(0, min(reach, context) - held)

    def missing_prompt(self, group: str, prompt: int) -> int:
        """Tokens of room that the group's prompt would take."""
        return 0 if group in self._prompts else self.pages(prompt)

    def pin(self, name: str, group: str, prompt: int, context: int) -> None:
        """A request starts to run; its tail is no longer cached but running."""
        found = self._prompts.get(group)
        if found is None:
            found = self._prompts[group] = _Prompt(self.pages(prompt))
            self.prompts += found.tokens
        tail = self._tails.get(name)
        if tail is None:
            tail = self._tails[name] = _Tail(group)
        self.tails -= tail.tokens
        if tail.tokens == 0:
            found.leaning += 1
        tail.tokens = 0
        tail.stamp = -1
        self.running += self.pages(context - prompt)

    def unpin(self, name: str, prompt: int, context: int, running: int, now: float) -> None:
        """It stopped running with `context` tokens, `running` of them counted by `pin` and since; all stay, cached."""
        tail = self._tails[name]
        self.running -= running
        tail.tokens = max(0, context - prompt) // self.page * self.page  # a page that is not full is not shared
        tail.last = now
        self.tails += tail.tokens
        if tail.tokens == 0:
            self._left(tail)
        self._push_tail(name, tail)

    def insert(self, name: str, group: str, prompt: int, tokens: int, now: float) -> None:
        """KV of a whole context comes from another worker; room for it was made."""
        fresh = max(0, tokens - prompt) // self.page * self.page
        tail = self._tails.setdefault(name, _Tail(group))
        if not fresh:
            return
        found = self._prompts.get(group)
        if found is None:
            found = self._prompts[group] = _Prompt(self.pages(prompt))
            self.prompts += found.tokens
        found.leaning += tail.tokens == 0
        self.tails += fresh - tail.tokens
        tail.tokens, tail.last = fresh, now
        self._push_tail(name, tail)

    def refer(self, name: str, group: str, resident: bool) -> None:
        """Whether the pages of its prefix count `name` as a reference."""
        tail = self._tails.get(name)
        if tail is None:
            if not resident:
                return
            tail = self._tails[name] = _Tail(group)
        if tail.resident == resident:
            return
        tail.resident = resident
        self._references[group] = self._references.get(group, 0) + (1 if resident else -1)
        if tail.stamp >= 0:
            self._push_tail(name, tail)

    def release(self, name: str) -> None:
        """Forgets a trajectory that is not running."""
        tail = self._tails.pop(name, None)
        if tail is None:
            return
        self.tails -= tail.tokens
        if tail.resident:
            self._references[tail.group] -= 1
        if tail.tokens:
            self._left(tail)

    def make_room(self, tokens: float) -> bool:
        """Evicts until `tokens` more fit; False where they cannot."""
        need = self.running + self.tails + self.prompts + tokens - self.capacity
        while need > 0 and self._heap:
            references, last, stamp, is_tail, name = heapq.heappop(self._heap)
            if is_tail:
                tail = self._tails.get(name)
                if tail is None or tail.stamp != stamp or tail.tokens == 0:
                    continue
                cut = min(tail.tokens, self.pages(need))
                if self._host is not None:
                    self._host.keep(name, tail.tokens - cut, tail.tokens)
                tail.tokens -= cut
                self.tails -= cut
                need -= cut
                if tail.tokens:
                    heapq.heappush(self._heap, (references, last, stamp, True, name))
                else:
                    self._left(tail)
            else:
                found = self._prompts.get(name)
                if found is None or found.stamp != stamp or found.leaning:
                    continue
                if self._host is not None:
                    self._host.keep(name, 0, found.tokens)
                self.prompts -= found.tokens
                need -= found.tokens
                del self._prompts[name]
        return need <= 0

    def clear(self) -> None:
        """Drops everything that is not running; for new weights, once nothing is running."""
        for tail in self._tails.values():
            tail.tokens = 0
        self._prompts.clear()
        self._heap.clear()
        self.tails = self.prompts = 0
        if self._host is not None:
            self._host.clear()

    def _left(self, tail: _Tail) -> None:
        """Nothing of a tail is here any more."""
        group = tail.group
        found = self._prompts.get(group)
        if found is None:
            return
        found.leaning -= 1
        if not found.leaning:
            self._stamp += 1
            found.stamp = self._stamp
            heapq.heappush(self._heap, (self._references.get(group, 0), -1.0, found.stamp, False, group))

    def _push_tail(self, name: str, tail: _Tail) -> None:
        self._stamp += 1
        tail.stamp = self._stamp
        if tail.tokens:
            heapq.heappush(self._heap, (int(tail.resident), tail.last, tail.stamp, True, name))

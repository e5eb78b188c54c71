"""ThunderAgent's router: programs are paused and resumed so that their KV fits the workers; no groups, no priorities.

After ThunderAgent/scheduler/router.py, backend/state.py and program/state.py of the published code (2026-03). A program
is a trajectory; it is REASONING while it waits for or holds a slot, ACTING while its tool is at work.

Three modes. "as_shipped" is what the code does: shared prefixes are never counted, and when no ACTING program is left
to pause, every REASONING program of the worker is marked, and marks stay. "as_documented" is what its documentation
says: prompts shared by group-mates count once, marks stop where the projection is safe, and marks are taken back.
"tuned" has the thresholds of Dynamo's port: it pauses above 0.95 of the KV, down to 0.80, and resumes up to 0.85.

What differs: tokens are counted, where the router estimates them from characters.
"""

import dataclasses

from venusrl.core.names import check_name
from venusrl.scheduling.options import THUNDERAGENT_MODES
from venusrl.scheduling.protocol import (
    ActionDone,
    ActionReady,
    Admit,
    Decision,
    Event,
    TrajectoryDone,
    Wake,
    WorkerDown,
    WorkerUp,
)

INTERVAL_S = 5.0
BUFFER_TOKENS = 100  # for each program
TIMEOUT_S = 1800.0  # a program is paused no longer


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """Shares of a worker's KV: pause above `pause`, down to `target`; resume up to `resume`."""

    pause: float = 1.0
    target: float = 1.0
    resume: float = 1.0


@dataclasses.dataclass(slots=True)
class _Program:
    group: str
    tokens: int
    prompt: int
    worker: str | None = None  # None while it is paused
    origin: str | None = None
    reasoning: bool = True
    running: bool = False
    marked: bool = False
    turn: int = 0
    paused_at: float = 0.0


class _Backend:
    def __init__(self, slots: int, kv_tokens: int):
        self.slots = self.free = slots
        self.kv_tokens = kv_tokens or float("inf")
        self.programs: dict[str, _Program] = {}
        self.waiting: dict[str, None] = {}


class ThunderAgent:
    """See the module and SchedulerPolicy.

    Args:
      mode: "as_shipped", "as_documented" or "tuned".
    """

    def __init__(self, mode: str = "as_shipped"):
        self.length_sources: dict[str, int] = {}
        check_name("mode", mode, THUNDERAGENT_MODES)
        self._documented = mode == "as_documented"
        self._limits = Thresholds(0.95, 0.80, 0.85) if mode == "tuned" else Thresholds()
        self._backends: dict[str, _Backend] = {}
        self._programs: dict[str, _Program] = {}
        self._paused: dict[str, None] = {}
        self._next_tick = 0.0
        self._woken = -1.0

    def observe(self, event: Event) -> None:
        if isinstance(event, ActionReady):
            self._ready(event)
        elif isinstance(event, ActionDone):
            self._done(event)
        elif isinstance(event, TrajectoryDone):
            program = self._programs.pop(event.trajectory, None)
            if program is not None:
                self._stop(event.trajectory, program)
                self._leave(event.trajectory, program)
                self._paused.pop(event.trajectory, None)
        elif isinstance(event, WorkerUp):
            if event.worker in self._backends:
                self._down(event.worker, event.time)
            self._backends[event.worker] = _Backend(event.slots, event.kv_tokens)
            self._resume(event.time)
        elif isinstance(event, WorkerDown) and event.worker in self._backends:
            self._down(event.worker, event.time)

    def decide(self, now: float) -> list[Decision]:
        if now >= self._next_tick:
            self._next_tick = now + INTERVAL_S
            self._resume(now)
            for backend in self._backends.values():
                self._pause_until_safe(backend, now)
        decisions: list[Decision] = []
        for worker, backend in self._backends.items():
            while backend.waiting and backend.free > 0:
                name = next(iter(backend.waiting))
                del backend.waiting[name]
                backend.free -= 1
                self._programs[name].running = True
                decisions.append(Admit(name, worker))
        if self._paused and self._woken < self._next_tick:
            self._woken = self._next_tick
            decisions.append(Wake(self._next_tick))
        return decisions

    # Events

    def _ready(self, e: ActionReady) -> None:
        program = self._programs.get(e.trajectory)
        if program is None:
            program = self._programs[e.trajectory] = _Program(e.group, e.context, e.context)
            if not self._paused and self._admit_new(e.trajectory, program):
                return
            self._paused[e.trajectory] = None
            program.paused_at = e.time
            return
        program.tokens, program.turn, program.reasoning = e.context, e.turn, True
        if program.worker is not None:
            self._backends[program.worker].waiting[e.trajectory] = None
        else:
            self._paused.setdefault(e.trajectory)

    def _admit_new(self, name: str, program: _Program) -> bool:
        need = program.tokens + BUFFER_TOKENS
        fitting = [w for w, b in self._backends.items() if self._remaining(b) >= need]
        if not fitting:
            return False
        self._place(name, program, min(fitting, key=lambda w: (self._active(self._backends[w]), w)))
        return True

    def _done(self, e: ActionDone) -> None:
        program = self._programs.get(e.trajectory)
        if program is None:
            return
        program.tokens += e.tokens
        self._stop(e.trajectory, program)
        program.reasoning = False
        if program.marked:
            self._pause(e.trajectory, program, e.time)

    def _stop(self, name: str, program: _Program) -> None:
        if program.worker is None:
            return
        backend = self._backends[program.worker]
        backend.waiting.pop(name, None)
        if program.running:
            backend.free += 1
            program.running = False

    def _down(self, worker: str, now: float) -> None:
        for name, program in list(self._backends[worker].programs.items()):
            program.running = False
            self._pause(name, program, now)
            program.origin = None
        del self._backends[worker]

    # Capacity

    def _active(self, backend: _Backend) -> int:
        return sum(p.tokens for p in backend.programs.values())

    def _used(self, backend: _Backend) -> float:
        used = self._active(backend) + BUFFER_TOKENS * len(backend.programs)
        if self._documented:
            prompts: dict[str, list[int]] = {}
            for program in backend.programs.values():
                prompts.setdefault(program.group, []).append(program.prompt)
            used -= sum(sum(p) - max(p) for p in prompts.values())
        return used

    def _remaining(self, backend: _Backend, share: float = 1.0) -> float:
        return share * backend.kv_tokens - self._used(backend)

    def _resume(self, now: float) -> None:
        late = [n for n in self._paused if now - self._programs[n].paused_at > TIMEOUT_S]
        for name in late if self._backends else ():
            program = self._programs[name]
            fewest = min(self._backends, key=lambda w: (len(self._backends[w].programs), w))
            self._place(name, program, program.origin if program.origin in self._backends else fewest)
        room = {w: self._remaining(b, self._limits.resume) for w, b in self._backends.items()}
        room = {w: r for w, r in room.items() if r > BUFFER_TOKENS}
        total, chosen, taken = sum(room.values()), [], 0.0
        for name in sorted(self._paused, key=lambda n: (self._order(self._programs[n]), self._programs[n].tokens, n)):
            need = self._programs[name].tokens + BUFFER_TOKENS
            if taken + need <= total:
                taken += need
                chosen.append(name)
        for name in sorted(chosen, key=lambda n: (-self._programs[n].tokens, n)):
            worker = max(room, key=lambda w: (room[w], w))
            need = self._programs[name].tokens + BUFFER_TOKENS
            if need <= room[worker]:
                room[worker] -= need
                self._place(name, self._programs[name], worker)

    @staticmethod
    def _order(program: _Program) -> int:
        """Those in the middle of a task, then new ones, then those whose tool is at work."""
        if not program.reasoning:
            return 2
        return 0 if program.turn else 1

    def _pause_until_safe(self, backend: _Backend, now: float) -> None:
        if self._remaining(backend, self._limits.pause) >= 0:
            if self._documented:
                for program in backend.programs.values():
                    program.marked = False
            return
        target = self._limits.target
        by_size = sorted(backend.programs, key=lambda n: (backend.programs[n].tokens, n))
        for name in [n for n in by_size if not backend.programs[n].reasoning]:
            if self._remaining(backend, target) >= 0:
                return
            self._pause(name, backend.programs[name], now)
        projected = self._remaining(backend, target)
        for name in [n for n in by_size if n in backend.programs]:
            if projected >= 0:
                return
            backend.programs[name].marked = True
            if self._documented:
                projected += backend.programs[name].tokens + BUFFER_TOKENS

    def _place(self, name: str, program: _Program, worker: str) -> None:
        self._paused.pop(name, None)
        program.worker = program.origin = worker
        self._backends[worker].programs[name] = program
        if program.reasoning:
            self._backends[worker].waiting[name] = None

    def _pause(self, name: str, program: _Program, now: float) -> None:
        self._leave(name, program)
        program.marked, program.paused_at = False, now
        self._paused[name] = None

    def _leave(self, name: str, program: _Program) -> None:
        if program.worker is not None:
            self._backends[program.worker].programs.pop(name, None)
            self._backends[program.worker].waiting.pop(name, None)
            program.worker = None

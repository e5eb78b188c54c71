"""A worker without a model and environments without sandboxes, for tests whose subject is the service.

The worker keeps the Worker contract: what it generates is a function of the context and the seed alone, so a turn
that was preempted goes on exactly where it stopped.
"""

import asyncio
from collections.abc import Callable, Sequence

from venusrl.core.env import Observation
from venusrl.core.errors import ContractError, WorkerError
from venusrl.models.chat import ChatFormat
from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.worker import Chunk, Load, Request

TEXTS = ["user\nassistant\n", "go on please, turn 0123456789", "reply answer say prompt wait done"] * 3


class Script:
    """What is said: token by token, from the context.

    Args:
      reply: text of turn k for a seed.
    """

    def __init__(self, reply: Callable[[int, int], str] = lambda turn, seed: f"say {turn} {seed}"):
        self.tokenizer = Tokenizer.train(TEXTS, 280)
        self.chat = ChatFormat(self.tokenizer)
        self._reply = reply
        self._header = len(self.tokenizer.encode("assistant\n")) + 1

    def next_token(self, tokens: Sequence[int], seed: int) -> int:
        opened = max(i for i, t in enumerate(tokens) if t == self.tokenizer.im_start)
        turn = list(tokens).count(self.tokenizer.im_start) // 2 - 1  # a message and a header before each turn
        said = len(tokens) - opened - self._header
        return [*self.tokenizer.encode(self._reply(turn, seed)), self.tokenizer.im_end][said]


class ScriptedWorker:
    """See venusrl.rollout.worker.Worker. `gate` holds generation where it is cleared."""

    def __init__(self, script: Script, name: str = "w", slots: int = 4, max_length: int = 512, chunk: int = 2):
        self.name, self.slots, self.max_length = name, slots, max_length
        self.kv_tokens = 0
        self.failure: WorkerError | None = None
        self.standing: dict[str, tuple[int, bool]] = {}
        self.script = script
        self.version = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.running: dict[str, Request] = {}
        self.most_running = 0
        self.requests: list[Request] = []
        self.kv: dict[str, tuple] = {}  # by trajectory, what a transfer takes along
        self.released: list[str] = []
        self.fail: Callable[[Request], Exception | None] = lambda request: None
        self._chunk = chunk
        self._preempted: set[str] = set()
        self._closed = False
        self._generated = self._prefilled = self._resets = 0

    async def start(self) -> None: ...

    async def close(self) -> None:
        self._closed = True
        self.gate.set()

    async def generate(self, request: Request):
        if not request.tokens or request.max_tokens < 1 or len(request.tokens) >= self.max_length:
            raise ContractError(f"request of {request.trajectory} cannot be run")
        if request.trajectory in self.running:
            raise ContractError(f"trajectory {request.trajectory} already has a request on {self.name}")
        self.requests.append(request)
        self.running[request.trajectory] = request
        self.most_running = max(self.most_running, len(self.running))
        self._prefilled += len(request.tokens)
        tokens, left, stop, resets = list(request.tokens), request.max_tokens, None, self._resets
        try:
            while stop is None:
                await asyncio.sleep(0)
                await self.gate.wait()
                error = WorkerError(f"worker {self.name} is closed") if self._closed else self.fail(request)
                error = error if resets == self._resets else WorkerError(f"worker {self.name} was reset")
                if error is not None:
                    raise error
                if request.trajectory in self._preempted:
                    yield Chunk([], [], self.version, "preempted")
                    return
                made = []
                while stop is None and len(made) < self._chunk:
                    made.append(self.script.next_token(tokens, request.seed))
                    tokens.append(made[-1])
                    left -= 1
                    if made[-1] == self.script.tokenizer.im_end:
                        stop = "stop"
                    elif left == 0 or len(tokens) == self.max_length:
                        stop = "length"
                self._generated += len(made)
                self.kv[request.trajectory] = (request.trajectory, tuple(tokens))
                yield Chunk(made, [-0.5] * len(made), self.version, stop)
        finally:
            del self.running[request.trajectory]
            self._preempted.discard(request.trajectory)

    async def preempt(self, trajectory: str) -> None:
        if trajectory in self.running:
            self._preempted.add(trajectory)

    def prioritise(self, trajectory: str, priority: int, resident: bool) -> None:
        self.standing[trajectory] = (priority, resident)

    async def release(self, trajectory: str) -> None:
        if self._closed:
            raise WorkerError(f"worker {self.name} is closed")
        self.standing.pop(trajectory, None)
        self.kv.pop(trajectory, None)
        self.released.append(trajectory)

    async def export_kv(self, trajectory: str):
        await self.gate.wait()
        if self._closed or self.failure:
            raise WorkerError(f"worker {self.name} is closed")
        return self.kv.get(trajectory)

    async def import_kv(self, prefix) -> int:
        if self._closed or self.failure:
            raise WorkerError(f"worker {self.name} is closed")
        self.kv[prefix[0]] = prefix
        return 1

    async def update_weights(self, params, version: int) -> None:
        await asyncio.sleep(0)
        if self._closed:
            raise WorkerError(f"worker {self.name} is closed")
        self.version = version

    async def reset(self) -> None:
        if self._closed:
            raise WorkerError(f"worker {self.name} is closed")
        self._resets += 1
        self.kv.clear()
        self.standing.clear()
        self.version = -1

    def load(self) -> Load:
        return Load(self.slots, len(self.running), 0, self._generated, self._prefilled, 0.0)


class ScriptedEnv:
    """An episode of `turns` turns; `act(what)` is awaited in reset, step, grade and close, and may raise or wait."""

    def __init__(self, turns: int = 2, reward: float = 1.0, act=None, answer: str = "go on"):
        self.turns, self.reward, self.answer = turns, reward, answer
        self.calls: list[str] = []
        self.replies: list[str] = []
        self.busy = 0
        self._act = act

    async def _do(self, what: str) -> None:
        self.calls.append(what)
        self.busy += 1
        try:
            if self._act is not None:
                await self._act(what)
        finally:
            self.busy -= 1

    async def reset(self):
        await self._do("reset")
        return [{"role": "user", "content": "prompt"}]

    async def step(self, reply: str) -> Observation:
        self.replies.append(reply)
        await self._do("step")
        done = len(self.replies) >= self.turns
        return Observation("" if done else self.answer, done=done, info={"command": reply})

    async def grade(self) -> float:
        await self._do("grade")
        return self.reward

    async def close(self) -> None:
        await self._do("close")

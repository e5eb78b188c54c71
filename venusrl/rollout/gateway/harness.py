"""A program that calls the OpenAI API as the agent loop of an episode.

The program is not changed: it is given an address, and its chat calls are the episode. The first call brings the
opening messages; what every later one adds to the history is the observation of the turn before; a reply answers the
call. So the trajectory is scheduled, preempted and captured as any other, and its sampling options are the run's,
whatever a call asks for.
"""

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from venusrl.core.door import Door
from venusrl.core.env import Observation, Opening, Reply
from venusrl.core.errors import ContractError, TaskError
from venusrl.core.http import Stream, body_of, until_gone
from venusrl.core.listening import Server, listen
from venusrl.rollout.gateway.api import HarnessCall, parsed
from venusrl.rollout.gateway.app import LONGEST_BODY, event
from venusrl.rollout.gateway.errors import HANDLERS, error_response
from venusrl.rollout.gateway.messages import Message, reply, same

Run = Callable[[str], Awaitable[None]]  # the program: is given the base URL of its API, returns when it has ended
OVER = "the episode is over"
STOP_S = 5.0  # that a program has to end by itself once its episode is over


@dataclasses.dataclass(frozen=True)
class Answer:
    """To a chat call: the message, why it ended, and the tokens of context and reply."""

    message: Message
    finish: str
    usage: dict[str, int]


class _Call:
    """A chat call that waits for its reply."""

    def __init__(self, messages: list[Message], tools: list[dict]):
        self.messages, self.tools = messages, tools
        self._answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def is_of(self, messages: list[Message], tools: list[dict]) -> bool:
        return self.tools == tools and same(self.messages, messages)

    async def answer(self) -> Answer:
        return await asyncio.shield(self._answer)

    def give(self, answer: Answer) -> None:
        self._answer.set_result(answer)

    def refuse(self, why: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(ContractError(why))
            self._answer.exception()  # nobody may be left who asks


class HarnessHub:
    """Serves the episodes of one process, each at an address of its own. `start` before use, `close` after.

    Args:
      host: to listen on, and to be called at.
    """

    def __init__(self, host: str = "127.0.0.1"):
        self._host = host
        self._episodes: dict[str, HarnessEnv] = {}
        self._server: Server | None = None
        self._task: asyncio.Task | None = None
        self._address = ""
        self._started_at = int(time.time())

    async def start(self) -> None:
        """Raises:
        ConfigError: the host cannot be listened on.
        """
        routes = [
            Route("/{episode}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/{episode}/v1/models", self._models),
        ]
        application = Starlette(routes=routes, exception_handlers=HANDLERS)
        listener, self._address = listen(self._host, 0)
        self._server = Server(Door(application, self._host), listener, grace_s=1)
        self._task = asyncio.create_task(self._server.run())

    async def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            await self._task

    def enter(self, env: "HarnessEnv") -> str:
        """The base URL of an episode's API."""
        name = secrets.token_urlsafe(12)
        self._episodes[name] = env
        return f"{self._address}/{name}/v1"

    def leave(self, env: "HarnessEnv") -> None:
        self._episodes = {name: other for name, other in self._episodes.items() if other is not env}

    async def _models(self, http: HttpRequest) -> Response:
        described = {"id": "policy", "object": "model", "created": self._started_at, "owned_by": "venusrl"}
        return JSONResponse({"object": "list", "data": [described]})

    async def _chat(self, http: HttpRequest) -> Response:
        env = self._episodes.get(http.path_params["episode"])
        if env is None:
            return error_response(404, OVER)
        body = await body_of(http, LONGEST_BODY)
        call: HarnessCall = await asyncio.to_thread(parsed, HarnessCall, body)
        answer = await until_gone(http, env.call(call.history(), call.offered))
        base = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": "policy"}
        if call.stream:
            return Stream(http, _events(base, answer, call.with_usage), "text/event-stream")
        choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish}
        return JSONResponse({**base, "object": "chat.completion", "choices": [choice], "usage": answer.usage})


async def _events(base: dict, answer: Answer, with_usage: bool) -> AsyncIterator[bytes]:
    """A whole answer as a stream."""
    base = {**base, "object": "chat.completion.chunk"}
    usage = {"usage": None} if with_usage else {}
    message = dict(answer.message)
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
    for delta, finish in ((message, None), ({}, answer.finish)):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        yield event({**base, "choices": [choice], **usage})
    if with_usage:
        yield event({**base, "choices": [], "usage": answer.usage})
    yield b"data: [DONE]\n\n"


class HarnessEnv:
    """See venusrl.core.env.Env.

    The episode ends when the program ends, or calls with another history than its own: one that was edited or cut
    short, or a second conversation. What was captured until then is graded.

    Args:
      run: the program. It may be cancelled; what it started it then has to end.
      grade: the reward, once the program has ended.
    """

    def __init__(self, hub: HarnessHub, run: Run, grade: Callable[[], Awaitable[float]]):
        self._hub, self._run, self._grade = hub, run, grade
        self._program: asyncio.Task | None = None
        self._calls: list[_Call] = []  # that came and were not taken up
        self._came = asyncio.Event()
        self._pending: _Call | None = None  # the one that the present turn answers
        self._last: _Call | None = None  # the one that was answered last
        self._over = False

    async def call(self, messages: list[Message], tools: list[dict]) -> Answer:
        """A chat call of the program; its reply. One that is repeated, as clients do, gets the same reply.

        Raises:
          ContractError: the episode is over.
        """
        for known in (self._last, self._pending, *self._calls):
            if known is not None and known.is_of(messages, tools):
                return await known.answer()
        if self._over:
            raise ContractError(OVER)
        call = _Call(messages, tools)
        self._calls.append(call)
        self._came.set()
        return await call.answer()

    async def reset(self) -> Opening:
        self._program = asyncio.create_task(self._run(self._hub.enter(self)), name="harness")
        await self._take_up()
        if self._pending is None:
            raise TaskError("the harness ended without a chat call")
        return Opening(self._pending.messages, self._pending.tools)

    async def step(self, said: Reply) -> Observation:
        call = self._last = self._pending
        message = reply(said, secrets.token_hex(8), bool(call.tools))
        finish = "tool_calls" if "tool_calls" in message and said.stop != "length" else said.stop
        made = {"prompt_tokens": said.prompt_tokens, "completion_tokens": said.completion_tokens}
        call.give(Answer(message, finish, {**made, "total_tokens": said.prompt_tokens + said.completion_tokens}))
        await self._take_up()
        if self._pending is None:
            return Observation("", done=True, info={"end": "the harness ended"})
        history, messages = [*call.messages, message], self._pending.messages
        new = messages[len(history) :]
        if not new or not same(messages[: len(history)], history) or self._pending.tools != call.tools:
            self._pending.refuse("the history was changed; the episode ends here")
            return Observation("", done=True, info={"end": "the history was changed"})
        return Observation("\n".join(m["content"] or "" for m in new), messages=tuple(new))

    async def grade(self) -> float:
        await self._stop()
        return await self._grade()

    async def close(self) -> None:
        self._hub.leave(self)
        await self._stop()

    async def _take_up(self) -> None:
        """Waits for the program's next call, which is the pending one then; where it ends before one, none is.

        Raises:
          TaskError: it failed.
        """
        self._pending = None
        coming = asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait({coming, self._program}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming.cancel()
        if self._calls:
            self._pending = self._calls.pop(0)
            if not self._calls:
                self._came.clear()
        elif self._program.cancelled():
            raise TaskError("the harness was cancelled")
        elif (error := self._program.exception()) is not None:
            raise TaskError(f"the harness failed: {error!r}") from error

    async def _stop(self) -> None:
        """Ends the program; calls that still wait, or come, are refused."""
        self._over = True
        for call in [self._pending, *self._calls]:
            if call is not None:
                call.refuse(OVER)
        self._calls.clear()
        if self._program is None:
            return
        try:
            await asyncio.wait({self._program}, timeout=STOP_S)
        finally:
            self._program.cancel()
        await asyncio.wait({self._program})  # not awaited itself: a cancellation of ours would be lost in its own
        if not self._program.cancelled():
            self._program.exception()  # the episode is over: how it ended is nobody's concern

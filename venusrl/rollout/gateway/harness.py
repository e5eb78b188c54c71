"""A program that calls the OpenAI API as the agent loop of an episode.

The program is not changed: it is given an address, and its chat calls are the episode. The first call brings the
opening messages; what every later one adds to the history is the observation of the turn before; a reply answers the
call. So the trajectory is scheduled, preempted and captured as any other, and its sampling options are the run's,
whatever a call asks for.
"""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from venusrl.core.env import Observation
from venusrl.core.errors import ContractError, TaskError, VenusError
from venusrl.rollout.gateway.app import call_fields, error_response, event, failed
from venusrl.rollout.gateway.messages import Message, check_messages, rendered, reply, same

Run = Callable[[str], Awaitable[None]]  # the program: is given the base URL of its API, returns when it has ended
STOP_S = 5.0  # that a program has to end by itself once its episode is over


class _Call:
    """A chat call that waits for its reply."""

    def __init__(self, messages: list[Message], tools: list[dict]):
        self.messages, self.tools = messages, tools
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()


class HarnessHub:
    """Serves the episodes of one process, each at an address of its own. `start` before use, `close` after."""

    def __init__(self, host: str = "127.0.0.1"):
        self._host = host
        self._episodes: dict[str, HarnessEnv] = {}
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task | None = None
        self._port = 0

    async def start(self) -> None:
        listener = socket.socket()
        listener.bind((self._host, 0))
        listener.listen()
        self._port = listener.getsockname()[1]
        routes = [
            Route("/{episode}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/{episode}/v1/models", self._models),
        ]
        application = Starlette(routes=routes, exception_handlers={VenusError: failed})
        options = uvicorn.Config(application, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(options)
        self._task = asyncio.create_task(self._server._serve([listener]))  # `serve` would take the signals for itself

    async def close(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
            await self._task

    def enter(self, env: "HarnessEnv") -> str:
        """The base URL of an episode's API."""
        name = secrets.token_urlsafe(12)
        self._episodes[name] = env
        return f"http://{self._host}:{self._port}/{name}/v1"

    def leave(self, env: "HarnessEnv") -> None:
        self._episodes = {name: other for name, other in self._episodes.items() if other is not env}

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "venusrl"}]})

    async def _chat(self, http: HttpRequest) -> Response:
        env = self._episodes.get(http.path_params["episode"])
        if env is None:
            return error_response(404, "the episode is over")
        fields = await call_fields(http)
        messages, tools = check_messages(fields.get("messages")), fields.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ContractError("tools must be a list of objects")
        message = await env.call(messages, tools)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        base = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": "policy"}
        choice = {"index": 0, "finish_reason": finish}
        if fields.get("stream"):
            whole = event({**base, "object": "chat.completion.chunk", "choices": [{**choice, "delta": message}]})
            return StreamingResponse(iter([whole, b"data: [DONE]\n\n"]), media_type="text/event-stream")
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}  # clients want the field
        choices = [{**choice, "message": message}]
        return JSONResponse({**base, "object": "chat.completion", "choices": choices, "usage": usage})


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
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._pending: _Call | None = None
        self._last: _Call | None = None  # the one that was answered last
        self._over = False

    async def call(self, messages: list[Message], tools: list[dict]) -> Message:
        """A chat call of the program; its reply. One that is repeated, as clients do, gets the same reply.

        Raises:
          ContractError: the episode is over.
        """
        for known in (self._pending, self._last):
            if known is not None and known.tools == tools and same(known.messages, messages):
                return await asyncio.shield(known.answer)
        if self._over:
            raise ContractError("the episode is over: it has no room for more, or its history was changed")
        call = _Call(messages, tools)
        self._calls.put_nowait(call)
        return await asyncio.shield(call.answer)

    async def reset(self) -> Sequence[dict[str, str]]:
        self._program = asyncio.create_task(self._run(self._hub.enter(self)), name="harness")
        self._pending = await self._next()
        if self._pending is None:
            raise TaskError("the harness ended without a chat call")
        return rendered(self._pending.messages, self._pending.tools)

    async def step(self, text: str) -> Observation:
        call = self._last = self._pending
        message = reply(text, f"{len(call.messages)}", bool(call.tools))
        call.answer.set_result(message)
        self._pending = None
        following = await self._next()
        if following is None:
            return Observation("", done=True, info={"end": "the harness ended"})
        history = [*call.messages, message]
        if not same(following.messages[: len(history)], history) or following.tools != call.tools:
            following.answer.set_exception(ContractError("the history was changed; the episode ends here"))
            return Observation("", done=True, info={"end": "the history was changed"})
        self._pending = following
        new = rendered(following.messages[len(history) :], ())
        return Observation("\n".join(m["content"] for m in new), messages=tuple(new))

    async def grade(self) -> float:
        await self._stop()
        return await self._grade()

    async def close(self) -> None:
        await self._stop()
        self._hub.leave(self)

    async def _next(self) -> _Call | None:
        """The next call; None where the program ends before one.

        Raises:
          TaskError: it failed.
        """
        coming = asyncio.ensure_future(self._calls.get())
        try:
            await asyncio.wait({coming, self._program}, return_when=asyncio.FIRST_COMPLETED)
            if coming.done():
                return coming.result()
        finally:
            coming.cancel()
        if self._program.cancelled() or self._program.exception() is not None:
            error = None if self._program.cancelled() else self._program.exception()
            raise TaskError(f"the harness failed: {error!r}") from error
        return None

    async def _stop(self) -> None:
        """Ends the program; calls that still wait, or come, are refused."""
        self._over = True
        waiting = [] if self._pending is None else [self._pending]
        self._pending = None
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait())
        for call in waiting:
            call.answer.set_exception(ContractError("the episode is over"))
            call.answer.exception()  # nobody may be left who asks
        if self._program is None or self._program.done():
            return
        await asyncio.wait({self._program}, timeout=STOP_S)
        self._program.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._program

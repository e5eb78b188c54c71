"""The OpenAI API over a worker: /v1/chat/completions, /v1/completions, /v1/models; and the sessions captured.

The header `x-session-id` (or the field `user`) says which session a call belongs to; a call without one is a session of
its own. `GET /sessions/ID` gives what was captured, `DELETE` forgets it. What is served and what is refused:
docs/gateway.md.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from venusrl.core.clock import Clock, WallClock
from venusrl.core.errors import ContractError, VenusError, WorkerError
from venusrl.core.http import Stream, body_of, until_gone
from venusrl.core.trajectory import sampling_seed
from venusrl.models.chat import ChatFormat
from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.gateway.api import BadCall, Call, ChatCall, CompletionCall, parsed
from venusrl.rollout.gateway.errors import HANDLERS, Busy, error_response, told, too_long
from venusrl.rollout.gateway.samples import ChatSample, Sample, TextSample, forced_text
from venusrl.rollout.gateway.session import Plan, Session
from venusrl.rollout.worker import Request, Worker

LONGEST_BODY = 16 * 2**20  # bytes
MOST_SESSIONS = 10_000
MOST_BYTES = 512 * 2**20  # of what all sessions keep, as it was sent; those idle for the longest are forgotten
LARGE = 64 * 2**10  # bytes of a body from which on it waits for other such ones


class Gateway:
    """See the module."""

    def __init__(
        self,
        worker: Worker,
        tokenizer: Tokenizer,
        chat: ChatFormat,
        model: str,
        max_tokens: int = 1024,
        idle_s: float = 3600.0,
        clock: Clock | None = None,
        queue: int = 1024,
    ):
        """Args:
        model: the name that answers carry.
        max_tokens: of a reply, where a call does not say.
        idle_s: seconds after the last call of a session ended after which it is forgotten.
        queue: replies that may wait beyond the worker's slots; a call that would be one more is refused (429).
        """
        self._idle_s, self._clock = idle_s, clock or WallClock()
        self._worker, self._tokenizer, self._chat = worker, tokenizer, chat
        self._model, self._max_tokens, self._queue = model, max_tokens, queue
        self._made_at = int(time.time())
        # A longer text is too long for the model whatever its tokens are (NFC joins up to 4 characters).
        self._longest_text = 4 * worker.max_length * tokenizer.longest
        self._under_way = 0  # replies, waiting ones among them
        self._open: dict[str, _Open] = {}
        self._leaving: Counter[str] = Counter()  # forgotten sessions, by name, of which calls are still under way
        self._large = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")  # so that small ones go past them

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/sessions/{name:path}", self._captured, methods=["GET"]),
            Route("/sessions/{name:path}", self._forget, methods=["DELETE"]),
        ]
        return Starlette(routes=routes, exception_handlers=HANDLERS)

    # Models and sessions

    def _described(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._made_at, "owned_by": "venusrl"}

    async def _models(self, http: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _one_model(self, http: HttpRequest) -> Response:
        if not http.path_params["name"]:  # a client that ends addresses with a slash
            return await self._models(http)
        if http.path_params["name"] != self._model:
            return error_response(404, f"no model {http.path_params['name']!r}; this is {self._model!r}")
        return JSONResponse(self._described())

    async def _captured(self, http: HttpRequest) -> Response:
        await self._drop_idle()
        name = http.path_params["name"]
        if name not in self._open:
            return error_response(404, f"no session {name!r}")
        self._touch(name)
        return JSONResponse({"id": name, "segments": self._open[name].session.captured()})

    async def _forget(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        if name not in self._open:
            return error_response(404, f"no session {name!r}")
        await self._drop(name)
        return JSONResponse({"id": name, "deleted": True})

    async def _drop(self, name: str) -> None:
        held = self._open.pop(name)
        if held.calls:
            self._leaving[name] += 1
        await self._release([segment.trajectory.id for segment in held.session.segments])

    async def _release(self, trajectories: Sequence[str]) -> None:
        for trajectory in trajectories:
            with contextlib.suppress(WorkerError):  # it is closed, and its KV with it
                await self._worker.release(trajectory)

    async def _drop_idle(self) -> None:
        """Forgets sessions that nobody has called for long, and the longest idle ones where there are too many; none
        with a call."""
        now = self._clock.now()
        idle = sorted((name for name, held in self._open.items() if not held.calls), key=lambda n: self._open[n].used)
        over = len(self._open) - MOST_SESSIONS
        size = sum(held.session.size for held in self._open.values())
        for i, name in enumerate(idle):
            held = self._open.get(name)
            if held is None or held.calls:
                continue  # no longer idle
            if i < over or size > MOST_BYTES or now - held.used >= self._idle_s:
                size -= held.session.size
                await self._drop(name)

    def _touch(self, name: str) -> None:
        self._open[name].used = self._clock.now()

    async def _enter(self, name: str, seed: int, keep: bool) -> "_Turn":
        """A call's turn in its session; calls of a session come one after the other."""
        while True:
            held = self._open.get(name)
            if held is None:
                # The same ids would be those of a call that is still under way in the session before.
                prefix = f"{name}~{secrets.token_hex(4)}" if self._leaving[name] else name
                held = _Open(Session(prefix, self._chat, seed), self._clock.now())
                if keep:
                    self._open[name] = held
            held.calls += 1
            try:
                await held.lock.acquire()
            except BaseException:
                held.calls -= 1
                raise
            turn = _Turn(self, name, held, keep)
            if not keep or not turn.forgotten:
                return turn
            turn.end()  # it was forgotten meanwhile; a new one begins

    # Calls

    async def _chat_completions(self, http: HttpRequest) -> Response:
        call = await self._call(http, ChatCall)
        self._check_length(call.texts())
        if call.offered and not self._chat.reads_calls:
            raise ContractError("tools: this model's template offers them in a form that is not read here; leave out")
        thinking = self._chat.opens_thought(call.chat_template_kwargs)
        forced = forced_text(call, thinking)

        def plan(session: Session) -> Plan:
            found = session.plan_chat(call.history(), call.offered, call.chat_template_kwargs)
            return dataclasses.replace(found, new=[*found.new, *(self._tokenizer.encode(forced) if forced else ())])

        return await self._answer(http, call, plan, functools.partial(ChatSample, thinking=thinking))

    async def _completions(self, http: HttpRequest) -> Response:
        call = await self._call(http, CompletionCall)
        self._check_length(len(call.prompt) if isinstance(call.prompt, str) else 0, "prompt")

        def plan(session: Session) -> Plan:
            prompt = call.prompt
            text = isinstance(prompt, str)
            return session.plan_tokens([*self._chat.prefix, *self._tokenizer.encode(prompt)] if text else prompt)

        return await self._answer(http, call, plan, functools.partial(TextSample, thinking=False))

    def _check_length(self, characters: int, field: str = "messages") -> None:
        if characters > self._longest_text:
            raise too_long(characters // (4 * self._tokenizer.longest), self._worker.max_length, field)

    async def _apart(self, size: int, work: Callable[..., Any], *args: Any) -> Any:
        """The result of `work`, off the event loop; what is large goes one after the other."""
        large = self._large if size > LARGE else None
        return await asyncio.get_running_loop().run_in_executor(large, functools.partial(work, *args))

    async def _call(self, http: HttpRequest, kind: type[Call]) -> Any:
        body = await body_of(http, LONGEST_BODY)
        call = await self._apart(len(body), parsed, kind, body)
        call.size = len(body)
        return call

    async def _answer(
        self, http: HttpRequest, call: Any, plan_in: Callable[[Session], Plan], sample_of: Callable[..., Sample]
    ) -> Response:
        named = http.headers.get("x-session-id") or call.user
        if named is not None and len(named) > 200:
            raise ContractError("x-session-id has more than 200 characters; shorten it")
        replies = self._replies(call, named, plan_in, sample_of)
        try:
            run = await until_gone(http, anext(replies))  # what is wrong with the call is an answer of its own
            if call.stream:
                return Stream(http, self._events(call, run, replies), "text/event-stream")
            await until_gone(http, _to_end(replies))
        except BaseException:
            await replies.aclose()
            raise
        choices = [self._with_ids(call, run, sample, sample.choice()) for sample in run.samples]
        ids = {"prompt_token_ids": run.context} if call.return_token_ids and isinstance(call, ChatCall) else {}
        return JSONResponse({**run.base, **ids, "object": run.samples[0].kind, "choices": choices, "usage": run.usage})

    async def _replies(
        self, call: Any, named: str | None, plan_in: Callable[[Session], Plan], sample_of: Callable[..., Sample]
    ) -> AsyncIterator[Any]:
        """First the run, once its first tokens are there; then (sample, what is streamed for its next tokens). Keeps
        the samples in the session when all have come to their end."""
        most = self._worker.slots + self._queue
        if call.samples > most:
            raise BadCall(f"n={call.samples} is above the {most} replies that this server takes at once", "n")
        if self._under_way + call.samples > most:
            raise Busy(f"{self._under_way} replies are under way or wait; try again later")
        self._under_way += call.samples
        turn = None
        try:
            await self._drop_idle()
            seed = call.seed if call.seed is not None else secrets.randbelow(2**31)
            turn = await self._enter(named or f"anonymous-{secrets.token_hex(8)}", seed, keep=bool(named))
            session = turn.session
            plan = await self._apart(call.size, plan_in, session)
            if len(plan.context) >= self._worker.max_length:
                field = "prompt" if isinstance(call, CompletionCall) else "messages"
                raise too_long(len(plan.context), self._worker.max_length, field)
            run = self._prepare(call, session, plan, sample_of)
            kept = False
            try:
                async with contextlib.aclosing(_merged([self._generate(*pair) for pair in run.requests()])) as pieces:
                    first = await anext(pieces)
                    yield run
                    yield first
                    async for piece in pieces:
                        yield piece
                dropped = session.keep(plan, [(s.generated.chunks, s.message) for s in run.samples], call.size)
                kept = True
            finally:
                known = {segment.trajectory.id for segment in session.segments}
                if kept and not turn.forgotten:
                    await self._release(dropped)
                else:
                    await self._release([i for i, _ in run.identities if turn.forgotten or i not in known])
        finally:
            self._under_way -= call.samples
            if turn is not None:
                turn.end()

    def _prepare(self, call: Any, session: Session, plan: Plan, sample_of: Callable[..., Sample]) -> "_Run":
        samples = [sample_of(call, self._tokenizer, i) for i in range(call.samples)]
        name = f"{samples[0].prefix}-{secrets.token_hex(12)}"
        base = {"id": name, "created": int(time.time()), "model": self._model}
        return _Run(call, base, samples, session.identities(plan, call.samples), plan.context, self._max_tokens)

    async def _generate(self, sample: Sample, request: Request) -> AsyncIterator[tuple[Sample, list[dict]]]:
        try:
            async with contextlib.aclosing(self._worker.generate(request)) as chunks:
                async for chunk in chunks:
                    yield sample, sample.take(chunk)
                    if sample.over:
                        return
        except BadCall:
            raise
        except ContractError as error:  # of the request, which has a name of ours
            raise BadCall(str(error).removeprefix(f"request of {request.trajectory}: ")) from error
        raise WorkerError(f"the reply of {request.trajectory} ended before its time; ask again")

    # Answers

    def _with_ids(self, call: Any, run: "_Run", sample: Sample, choice: dict[str, Any]) -> dict[str, Any]:
        if call.return_token_ids:
            choice |= {"prompt_token_ids": run.context, "token_ids": sample.generated.tokens}
        return choice

    async def _events(self, call: Any, run: "_Run", replies: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        """Server-sent events of a streamed answer; an error is the last of them."""
        base = {**run.base, "object": run.samples[0].stream_kind}
        usage = {"usage": None} if call.with_usage else {}

        def chunk(sample: Sample, choice: dict[str, Any]) -> bytes:
            choice = {"index": sample.index, "logprobs": None, "finish_reason": None, **choice}
            return event({**base, "choices": [choice], **usage})

        async with contextlib.aclosing(replies):
            try:
                for sample in run.samples:
                    for choice in sample.begin():
                        yield chunk(sample, choice)
                async for sample, choices in replies:
                    for choice in choices:
                        yield chunk(sample, choice)
                    if sample.over:
                        yield chunk(sample, self._with_ids(call, run, sample, sample.end()))
            except VenusError as error:
                yield event(told(error))
                return
        if call.with_usage:
            yield event({**base, "choices": [], "usage": run.usage})
        yield b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True)
class _Run:
    """The replies to one call, on their way."""

    call: Call
    base: dict[str, Any]
    samples: list[Sample]
    identities: list[tuple[str, int]]
    context: list[int]
    max_tokens: int

    def requests(self) -> list[tuple[Sample, Request]]:
        """A request a sample; where the call has a seed, it and the number of the sample decide every draw."""
        call = self.call
        temperature = 1.0 if call.temperature is None else call.temperature
        length, pairs = call.length or self.max_tokens, []
        for i, (sample, (name, seed)) in enumerate(zip(self.samples, self.identities, strict=True)):
            if call.seed is not None:
                seed = sampling_seed(call.seed, i) if i else call.seed
            request = Request(name, self.context, length, temperature, seed, top_logprobs=call.ranks)
            pairs.append((sample, request))
        return pairs

    @property
    def usage(self) -> dict[str, int]:
        made = sum(len(sample.generated.tokens) for sample in self.samples)
        return {
            "prompt_tokens": len(self.context),
            "completion_tokens": made,
            "total_tokens": len(self.context) + made,
        }


class _Open:
    """A session that is served. Attributes:
    lock: held by the call whose turn it is.
    calls: that have or wait for their turn.
    used: when the last one ended, or what was captured was read.
    """

    def __init__(self, session: Session, now: float):
        self.session, self.used = session, now
        self.lock = asyncio.Lock()
        self.calls = 0


class _Turn:
    """A call's turn in its session, until `end`, once or more."""

    def __init__(self, gateway: Gateway, name: str, held: _Open, kept: bool):
        self.session, self._name = held.session, name
        self._gateway, self._held, self._kept = gateway, held, kept
        self._ended = False

    @property
    def forgotten(self) -> bool:
        """Nobody can come back to the session."""
        return not self._kept or self._gateway._open.get(self._name) is not self._held

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._held.lock.release()
        self._held.calls -= 1
        if not self.forgotten:
            self._gateway._touch(self._name)
        elif self._kept and not self._held.calls:
            self._gateway._leaving[self._name] -= 1
            self._gateway._leaving += Counter()  # without those at 0


async def _merged(streams: Sequence[AsyncIterator[Any]]) -> AsyncIterator[Any]:
    """Items of several streams as they come; the first error of any ends all of them."""
    items: asyncio.Queue = asyncio.Queue()
    ended = object()

    async def pump(stream: AsyncIterator[Any]) -> None:
        async with contextlib.aclosing(stream):
            async for item in stream:
                items.put_nowait(item)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(lambda done: items.put_nowait((ended, done)))
    try:
        left = len(tasks)
        while left:
            item = await items.get()
            if item[0] is ended:
                left -= 1
                item[1].result()
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _to_end(replies: AsyncIterator[Any]) -> None:
    async for _ in replies:
        pass


def event(body: dict) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"

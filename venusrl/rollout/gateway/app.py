"""The OpenAI API over a worker: /v1/chat/completions, /v1/completions, /v1/models; and the sessions captured.

The header `x-session-id` (or the field `user`) says which session a call belongs to; a call without one is a session of
its own. `GET /sessions/ID` gives what was captured, `DELETE` forgets it. `return_token_ids: true` adds prompt and
completion ids to an answer.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from venusrl.core.clock import Clock, WallClock
from venusrl.core.errors import ContractError, VenusError
from venusrl.models.chat import ChatFormat
from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.gateway.messages import check_messages, reply
from venusrl.rollout.gateway.session import Segment, Session
from venusrl.rollout.worker import Request, Worker

STOPS = 4  # stop strings a call may give, as in the OpenAI API
FINISH = {"stop": "stop", "length": "length", "preempted": "length"}


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
    ):
        """Args:
        model: the name that answers carry.
        max_tokens: of a reply, where a call does not say.
        idle_s: seconds after the last call of a session ended after which it is forgotten.
        """
        self._idle_s, self._clock = idle_s, clock or WallClock()
        self._worker, self._tokenizer, self._chat = worker, tokenizer, chat
        self._model, self._max_tokens = model, max_tokens
        self._open: dict[str, _Open] = {}

    def app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/sessions/{name:path}", self._captured, methods=["GET"]),
            Route("/sessions/{name:path}", self._forget, methods=["DELETE"]),
        ]
        return Starlette(routes=routes, exception_handlers={VenusError: failed})

    async def _models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "venusrl"}]})

    async def _captured(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in self._open:
            return error_response(404, f"no session {name!r}")
        self._touch(name)
        return JSONResponse({"id": name, "segments": self._open[name].session.captured()})

    async def _forget(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in self._open:
            return error_response(404, f"no session {name!r}")
        await self._drop(name)
        return JSONResponse({"id": name, "deleted": True})

    async def _drop(self, name: str) -> None:
        for segment in self._open.pop(name).session.segments:
            await self._worker.release(segment.trajectory.id)

    async def _drop_idle(self) -> None:
        """Forgets sessions that nobody has called for long; none with a call."""
        now = self._clock.now()
        idle = [name for name, held in self._open.items() if not held.calls and now - held.used >= self._idle_s]
        for name in idle:
            if name in self._open and not self._open[name].calls:  # still
                await self._drop(name)

    def _touch(self, name: str) -> None:
        self._open[name].used = self._clock.now()

    async def _enter(self, name: str, seed: int, keep: bool) -> "_Turn":
        """A call's turn in its session; calls of a session come one after the other."""
        while True:
            held = self._open.get(name)
            if held is None:
                held = _Open(Session(name, self._chat, seed), self._clock.now())
                if keep:
                    self._open[name] = held
            held.calls += 1
            try:
                await held.lock.acquire()
            except BaseException:
                held.calls -= 1
                raise
            turn = _Turn(self, held, keep)
            if not keep or not turn.forgotten:
                return turn
            turn.end()  # it was forgotten meanwhile; a new one begins

    async def _chat_completions(self, http: HttpRequest) -> Response:
        fields = await call_fields(http)
        messages = check_messages(fields.get("messages"))
        tools = fields.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ContractError("tools must be a list of objects")
        return await self._answer(http, fields, lambda session: session.call(messages, tools), Chat(self, bool(tools)))

    async def _completions(self, http: HttpRequest) -> Response:
        fields = await call_fields(http)
        prompt = fields.get("prompt")
        if isinstance(prompt, str):
            tokens = self._tokenizer.encode(prompt)
        elif isinstance(prompt, list) and prompt and all(type(t) is int and t >= 0 for t in prompt):
            tokens = prompt
        else:
            raise ContractError("prompt must be text or a list of token ids; one a call")
        if not tokens:
            raise ContractError("prompt is empty; give at least one token")
        return await self._answer(http, fields, lambda session: session.complete(tokens), Text(self))

    async def _answer(self, http: HttpRequest, fields: dict, segment_of, kind: "Chat | Text") -> Response:
        options = _options(fields, self._max_tokens)
        named = http.headers.get("x-session-id") or fields.get("user")
        name = named or f"anonymous-{secrets.token_hex(8)}"
        if not isinstance(name, str) or len(name) > 200:
            raise ContractError("the session's name must be text of at most 200 characters")
        await self._drop_idle()
        seed = options["seed"] if options["seed"] is not None else secrets.randbelow(2**31)
        turn = await self._enter(name, seed, keep=bool(named))
        try:
            segment = segment_of(turn.session)
            prompt = list(segment.trajectory.tokens)
            request = Request(
                segment.trajectory.id,
                prompt,
                options["max_tokens"],
                options["temperature"],
                segment.trajectory.seed if options["seed"] is None else options["seed"],
            )
            said = Said(self._tokenizer, options["stop"])
            stream = self._generate(request, segment, said, turn, kind)
            first = await anext(stream)  # what is wrong with the request is an answer of its own
        except BaseException:
            turn.end()
            raise
        base = {"id": f"{kind.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": self._model}
        if fields.get("stream"):
            lines = self._stream(base, kind, stream, first, said, prompt, fields)
            return StreamingResponse(lines, media_type="text/event-stream")
        async with contextlib.aclosing(stream):
            async for _ in stream:
                pass
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(said.tokens),
            "total_tokens": len(prompt) + len(said.tokens),
        }
        choice = kind.choice(said, segment, bool(fields.get("logprobs")))
        if fields.get("return_token_ids"):
            choice |= {"prompt_token_ids": prompt, "token_ids": said.tokens}
        return JSONResponse({**base, "object": kind.kind, "choices": [choice], "usage": usage})

    async def _generate(
        self, request: Request, segment: Segment, said: "Said", turn: "_Turn", kind: "Chat | Text"
    ) -> AsyncIterator[str]:
        """Pieces of text as they come; captures them. Its KV is nobody's afterwards where the session is not kept."""
        trajectory = segment.trajectory
        try:
            async with contextlib.aclosing(self._worker.generate(request)) as chunks:
                async for chunk in chunks:
                    if chunk.tokens:
                        trajectory.append_generated(chunk.tokens, chunk.logprobs, chunk.version)
                    piece = said.add(chunk.tokens, chunk.logprobs, chunk.stop)
                    yield piece
                    if said.finish:
                        break
        finally:
            kind.said(said, segment)
            turn.end()
            if turn.forgotten:
                with contextlib.suppress(VenusError):
                    await self._worker.release(trajectory.id)

    async def _stream(
        self, base: dict, kind: "Chat | Text", stream: AsyncIterator[str], first: str, said: "Said", prompt, fields
    ) -> AsyncIterator[bytes]:
        def piece_event(choice: dict) -> bytes:
            choices = [{"index": 0, "finish_reason": None, **choice}]
            return event({**base, "object": kind.stream_kind, "choices": choices})

        async with contextlib.aclosing(stream):
            try:
                yield piece_event(kind.piece(first, begin=True))
                async for piece in stream:
                    if piece:
                        yield piece_event(kind.piece(piece, begin=False))
            except VenusError as error:
                yield event({"error": {"message": str(error), "type": type(error).__name__}})
                return
        last: dict[str, Any] = {**kind.piece(said.rest, begin=False), "finish_reason": kind.finish(said)}
        if fields.get("return_token_ids"):
            last |= {"prompt_token_ids": prompt, "token_ids": said.tokens}
        yield piece_event(last)
        yield b"data: [DONE]\n\n"


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

    def __init__(self, gateway: Gateway, held: _Open, kept: bool):
        self.session = held.session
        self._gateway, self._held, self._kept = gateway, held, kept
        self._ended = False

    @property
    def forgotten(self) -> bool:
        """Nobody can come back to the session."""
        return not self._kept or self._gateway._open.get(self.session.name) is not self._held

    def end(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._held.lock.release()
        self._held.calls -= 1
        if not self.forgotten:
            self._gateway._touch(self.session.name)


class Said:
    """What a reply has become so far.

    Attributes:
      tokens, logprobs: generated, all of them.
      text: of the reply, up to a stop string.
      rest: the end of the text that was held back, as a stop string may have begun there.
      finish: why it ended; None before it has.
    """

    def __init__(self, tokenizer: Tokenizer, stops: list[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = self.rest = ""
        self.finish: str | None = None
        self._given = 0

    def add(self, tokens: list[int], logprobs: list[float], stop: str | None) -> str:
        """Takes a chunk; the text that can be given out with it."""
        self.tokens += tokens
        self.logprobs += logprobs
        self.text = self._tokenizer.decode(self.tokens)
        ends = [at for at in (self.text.find(s) for s in self._stops) if at >= 0]
        if ends:
            self.text, self.finish = self.text[: min(ends)], "stop"
        elif stop is not None:
            self.finish = FINISH.get(stop, stop)
        if self.finish:
            self.rest = self.text[self._given :]
            return ""
        safe = self.text.rstrip("\ufffd")  # the first bytes of a character
        held = max((len(s) - 1 for s in self._stops), default=0)
        safe = safe[: max(self._given, len(safe) - held)]
        piece, self._given = safe[self._given :], max(self._given, len(safe))
        return piece


class Chat:
    """The shape of answers to /v1/chat/completions."""

    prefix, kind, stream_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, gateway: Gateway, tools: bool):
        self._tools = tools
        self._tokenizer = gateway._tokenizer
        self._message: dict[str, Any] = {}

    def said(self, said: Said, segment: Segment) -> None:
        self._message = reply(said.text, f"{len(segment.messages)}", self._tools)
        segment.messages = [*segment.messages, self._message]

    def finish(self, said: Said) -> str | None:
        return "tool_calls" if self._message.get("tool_calls") else said.finish

    def choice(self, said: Said, segment: Segment, logprobs: bool) -> dict[str, Any]:
        choice = {"index": 0, "message": self._message, "finish_reason": self.finish(said)}
        if logprobs:
            pairs = zip(said.tokens, said.logprobs, strict=True)
            content = [{"token": self._tokenizer.decode([t], keep_control=True), "logprob": p} for t, p in pairs]
            choice["logprobs"] = {"content": content}
        return choice

    def piece(self, text: str, begin: bool) -> dict[str, Any]:
        return {"delta": {**({"role": "assistant"} if begin else {}), "content": text}}


class Text:
    """The shape of answers to /v1/completions."""

    prefix, kind, stream_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, gateway: Gateway):
        self._tokenizer = gateway._tokenizer

    def said(self, said: Said, segment: Segment) -> None: ...

    def finish(self, said: Said) -> str | None:
        return said.finish

    def choice(self, said: Said, segment: Segment, logprobs: bool) -> dict[str, Any]:
        choice = {"index": 0, "text": said.text, "finish_reason": said.finish}
        if logprobs:
            tokens = [self._tokenizer.decode([t], keep_control=True) for t in said.tokens]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": said.logprobs}
        return choice

    def piece(self, text: str, begin: bool) -> dict[str, Any]:
        return {"text": text}


def _options(fields: dict, max_tokens: int) -> dict[str, Any]:
    """Sampling options of a call.

    Raises:
      ContractError: one is of the wrong kind, or asks for what the engine does not do.
    """
    if fields.get("n") not in (None, 1):
        raise ContractError(f"n={fields['n']!r}: one reply a call; call again for more")
    if fields.get("top_p") not in (None, 1, 1.0) or fields.get("top_k") not in (None, -1):
        raise ContractError("top_p and top_k are not supported: logprobs are over the full vocabulary; use temperature")
    temperature = fields.get("temperature", 1.0)
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature <= 100:
        raise ContractError(f"temperature={temperature!r}: give a number of at least 0")
    count = fields.get("max_completion_tokens") or fields.get("max_tokens", max_tokens)
    if type(count) is not int or count < 1:
        raise ContractError(f"max_tokens={count!r}: give at least 1")
    stops = fields.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or len(stops) > STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ContractError(f"stop={stops!r}: give up to {STOPS} texts")
    seed = fields.get("seed")
    if seed is not None and (type(seed) is not int or not 0 <= seed < 2**31):
        raise ContractError(f"seed={seed!r}: give an integer from 0 to 2^31 - 1")
    return {"temperature": float(temperature), "max_tokens": count, "stop": stops, "seed": seed}


async def call_fields(http: HttpRequest) -> dict:
    """The body of a call.

    Raises:
      ContractError: it is no JSON object.
    """
    try:
        fields = await http.json()
    except ValueError as error:
        raise ContractError(f"the body is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ContractError("the body must be a JSON object")
    return fields


def event(body: dict) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def error_response(status: int, text: object) -> JSONResponse:
    """An error in the OpenAI API's form."""
    return JSONResponse({"error": {"message": str(text), "type": "invalid_request_error"}}, status_code=status)


async def failed(request: HttpRequest, error: Exception) -> Response:
    """The answer to a call that raised `error`: the caller's fault, or ours."""
    return error_response(400 if isinstance(error, ContractError) else 503, error)

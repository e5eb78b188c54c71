"""A reply on its way to its caller, in the shapes of the two kinds of answers: whole, and in pieces."""

import dataclasses
import secrets
from typing import Any

from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.gateway.api import BadCall, ChatCall, CompletionCall, NamedTool
from venusrl.rollout.gateway.calls import OPEN, THOUGHT, CallReader, ReadCall
from venusrl.rollout.gateway.generated import Generated
from venusrl.rollout.gateway.messages import Message, call_id, message_of
from venusrl.rollout.worker import Chunk


class ChatSample:
    """One choice of an answer to /v1/chat/completions."""

    prefix, kind, stream_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, call: ChatCall, tokenizer: Tokenizer, index: int, thinking: bool):
        """Args:
        index: of the choice.
        thinking: the prompt ends inside a thought.
        """
        self._call = call
        self._choice = call.tool_choice
        self._name = secrets.token_hex(8)  # its calls are named after it
        self._reader = CallReader(thinking) if call.offered else None
        self._calls: list[ReadCall] = []
        self._content: list[str] = []
        self._told = 0  # tokens whose logprobs were streamed
        self.index = index
        self.generated = Generated(tokenizer, call.stops, forced_text(call, thinking))

    @property
    def over(self) -> bool:
        """Nothing more is wanted."""
        return self.generated.finish is not None or (self._single and bool(self._calls))

    @property
    def _single(self) -> bool:
        return self._call.parallel_tool_calls is False or isinstance(self._choice, NamedTool)

    def begin(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def take(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Takes a chunk, or as much of it as is wanted; choices of the events that are streamed for it.

        Raises:
          BadCall: it is over, and the call that `tool_choice` asks for is not there.
        """
        exact = bool(self._call.stops) or self._single
        choices = [choice for part in _parts(chunk, exact) for choice in self._add(part)]
        if self.over:
            self._check_choice()
        if self._call.logprobs and len(self.generated.tokens) > self._told:
            choices = choices or [{"delta": {"content": ""}}]
            choices[0]["logprobs"] = self.generated.chat_logprobs(self._told)
            self._told = len(self.generated.tokens)
        return choices

    def _add(self, chunk: Chunk) -> list[dict[str, Any]]:
        if self.over:
            return []
        piece = self.generated.add(chunk)
        items: list[str | ReadCall] = [piece] if piece else []
        if self._reader is not None:
            items = self._reader.feed(piece)
            if self.generated.finish is not None:
                items += self._reader.end()
        choices = []
        for item in items:
            if isinstance(item, ReadCall):
                choices += self._call_pieces(item)
                if self.over and self.generated.finish is None:
                    break  # one call is all that was asked for
            else:
                self._content.append(item)
                choices.append({"delta": {"content": item}})
        return choices

    def end(self) -> dict[str, Any]:
        return {"delta": {}, "finish_reason": self.finish}

    @property
    def finish(self) -> str | None:
        if self._calls and self.generated.finish != "length":
            return "tool_calls"
        return self.generated.finish

    @property
    def message(self) -> Message:
        return message_of("".join(self._content), self._calls, self._name)

    def choice(self) -> dict[str, Any]:
        logprobs = self.generated.chat_logprobs() if self._call.logprobs else None
        return {"index": self.index, "message": self.message, "logprobs": logprobs, "finish_reason": self.finish}

    def _call_pieces(self, call: ReadCall) -> list[dict[str, Any]]:
        at = len(self._calls)
        self._calls.append(call)
        head = {"index": at, "id": call_id(self._name, at), "type": "function"}
        return [
            {"delta": {"tool_calls": [{**head, "function": {"name": call.name, "arguments": ""}}]}},
            {"delta": {"tool_calls": [{"index": at, "function": {"arguments": call.arguments}}]}},
        ]

    def _check_choice(self) -> None:
        if self._choice in (None, "none", "auto"):
            return
        wanted = self._choice.function.name if isinstance(self._choice, NamedTool) else None
        if not self._calls or (wanted is not None and self._calls[0].name != wanted):
            raise BadCall(
                "the model did not make the call that tool_choice asks for; ask again, raise max_tokens, or give auto",
                "tool_choice",
                "tool_choice_not_met",
            )


def forced_text(call: ChatCall, thinking: bool) -> str:
    """What a reply is made to begin with, so that it is the call that `tool_choice` asks for; a thought that the prompt
    has opened is closed first."""
    begin = f"{THOUGHT}\n\n{OPEN}\n" if thinking else f"{OPEN}\n"
    if isinstance(call.tool_choice, NamedTool):
        return f'{begin}{{"name": "{call.tool_choice.function.name}", "arguments":'
    return begin if call.tool_choice == "required" else ""


def _parts(chunk: Chunk, exact: bool) -> list[Chunk]:
    """The chunk; or (`exact`) one a token, so that a reply can end at any of them."""
    if not exact or len(chunk.tokens) < 2:
        return [chunk]
    last = len(chunk.tokens) - 1
    return [
        dataclasses.replace(
            chunk,
            tokens=chunk.tokens[i : i + 1],
            logprobs=chunk.logprobs[i : i + 1],
            stop=chunk.stop if i == last else None,
            top=None if chunk.top is None else chunk.top[i : i + 1],
        )
        for i in range(last + 1)
    ]


class TextSample:
    """One choice of an answer to /v1/completions."""

    prefix, kind, stream_kind = "cmpl", "text_completion", "text_completion"
    message = None

    def __init__(self, call: CompletionCall, tokenizer: Tokenizer, index: int, thinking: bool):
        del thinking  # what it thinks is text as well
        self._exact = bool(call.stops)
        self._logprobs = call.logprobs is not None
        self._told = 0
        self.index = index
        self.generated = Generated(tokenizer, call.stops)

    @property
    def over(self) -> bool:
        return self.generated.finish is not None

    def begin(self) -> list[dict[str, Any]]:
        return []

    def take(self, chunk: Chunk) -> list[dict[str, Any]]:
        piece = "".join(self.generated.add(part) for part in _parts(chunk, self._exact) if not self.over)
        told, self._told = self._told, len(self.generated.tokens)
        if self._logprobs and self._told > told:
            return [{"text": piece, "logprobs": self.generated.text_logprobs(told)}]
        return [{"text": piece}] if piece else []

    def end(self) -> dict[str, Any]:
        return {"text": "", "finish_reason": self.finish}

    @property
    def finish(self) -> str | None:
        return self.generated.finish

    def choice(self) -> dict[str, Any]:
        logprobs = self.generated.text_logprobs() if self._logprobs else None
        return {
            "index": self.index,
            "text": self.generated.text,
            "logprobs": logprobs,
            "finish_reason": self.finish,
        }


Sample = ChatSample | TextSample

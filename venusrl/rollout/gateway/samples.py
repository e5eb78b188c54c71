"""A reply on its way to its caller, in the shapes of the two kinds of answers: whole, and in pieces."""

from typing import Any

from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.gateway.api import BadCall, ChatCall, CompletionCall, NamedTool
from venusrl.rollout.gateway.calls import OPEN, CallReader, ReadCall
from venusrl.rollout.gateway.generated import Generated
from venusrl.rollout.gateway.messages import Message, call_id, message_of
from venusrl.rollout.worker import Chunk


class ChatSample:
    """One choice of an answer to /v1/chat/completions."""

    prefix, kind, stream_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, call: ChatCall, tokenizer: Tokenizer, index: int, place: int):
        """Args:
        index: of the choice.
        place: of the reply in the history; its calls are named after it.
        """
        self._call = call
        self._choice = call.tool_choice
        self._name = f"{place}_{index}" if index else f"{place}"
        self._reader = CallReader() if call.offered else None
        self._calls: list[ReadCall] = []
        self._content: list[str] = []
        self._told = 0  # tokens whose logprobs were streamed
        self.index = index
        self.generated = Generated(tokenizer, call.stops, forced_text(call))

    @property
    def over(self) -> bool:
        """Nothing more is wanted."""
        single = self._call.parallel_tool_calls is False or isinstance(self._choice, NamedTool)
        return self.generated.finish is not None or (single and bool(self._calls))

    def begin(self) -> list[dict[str, Any]]:
        return [{"delta": {"role": "assistant", "content": ""}}]

    def take(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Takes a chunk; choices of the events that are streamed for it.

        Raises:
          BadCall: it is over, and the call that `tool_choice` asks for is not there.
        """
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
        if self.over:
            self._check_choice()
        if self._call.logprobs and len(self.generated.tokens) > self._told:
            choices = choices or [{"delta": {"content": ""}}]
            choices[0]["logprobs"] = self.generated.chat_logprobs(self._told)
            self._told = len(self.generated.tokens)
        return choices

    def end(self) -> dict[str, Any]:
        return {"delta": {}, "finish_reason": self.finish}

    @property
    def finish(self) -> str | None:
        return "tool_calls" if self._calls else self.generated.finish

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


def forced_text(call: ChatCall) -> str:
    """What a reply is made to begin with, so that it is the call that `tool_choice` asks for."""
    if isinstance(call.tool_choice, NamedTool):
        return f'{OPEN}\n{{"name": "{call.tool_choice.function.name}", "arguments":'
    return f"{OPEN}\n" if call.tool_choice == "required" else ""


class TextSample:
    """One choice of an answer to /v1/completions."""

    prefix, kind, stream_kind = "cmpl", "text_completion", "text_completion"
    message = None

    def __init__(self, call: CompletionCall, tokenizer: Tokenizer, index: int, place: int):
        del place
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
        piece = self.generated.add(chunk)
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

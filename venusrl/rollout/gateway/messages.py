"""Chat messages: whether two histories say the same, and a reply as a message."""

import json
from collections.abc import Sequence
from typing import Any

from venusrl.rollout.gateway.calls import ReadCall, read_calls

Message = dict[str, Any]  # as ChatMessage.plain gives it


def same(some: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether two histories say the same. Clients add fields, leave out empty ones and write arguments anew."""
    return len(some) == len(others) and all(_said(*pair) for pair in zip(some, others, strict=True))


def _said(one: Message, other: Message) -> bool:
    def essence(message: Message):
        functions = [(call.get("id"), call["function"]) for call in message.get("tool_calls") or ()]
        calls = [(name, f.get("name"), _parsed(f.get("arguments"))) for name, f in functions]
        return message["role"], message.get("content") or "", calls, message.get("tool_call_id")

    return essence(one) == essence(other)


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def call_id(name: str, index: int) -> str:
    """The id of call `index` of the reply called `name`."""
    return f"call_{name}_{index}"


def reply(text: str, name: str, tools: bool) -> Message:
    """A reply as a message; where tools were offered, with the calls that can be read.

    Args:
      name: of the reply; its calls are named after it.
    """
    content, calls = read_calls(text) if tools else (text, [])
    return message_of(content, calls, name)


def message_of(content: str | None, calls: Sequence[ReadCall], name: str) -> Message:
    if not calls:
        return {"role": "assistant", "content": content or ""}
    return {
        "role": "assistant",
        "content": content or None,
        "tool_calls": [
            {
                "id": call_id(name, i),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for i, call in enumerate(calls)
        ],
    }

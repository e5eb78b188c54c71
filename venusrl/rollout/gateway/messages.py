"""Chat messages of the OpenAI API as plain ones, and replies with tool calls; in the format that Qwen3 was trained on.

Tools stand in the system message, calls in <tool_call> tags of a reply, results in <tool_response> tags of a message of
the user (Qwen3's published chat template).
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from venusrl.core.errors import ContractError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_OFFER = (
    "# Tools\n\nYou may call functions to help with the request. Their signatures are inside <tools></tools>:\n"
    "<tools>\n"
    "{signatures}\n</tools>\n\nFor each call, return a JSON object with the name and the arguments inside "
    '<tool_call></tool_call>:\n<tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n</tool_call>'
)


def check_messages(messages: Any) -> list[Message]:
    """Raises:
    ContractError: they are no chat messages; says which and why.
    """
    if not isinstance(messages, list) or not messages:
        raise ContractError("messages must be a list of at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ContractError(f"messages[{i}] needs a role, one of {', '.join(ROLES)}")
        _text(message, i)
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(isinstance(c, dict) and _is_function(c) for c in calls):
            raise ContractError(f"messages[{i}].tool_calls must be a list of calls, each with a function")
    return messages


def same(some: Sequence[Message], others: Sequence[Message]) -> bool:
    """Whether two histories say the same. Clients add fields, leave out empty ones and cut contents into parts."""
    return len(some) == len(others) and all(_said(*pair) for pair in zip(some, others, strict=True))


def _is_function(call: dict[str, Any]) -> bool:
    function = call.get("function")
    return isinstance(function, dict) and isinstance(function.get("arguments"), str)


def _said(one: Message, other: Message) -> bool:
    def essence(message: Message):
        functions = [(call.get("id"), call["function"]) for call in message.get("tool_calls") or ()]
        calls = [(name, f.get("name"), _parsed(f["arguments"])) for name, f in functions]
        return message["role"], _text(message, 0), calls, message.get("tool_call_id")

    return essence(one) == essence(other)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def rendered(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Messages of a role and a text each, in the roles that the model knows."""
    plain: list[dict[str, str]] = []
    for i, message in enumerate(messages):
        role, text = message["role"], _text(message, i)
        if role == "developer":
            role = "system"
        if role == "assistant":
            text += "".join(_call_text(call) for call in message.get("tool_calls") or ())
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
            if plain and messages[i - 1]["role"] == "tool":  # results of one reply stand together
                plain[-1]["content"] += f"\n{text}"
                continue
        plain.append({"role": role, "content": text})
    if tools:
        signatures = "\n".join(json.dumps(tool) for tool in tools)
        offer = _OFFER.format(signatures=signatures)
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] += f"\n\n{offer}"
        else:
            plain.insert(0, {"role": "system", "content": offer})
    return plain


def reply(text: str, name: str, tools: bool) -> Message:
    """A reply as a message; where tools were offered, with the calls that can be read.

    Args:
      name: of the reply; its calls are named after it.
    """
    if not tools:
        return {"role": "assistant", "content": text}
    calls = []
    for found in _CALL.findall(text):
        try:
            call = json.loads(found)
            calls.append({"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))})
        except (ValueError, KeyError, TypeError):
            return {"role": "assistant", "content": text}  # the caller sees what cannot be read
    if not calls:
        return {"role": "assistant", "content": text}
    content = _CALL.sub("", text).strip()
    return {
        "role": "assistant",
        "content": content or None,
        "tool_calls": [
            {"id": f"call_{name}_{i}", "type": "function", "function": call} for i, call in enumerate(calls)
        ],
    }


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    said = f'{{"name": {json.dumps(function.get("name"))}, "arguments": {function.get("arguments")}}}'
    return f"\n<tool_call>\n{said}\n</tool_call>"


def _text(message: Message, index: int) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise ContractError(f"messages[{index}].content must be text; this model has no other input")

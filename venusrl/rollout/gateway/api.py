"""The requests of the OpenAI API (platform.openai.com/docs/api-reference), described once.

null means the default, for every optional field. A field is served, or accepted because it changes nothing here
(`ACCEPTED`), or refused unless it asks for what is done anyway (`ONLY`); any other is refused by name. docs/gateway.md
has the tables.
"""

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from venusrl.core.errors import ContractError
from venusrl.rollout.worker import MOST_TOP

STOPS = 4  # stop strings a call may give, as in the OpenAI API
LARGEST_INT = 2**31 - 1
DEEPEST = 64  # levels of lists and objects in a value
ROLES = ("system", "developer", "user", "assistant", "tool")

# Labels for whoever sends them: nothing that is generated depends on them.
ACCEPTED = ("metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store")
# Fields, the OpenAI API's and those of servers like it, that may only ask for what is done anyway.
ONLY: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": ([],),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "top_k": (-1, 0),
    "top_p": (1,),
    "verbosity": (),
    "web_search_options": (),
}
# Those among them that say how a reply is sampled.
SAMPLING = (
    "frequency_penalty",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "reasoning_effort",
    "repetition_penalty",
    "top_k",
    "top_p",
    "verbosity",
)


def check_value(value: Any) -> Any:
    """`value` where it can be written as JSON text again.

    Raises:
      ValueError: a number that is not finite, half of a surrogate pair, or too many levels.
    """
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > DEEPEST:
            raise ValueError(f"more than {DEEPEST} levels of lists and objects")
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"{item} is no number of JSON's")
        if isinstance(item, str):
            _check_text(item)
        elif isinstance(item, dict):
            todo += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, (list, tuple)):
            todo += [(part, depth + 1) for part in item]
    return value


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair: the text was cut inside a character") from None
    return text


Text = Annotated[str, AfterValidator(_check_text)]
Json = Annotated[Any, AfterValidator(check_value)]
Count = Annotated[int, Field(ge=1, le=LARGEST_INT)]
First = Field(fail_fast=True)  # of a list: one error is enough, a body may have millions of wrong members


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


def _check_name(name: str) -> str:
    if not name or any(c in '"\\' or not c.isprintable() for c in name):
        raise ValueError("a function's name has printable characters, no quotes and no backslashes")
    return name


Name = Annotated[Text, AfterValidator(_check_name)]  # stands in JSON as it is, in templates


class Function(_Strict):
    name: Name
    arguments: Text | dict[str, Json] | None = None


class ToolCall(_Strict):
    id: Text | None = None
    type: Literal["function"] | None = None
    function: Function


def _check_content(value: Any) -> str | None:
    """One text, of text or of text parts."""
    if isinstance(value, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in value):
        texts = [part.get("text") for part in value]
        value = "".join(texts) if all(isinstance(text, str) for text in texts) else value
    if value is not None and not isinstance(value, str):
        raise ValueError("must be text, text parts, or null; this model has no other input")
    return value if value is None else _check_text(value)


class ChatMessage(_Strict):
    """One message; fields besides these are the template's to use."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, AfterValidator(_check_content)] = None
    tool_calls: Annotated[list[ToolCall], First] | None = None

    @model_validator(mode="after")
    def _others(self) -> "ChatMessage":
        check_value(self.model_extra)
        return self

    def plain(self) -> dict[str, Any]:
        """As templates and histories have it: what is null left out, the content one text or None."""
        given = self.model_dump(exclude_none=True, exclude_unset=True)
        given.setdefault("content", None)
        if not given.get("tool_calls"):
            given.pop("tool_calls", None)
        return given


class ToolFunction(_Strict):
    name: Name
    description: Text | None = None
    parameters: dict[str, Json] | None = None


class _Tool(_Strict):
    type: Literal["function"]
    function: ToolFunction


def _check_tool(value: dict[str, Any]) -> dict[str, Any]:
    _Tool.model_validate(value)
    return check_value(value)


Tool = Annotated[dict[str, Any], AfterValidator(_check_tool)]  # as it was sent: templates show it in its own order


class _NamedFunction(_Strict):
    name: Text


class NamedTool(_Strict):
    type: Literal["function"]
    function: _NamedFunction


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: never added


def _refusal(field: str, text: str) -> PydanticCustomError:
    """An error of the whole call that is one field's fault."""
    return PydanticCustomError("refused", "{text}", {"text": text, "field": field})


class Call(_Strict):
    """What the two kinds of calls have in common.

    Attributes:
      user: who asks; the session's name where the header x-session-id does not say it.
      return_token_ids: add the ids of prompt and completion to the answer.
    """

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=0, le=LARGEST_INT)] | None = None
    stop: Text | Annotated[list[Text], First] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[Text, Field(max_length=200)] | None = None
    return_token_ids: bool | None = None
    _size: int = PrivateAttr(0)

    @property
    def size(self) -> int:
        """Bytes of the body that it came in."""
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size

    @model_validator(mode="after")
    def _check(self) -> "Call":
        for name, value in (self.model_extra or {}).items():
            self._check_extra(name, value)
        stops = self.stops
        if len(stops) > STOPS or "" in stops:
            raise _refusal("stop", f"stop={_short(stops)}: give up to {STOPS} texts, none of them empty")
        if self.stream_options is not None and not self.stream:
            raise _refusal("stream_options", "stream_options is only allowed where stream is true")
        return self

    def _check_extra(self, name: str, value: Any) -> None:
        if value is None or name in ACCEPTED:
            return
        if name not in ONLY:
            raise _refusal(name, f"{name}: no such field here; leave it out")
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in ONLY[name]):
            instead = " or ".join(json.dumps(one) for one in ONLY[name])
            text = f"{name}={_short(value)} is not supported; leave it out{f', or give {instead}' if instead else ''}"
            raise _refusal(name, text)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCall(Call):
    """A call to /v1/chat/completions.

    Attributes:
      chat_template_kwargs: variables of the model's template, such as Qwen3's `enable_thinking`.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    tools: Annotated[list[Tool], First] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    chat_template_kwargs: dict[str, Json] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCall":
        if self.top_logprobs and not self.logprobs:
            raise _refusal("top_logprobs", "top_logprobs needs logprobs to be true")
        choice = self.tool_choice
        if choice == "required" and not self.tools:
            raise _refusal("tool_choice", 'tool_choice="required" needs tools')
        if isinstance(choice, NamedTool) and choice.function.name not in self.tool_names:
            raise _refusal("tool_choice", f"tool_choice names {choice.function.name!r}, which is not among tools")
        reserved = {"messages", "tools", "add_generation_prompt"} & set(self.chat_template_kwargs or ())
        if reserved:
            text = f"chat_template_kwargs may not have {', '.join(sorted(reserved))}"
            raise _refusal("chat_template_kwargs", text)
        return self

    @property
    def tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools or ()]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """Tools that the model is told of."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def ranks(self) -> int:
        """Of the most likely tokens, how many are told."""
        return self.top_logprobs or 0

    def texts(self) -> int:
        """Characters of everything that a template may show."""
        todo: list[Any] = [self.tools, self.chat_template_kwargs, *(m.model_dump() for m in self.messages)]
        count = 0
        while todo:
            item = todo.pop()
            if isinstance(item, str):
                count += len(item)
            elif isinstance(item, dict):
                todo += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple)):
                todo += item
        return count

    def history(self) -> list[dict[str, Any]]:
        return [message.plain() for message in self.messages]


class CompletionCall(Call):
    """A call to /v1/completions. The prompt is text or token ids; one a call."""

    prompt: Text | list[Any]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionCall":
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not (isinstance(prompt, str) or ids):
            raise _refusal("prompt", "prompt must be text or a list of token ids; one a call")
        if not prompt:
            raise _refusal("prompt", "prompt is empty; give at least one token")
        self.prompt = prompt
        return self

    @property
    def length(self) -> int | None:
        return self.max_tokens

    @property
    def ranks(self) -> int:
        return self.logprobs or 0


class HarnessCall(ChatCall):
    """A chat call of a harness: how its reply is sampled is the run's, so that those fields may ask for anything."""

    temperature: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    seed: Any = None
    stop: Any = None

    @model_validator(mode="after")
    def _check_harness(self) -> "HarnessCall":
        if self.samples > 1:
            raise _refusal("n", f"n={self.n}: an episode has one reply a call")
        if self.tool_choice not in (None, "none", "auto"):
            raise _refusal("tool_choice", "tool_choice: an episode's reply is free; give auto or none")
        if self.logprobs or self.return_token_ids:
            raise _refusal("logprobs", "logprobs, return_token_ids: they are captured by the run; leave them out")
        if self.chat_template_kwargs or self.parallel_tool_calls is False:
            name = "chat_template_kwargs" if self.chat_template_kwargs else "parallel_tool_calls"
            raise _refusal(name, f"{name}: an episode's prompts and replies are the run's; leave it out")
        return self

    def _check_extra(self, name: str, value: Any) -> None:
        if name not in SAMPLING:
            super()._check_extra(name, value)

    @property
    def stops(self) -> list[str]:
        return []


def parsed(kind: type[Call], body: bytes) -> Any:
    """A call from the body of a request.

    Raises:
      BadCall: names the field and what is wrong with it.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise BadCall(*_complaint(error)) from None
    except RecursionError:
        raise BadCall("the body has too many levels of lists and objects", None) from None


class BadCall(ContractError):
    """A call that is refused. Attributes:
    param: the field, where it is one's fault.
    code: that clients look for, where there is one.
    """

    def __init__(self, text: str, param: str | None = None, code: str | None = None):
        super().__init__(text)
        self.param, self.code = param, code


def _complaint(error: ValidationError) -> tuple[str, str | None]:
    """(text, field) of the first thing that is wrong, and how many more there are."""
    found = error.errors(include_url=False)
    first = found[0]
    where = _where(first["loc"])
    if first["type"] == "refused":
        return first["ctx"]["text"], first["ctx"]["field"]
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return f"the body is no JSON ({text.removeprefix('Invalid JSON: ')})", None
    if first["type"] == "missing":
        text = "it is missing"
    elif where is not None and "input" in first:
        text = f"{text}, not {_short(first['input'])}"
    others = {_where(one["loc"]) for one in found} - {where}
    more = f" (and {len(others)} other fields)" if others else ""
    return (f"{where}: {text}{more}" if where else f"{text}{more}"), where


def _where(loc: Sequence[str | int]) -> str | None:
    """A field as one writes it: messages[0].content. Names of alternatives, which are ours, are left out."""
    names = [part for part in loc if isinstance(part, int) or (part.isidentifier() and part.islower())]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in names)
    return text.removeprefix(".") or None


def _short(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=True)
    except (ValueError, TypeError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."

"""Chat templates: messages and tools in, the text that a model was trained on out.

A template is Jinja, as transformers runs it, and is code of whoever made the model: it runs in a sandbox. Text of
messages stays text: a control token spelled out in it never becomes one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from venusrl.core.errors import ConfigError, ContractError
from venusrl.models.template_sandbox import Bounded

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

# ChatML, with tools and calls in the format that Qwen3 was trained on (Qwen3's tokenizer_config.json), for models
# that come without a template.
CHATML = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": ' }}
    {{- '<args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
            {%- set arguments = call.function.arguments %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_PRIVATE = range(0xE000, 0xF8FF)  # Unicode's private use area; one of these that nobody wrote marks what is text


class ChatTemplate:
    """A compiled template.

    Args:
      source: Jinja; or several by name, as some tokenizer_config.json have them ("default", "tool_use").
      control: control tokens as text; those in messages are kept from becoming tokens.
      variables: what a template may ask for besides, `bos_token` and the like.

    Raises:
      ConfigError: a source is no Jinja, or more than Jinja and Python can compile.
    """

    def __init__(
        self, source: str | Mapping[str, str], control: Iterable[str], variables: Mapping[str, str | None] | None = None
    ):
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if not sources:
            raise ConfigError("the model's chat template is empty; fix chat_template in tokenizer_config.json")
        self._environment = Bounded()
        try:
            self._compiled = {name: self._environment.compiled(text) for name, text in sources.items()}
        except (
            Exception
        ) as error:  # a stranger's code: Jinja and Python's compiler raise SyntaxError, RecursionError, ...
            said = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"the model's chat template is no Jinja ({type(error).__name__}: {said}); copy the file again"
            ) from error
        self._control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or r"(?!)")
        self._variables = dict(variables or {})

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[tuple[str, bool]]:
        """Pieces of text, each with whether it is a control token of the template's own.

        Args:
          options: variables of the template's own, such as Qwen3's `enable_thinking`.

        Raises:
          ContractError: the template fails or refuses these messages; says what it says.
        """
        mark = None
        given = [messages, tools, dict(options or {})]
        if self._spelled(given):
            mark = _unused(given)
            given = self._guarded(given, mark)
        messages, tools, options = given
        compiled = self._compiled.get("tool_use") if tools else None
        compiled = compiled or self._compiled.get("default") or next(iter(self._compiled.values()))
        variables = {**self._variables, **options, "messages": messages, "tools": tools or None}
        try:
            text = self._environment.render(compiled, variables | {"add_generation_prompt": add_generation_prompt})
        except Exception as error:  # whatever a stranger's code raises
            raise ContractError(f"the model's chat template fails: {type(error).__name__}: {error}") from error
        return self._pieces(text, mark)

    def _pieces(self, text: str, mark: str | None) -> list[tuple[str, bool]]:
        pieces, at = [], 0
        for found in self._control.finditer(text):
            pieces += [(text[at : found.start()], False), (found.group(), True)]
            at = found.end()
        pieces.append((text[at:], False))
        return [(piece.replace(mark, "") if mark else piece, control) for piece, control in pieces if piece]

    def _spelled(self, value: Any) -> bool:
        """Whether a control token is spelled out in some text of `value`."""
        return any(self._control.search(text) for text in texts(value))

    def _guarded(self, value: Any, mark: str) -> Any:
        """`value` with `mark` inside every control token."""
        if isinstance(value, str):
            return self._control.sub(lambda found: found.group()[0] + mark + found.group()[1:], value)
        if isinstance(value, Mapping):
            return {self._guarded(key, mark): self._guarded(item, mark) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._guarded(item, mark) for item in value]
        return value


def texts(value: Any) -> Iterable[str]:
    """All texts in a value of JSON's types."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            todo += item


def _unused(value: Any) -> str:
    """A character that is in none of its texts."""
    used = {c for text in texts(value) for c in text if "\ue000" <= c <= "\uf8ff"}
    return next((chr(code) for code in _PRIVATE if chr(code) not in used), "\x00")

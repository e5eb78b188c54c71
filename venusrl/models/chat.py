"""Chat messages as token ids, incrementally: the ids of turn k+1 always start with the ids of turn k.

A template renders a whole history, and renders again what the model wrote: it strips, drops thoughts, and its text is
tokenised anew. Here a history is only ever appended to. The template renders the opening; for what follows a generated
turn it renders a short conversation in which that turn is a placeholder, and what comes after the placeholder is taken.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from venusrl.core.errors import ConfigError, ContractError
from venusrl.models.template import CHATML, ChatTemplate, Message, Tool, texts
from venusrl.models.tokenizer import Tokenizer

_PLACEHOLDER = "what-the-model-said"
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


class ChatFormat:
    """Turns messages into token ids for one trajectory.

    Messages are those of the OpenAI API: `content` is text or None; calls of an assistant and results of tools keep
    their fields.

    Args:
      template: the model's own (see ChatTemplate); ChatML with Qwen3's tools where it has none.
      stop_tokens: ids that end a turn, the usual one first; by default ChatML's <|im_end|> and <|endoftext|>.
      variables: see ChatTemplate.
      prefix: ids that every sequence of the model starts with.

    Raises:
      ConfigError: the template fails on a conversation of a user and an assistant; or there is none, and the tokenizer
        lacks the tokens of ChatML.

    Attributes:
      stop_tokens, prefix: see Args.
      reads_calls: tools are offered, and calls expected, as JSON in <tool_call> tags.
      note: where the template's rendering of a whole history is another than ours, in a sentence; else None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | Mapping[str, str] | None = None,
        stop_tokens: Sequence[int] | None = None,
        variables: Mapping[str, str | None] | None = None,
        prefix: Sequence[int] = (),
    ):
        self._tokenizer = tokenizer
        self.prefix = tuple(prefix)
        self._opening = () if template else self.prefix  # a template of the model's own writes it itself
        if not template and not tokenizer.speaks_chatml:
            raise ConfigError(f"{tokenizer.lacks_chatml}; give the model's folder its chat_template.jinja")
        source = template or CHATML
        self._template = ChatTemplate(source, tokenizer.control, variables)
        markers = self._markers()
        if markers:
            tokenizer.make_control(markers)
            self._template = ChatTemplate(source, tokenizer.control, variables)
        self._control = tokenizer.control
        self.stop_tokens: tuple[int, ...] = (
            (tokenizer.im_end, tokenizer.end_of_text) if stop_tokens is None else tuple(stop_tokens)
        )
        self._stops = {text for text, token in self._control.items() if token in self.stop_tokens}
        self._strings, self._empty = True, ""  # while it is found out what the template takes
        self._strings = self._takes_strings()
        self._empty = self._shown_beside_calls()
        self.reads_calls = self._offers_calls()
        self.note = self._difference() if template else None

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of the opening messages and the header of the assistant's first turn.

        Raises:
          ContractError: the template refuses them.
        """
        return [*self._opening, *self._ids(self._template.render(self._plain(messages), tools, options))]

    def observation(self, text: str, last_token: int, role: str = "user") -> list[int]:
        """Ids that follow a generated turn: its close, the observation, and the next header.

        Args:
          text: what the environment answered.
          last_token: last generated token. Where it is not the end of the message (cut by length, or another stop
            token), the end is supplied here, as an observation: the policy did not choose it.
        """
        return self.continuation([{"role": role, "content": text}], last_token)

    def continuation(
        self,
        messages: Sequence[Message],
        last_token: int,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """As `observation`, for several messages.

        Args:
          tools: that the opening offered; some models have another template where there are any.

        Raises:
          ContractError: the template refuses them.
        """
        mark = _PLACEHOLDER
        while any(mark in text for text in texts([list(messages), list(tools)])):
            mark += "'"
        turns: list[dict[str, Any]] = [{"role": "assistant", "content": mark}]
        if messages and messages[0]["role"] == "tool":  # some templates refuse a result that nobody asked for
            function = {"name": "f", "arguments": {"x": mark}}
            call = {"id": messages[0].get("tool_call_id") or "call00000", "type": "function", "function": function}
            turns.insert(0, {"role": "assistant", "content": "", "tool_calls": [call]})  # and some show no calls
        for turn in turns:
            plain = self._plain([{"role": "user", "content": "."}, turn, *messages])
            rest = self._after(mark, self._template.render(plain, tools, options))
            if rest is not None:
                ids = self._ids(rest)
                return ids[1:] if ids and ids[0] == last_token and last_token in self.stop_tokens else ids
        raise ContractError("the model's chat template leaves out what the assistant said; use another template")

    def opens_thought(self, options: Mapping[str, Any] | None = None) -> bool:
        """Whether a reply begins inside a thought, because the prompt ends with <think>.

        Raises:
          ContractError: the template refuses `options`.
        """
        pieces = self._template.render([{"role": "user", "content": "u"}], (), options)
        return "".join(text for text, _ in pieces).rstrip().endswith("<think>")

    def reply(self, ids: Sequence[int]) -> str:
        """Text of a generated turn, without control tokens."""
        return self._tokenizer.decode(ids)

    def _after(self, mark: str, pieces: list[tuple[str, bool]]) -> list[tuple[str, bool]] | None:
        """What comes after the turn that has `mark` in it, with the token that closes it where the template has one;
        None where it is left out."""
        found = next((i for i, (text, _) in enumerate(pieces) if mark in text), None)
        if found is None:
            return None
        rest = [(pieces[found][0].split(mark, 1)[1], False), *pieces[found + 1 :]]
        closed = (i for i, (text, control) in enumerate(rest) if control and text in self._stops)
        return rest[next(closed, 0) :]

    def _ids(self, pieces: list[tuple[str, bool]]) -> list[int]:
        """Some control tokens take white space beside them along, as their file says."""
        ids: list[int] = []
        for i, (text, control) in enumerate(pieces):
            if control:
                ids.append(self._control[text])
                continue
            if i > 0 and self._tokenizer.strips(pieces[i - 1][0])[1]:
                text = text.lstrip()
            if i + 1 < len(pieces) and self._tokenizer.strips(pieces[i + 1][0])[0]:
                text = text.rstrip()
            ids += self._tokenizer.encode(text)
        return ids

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as templates expect them: text contents, the role "system" for "developer", and arguments of calls
        in the form that this template renders as JSON."""
        return [self._message(message, f"messages[{i}]") for i, message in enumerate(messages)]

    def _message(self, message: Message, where: str) -> dict[str, Any]:
        calls = message.get("tool_calls")
        plain = {**message, "content": message.get("content") or (self._empty if calls else "")}
        if plain["role"] == "developer":
            plain["role"] = "system"
        if calls:
            plain["tool_calls"] = [
                {**call, "function": self._function(call["function"], f"{where}.tool_calls[{i}].function.arguments")}
                for i, call in enumerate(calls)
            ]
        return plain

    def _function(self, function: Mapping[str, Any], where: str) -> dict[str, Any]:
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
            arguments = "{}" if self._strings else {}
        if isinstance(arguments, str) and not self._strings:
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                raise ContractError(f"{where} is no JSON object; this model's template needs one")
        return {**function, "arguments": arguments}

    # What a template can do

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool] = (), generate: bool = True) -> str:
        return "".join(
            text for text, _ in self._template.render(self._plain(messages), tools, add_generation_prompt=generate)
        )

    def _markers(self) -> list[str]:
        """Tokens by which the template tells turns apart, and which the file does not call special: text that spells
        one must not become it."""
        plain = [token for token in self._tokenizer.added if token not in self._tokenizer.control]
        if not plain:
            return []
        turns = [{"role": role, "content": "."} for role in ("user", "assistant", "user")]
        try:
            shown = "".join(text for text, _ in self._template.render(turns, add_generation_prompt=False))
        except ContractError:
            return []  # told of by `_difference`
        return [token for token in plain if token in shown]

    def _shown_beside_calls(self) -> str | None:
        """What to give as content where a reply is calls alone: some templates show them only beside none at all."""
        shown = []
        for empty in ("", None):
            self._empty = empty
            try:
                shown.append("call-of-f" in self._called({"k": "call-of-f"}))
            except ContractError:
                shown.append(False)
        return None if shown == [False, True] else ""

    def _takes_strings(self) -> bool:
        """Whether arguments given as JSON text come out as given as an object."""
        try:
            return self._called('{"k": "v"}') == self._called({"k": "v"})
        except ContractError:
            return False  # it takes objects, or no calls at all

    def _called(self, arguments: Any) -> str:
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return self._rendered([*messages, {"role": "tool", "content": "r", "tool_call_id": "call00000"}])

    def _offers_calls(self) -> bool:
        try:
            return "<tool_call>" in self._rendered([{"role": "user", "content": "u"}], [_TOOL])
        except ContractError:
            return False

    def _difference(self) -> str | None:
        """Holds what is rendered turn by turn against the template's rendering of the whole."""
        opening = [{"role": "user", "content": "U\nu"}]
        said, answer = "A a", [{"role": "user", "content": "O"}]
        try:
            first, later = self.prompt(opening), self.continuation(answer, -1)
            whole = self._template.render(
                self._plain([*opening, {"role": "assistant", "content": said}, *answer]), add_generation_prompt=True
            )
        except ContractError as error:
            raise ConfigError(f"{error}; use a model whose template takes a user and an assistant") from error
        ours = self._tokenizer.decode([*first, *self._tokenizer.encode(said), *later], keep_control=True)
        theirs = self._tokenizer.decode(self._ids(whole), keep_control=True)
        if ours == theirs:
            return None
        return (
            f"the model's chat template changes earlier turns: the whole history is {theirs!r}; turn by turn, where "
            f"nothing that was generated is changed, it is {ours!r}, and that is what is used"
        )

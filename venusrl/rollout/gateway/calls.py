"""Tool calls in a reply: JSON in <tool_call> tags, as Qwen3 and others were trained to write them; read as text comes.

A block that cannot be read as a call is given out as the text that it is, so that the caller sees it.
"""

import dataclasses
import json
import math
import re
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"


@dataclasses.dataclass(frozen=True)
class ReadCall:
    """Attributes:
    name: of the function.
    arguments: a JSON object, as text.
    """

    name: str
    arguments: str


class CallReader:
    """Takes a reply in pieces; gives out its text and its calls as soon as they are certain.

    White space around a call belongs to nobody. Inside <think> nothing is a call.

    Args:
      thinking: the reply begins inside a thought, which the prompt has opened.
    """

    def __init__(self, thinking: bool = False):
        self._text = ""  # not yet given out
        self._thinking = thinking
        self._object = _Object()
        self._space = ""  # held until it is known whether a call follows
        self._said = self._called = False

    def feed(self, text: str) -> list[str | ReadCall]:
        self._text += text
        return self._take(last=False)

    def end(self) -> list[str | ReadCall]:
        """What was held back."""
        given = self._take(last=True)
        if self._space and not self._called:
            given.append(self._space)
        return given

    def _take(self, last: bool) -> list[str | ReadCall]:
        given: list[str | ReadCall] = []
        while self._text:
            if self._thinking:
                before = self._before((THOUGHT,), last)
            elif self._text.startswith(OPEN):
                if not self._take_block(given, last):
                    break
                continue
            else:
                before = self._before((OPEN, THINK), last)
            text, tag = before
            self._give(text, given)
            self._text = self._text[len(text) :]
            if tag is None:
                break
            if tag != OPEN:
                self._give(tag, given)
                self._text = self._text[len(tag) :]
                self._thinking = tag == THINK
        return given

    def _before(self, tags: tuple[str, ...], last: bool) -> tuple[str, str | None]:
        """The text before the first of `tags`, and which it is; without one, the text that cannot be part of one."""
        found = [(at, tag) for tag in tags if (at := self._text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            return self._text[:at], tag
        held = 0 if last else max(_overlap(self._text, tag) for tag in tags)
        return self._text[: len(self._text) - held], None

    def _take_block(self, given: list[str | ReadCall], last: bool) -> bool:
        """Takes the block at the beginning, as a call or as text; whether it has come to its end."""
        body = self._text[len(OPEN) :]
        again = len(body) - len(body.lstrip())
        if body.startswith(OPEN, again):  # said twice
            self._text, self._object = body[again:], _Object()
            return True
        end = self._object.scan(body)
        if end is None and not last:
            return False
        if end:
            rest = body[end:].lstrip()
            if not last and CLOSE.startswith(rest) and rest != CLOSE:
                return False
            call = _read(body[:end]) if rest.startswith(CLOSE) or CLOSE.startswith(rest) else None
            if call is not None:
                given.append(call)
                self._called, self._space = True, ""
                self._text, self._object = rest[len(CLOSE) :], _Object()
                return True
        at = self._text.find(CLOSE)
        if at < 0 and not last:
            return False
        size = at + len(CLOSE) if at >= 0 else len(self._text)
        self._give(self._text[:size], given)
        self._text, self._object = self._text[size:], _Object()
        return True

    def _give(self, text: str, given: list[str | ReadCall]) -> None:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if self._called and not self._said:
            kept = kept.lstrip()
        if kept:
            self._said, self._called = True, False
            given.append(kept)


def read_calls(text: str) -> tuple[str | None, list[ReadCall]]:
    """(the text besides calls, the calls) of a whole reply; None where there are calls and nothing else."""
    reader = CallReader()
    items = [*reader.feed(text), *reader.end()]
    calls = [item for item in items if isinstance(item, ReadCall)]
    said = "".join(item for item in items if isinstance(item, str))
    return (said or None) if calls else said, calls


class _Object:
    """Finds the end of the JSON object that a text begins with, whatever its strings contain; looks at each character
    once."""

    def __init__(self):
        self._at = self._depth = 0
        self._in_string = self._escaped = False
        self._end: int | None = None

    def scan(self, text: str) -> int | None:
        """Index after the object; None where it has not ended yet; 0 where there is none."""
        while self._end is None and self._at < len(text):
            self._end = self._take(text, self._at)
            self._at += 1
        return self._end

    def _take(self, text: str, at: int) -> int | None:
        """Takes the character at `at`; what `scan` then has to say."""
        c = text[at]
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif c == "\\":
                self._escaped = True
            elif c == '"':
                self._in_string = False
        elif self._depth == 0 and c != "{":
            if not c.isspace():
                return 0
        elif c == '"':
            self._in_string = True
        elif c in "{[":
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
            if self._depth == 0:
                return at + 1
        elif c == "<":  # no JSON has one outside its strings: the block ends here
            return 0
        return None


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


# Raw newlines and tabs in strings are read: models write them.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)


def _read(text: str) -> ReadCall | None:
    """A call; None where it is none."""
    try:
        call = _DECODER.decode(text.strip())
        name = call.get("name")
        arguments = call["arguments"] if "arguments" in call else call.get("parameters")  # Llama's word for them
        if isinstance(arguments, str):  # encoded twice
            arguments = _DECODER.decode(arguments) if arguments.strip() else None
        if arguments is None:
            arguments = {}
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return ReadCall(_whole(name), _whole(json.dumps(arguments, ensure_ascii=False)))
    except (ValueError, AttributeError, RecursionError):
        return None


def _whole(text: str) -> str:
    """Without halves of surrogate pairs, which an escape can make."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)

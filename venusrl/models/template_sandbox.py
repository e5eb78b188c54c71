"""Jinja for templates of strangers: what one may call, how long it may loop and how much it may write.

Bounds are on steps and sizes, not on seconds, so that a template fails on every machine alike or on none. Not bounded:
what straight-line code builds out of blocks ({% set x %}...{% endset %}) before it writes it.
"""

import datetime
import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS = 1 << 20  # turns of all loops, and calls, of one rendering; about a second
LONGEST = 1 << 24  # characters of a text, items of a list
_BITS = 1 << 12  # of a number
_WIDE = re.compile(r"\*|[0-9]{7}")  # in a format: a width that is an argument, or of 7 digits


class Bounded(ImmutableSandboxedEnvironment):
    """What transformers gives a template (utils/chat_template_utils.py), its options, filters and functions, in bounds.

    What goes beyond them is a jinja2.TemplateError.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self._rendering = threading.local()
        self.filters = {name: _sized(name, function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _tojson, "_counted": _counted, "_joined": _joined}
        del self.globals["lipsum"]  # random text, as much as is asked for
        self.globals["raise_exception"] = refuse
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)

    def compiled(self, source: str) -> jinja2.Template:
        """Raises: whatever Jinja and Python's compiler raise of a source: it is a stranger's."""
        tree = _Counting(self).visit(self.parse(source))
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The text. Raises: whatever the template raises."""
        self._rendering.steps = 0
        parts, length = [], 0
        for part in template.generate(**variables):
            length += len(part)
            if length > LONGEST:
                refuse(f"it writes more than {LONGEST} characters")
            parts.append(part)
        return "".join(parts)

    def step(self) -> None:
        """Counts a turn of a loop, or a call."""
        self._rendering.steps = getattr(self._rendering, "steps", 0) + 1
        if self._rendering.steps > STEPS:
            refuse(f"it takes more than {STEPS} turns of loops and calls")

    def call(__self, __context, __obj, *args, **kwargs):
        __self.step()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # Jinja wraps str.format
        _check_arguments(getattr(__obj, "__name__", ""), (owner, *args), kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = abs(left).bit_length()
            size = bits * right if operator == "**" else bits + abs(right).bit_length() if operator == "*" else 0
            if size > _BITS:
                refuse(f"a number of more than {_BITS} bits")
        elif operator == "+":
            if _size(left) + _size(right) > LONGEST:
                refuse(f"a text of more than {LONGEST} characters")
        elif operator == "*":
            count, items = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(count, int) and count * _size(items) > LONGEST:
                refuse(f"a text of more than {LONGEST} characters")
        elif operator == "%":
            _check_arguments("format", (left,), {})
        return super().call_binop(context, operator, left, right)


class _Counting(NodeTransformer):
    """Counts turns of loops, and sizes what `~` joins."""

    def __init__(self, environment: Bounded):
        self._environment = environment

    def _through(self, value: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno, environment=self._environment)

    def visit_For(self, node: nodes.For) -> nodes.For:
        node = self.generic_visit(node)
        node.iter = self._through(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        node = self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno, environment=self._environment)
        return self._through(parts, "_joined")


@jinja2.pass_context
def _counted(context: Any, items: Iterable) -> Iterator:
    for item in items:
        context.environment.step()
        yield item


@jinja2.pass_context
def _joined(context: Any, parts: Sequence) -> str:
    context.environment.step()
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > LONGEST:
        refuse(f"a text of more than {LONGEST} characters")
    return "".join(texts)


def _sized(name: str, function: Callable) -> Callable:
    @functools.wraps(function)
    def bounded(*args, **kwargs):
        # Some filters are given the context or the environment first.
        _check_arguments(name, args[1:] if hasattr(function, "jinja_pass_arg") else args, kwargs)
        return function(*args, **kwargs)

    return bounded


# Functions, filters and methods of texts that make long texts of short ones, by a number that they are given.
_WIDTHS = frozenset("center ljust rjust zfill expandtabs indent batch slice round tojson".split())


def _check_arguments(name: str, args: Sequence, kwargs: dict[str, Any]) -> None:
    """Refuses a call that would make a text longer than LONGEST; `args` begins with the text itself."""
    rest = [*args[1:], *kwargs.values()]
    if name in _WIDTHS and any(isinstance(value, int) and abs(value) > LONGEST for value in rest):
        refuse(f"{name} with a number above {LONGEST}")
    if name in ("format", "format_map") and isinstance(args[0], str) and _WIDE.search(args[0]):
        refuse("a format with a width that is not bounded")
    texts = [value for value in rest if isinstance(value, str)]
    grows = name == "replace" and len(texts) > 1 and isinstance(args[0], str)
    if grows and args[0].count(texts[0]) * len(texts[1]) > LONGEST:
        refuse(f"a text of more than {LONGEST} characters")
    if name == "join":
        long = max((len(text) for text in (*texts, args[0]) if isinstance(text, str)), default=0)
        if long * max(map(_size, (*rest, args[0])), default=0) > LONGEST and long > 1024:
            refuse(f"a text of more than {LONGEST} characters")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


class _Generation(Extension):
    """{% generation %}, by which some templates mark what a model says: here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the interface of jinja2

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Any) -> str:
        return caller()


def _tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    _check_arguments("tojson", (value, indent), {})
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

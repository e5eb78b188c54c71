"""Families of bugs. Each draws a documented one-line function in four variants; one is right, another is the bug.

The documentation alone tells which variant is right, in words that the code does not use (`logic` alone shares two). A
model of 1M parameters learnt such words in a few hundred supervised steps; where the documentation repeated a name of
the code, it was right 0.33 to 0.74 of the time after 850: it could not tell the name that should be there from the one
that was. Variants differ in one fragment of one line, and the inputs of a draw tell every variant from the right one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

PARAMETERS = (
    "price cost rate count size width height depth weight level score total limit step speed age year day hour "
    "minute left right first second start stop low high base offset gain loss share part whole length"
).split()
TARIFFS = "FEE TAX TOLL RENT".split()  # module-level constants
_CASES = 4  # hidden inputs; the visible check shows two at most
SIDES = "left right bottom top".split()  # where a family mixes parameters up


@dataclasses.dataclass(frozen=True)
class Draw:
    """One function of a family.

    Attributes:
      doc: what the function should do.
      head: the `def` line without its name; "{}" stands for the fragment where the bug is in the head.
      line: the body line; "{}" stands for the fragment where the bug is in the body.
      fragments: the four variants of the fragment.
      right: index of the right variant.
      pattern: a sed pattern that matches the fragment, whichever variant it is, first in its line.
      inputs: argument tuples, more than the two that the visible check shows.
      helper: source of what the function uses, or "".
    """

    doc: str
    head: str
    line: str
    fragments: tuple[str, ...]
    right: int
    pattern: str
    inputs: tuple[tuple[Any, ...], ...]
    helper: str = ""


Family = Callable[[np.random.Generator, Sequence[int]], Draw]


def _names(rng: np.random.Generator, n: int, words: Sequence[str] = PARAMETERS) -> list[str]:
    return [words[i] for i in rng.choice(len(words), n, replace=False)]


def _distinct(rng: np.random.Generator, n: int, low: int = 2, high: int = 40) -> tuple[int, ...]:
    return tuple(int(x) for x in rng.choice(np.arange(low, high), n, replace=False))


def _numbers(rng: np.random.Generator, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(x) for x in rng.integers(3, 60, columns)) for _ in range(rows))


def _draw(rng, docs, params, line, fragments, pattern, inputs, helper="") -> Draw:
    right = int(rng.integers(len(fragments)))
    return Draw(docs[right], f"({', '.join(params)})", line, tuple(fragments), right, pattern, inputs, helper)


def arithmetic(rng, constants) -> Draw:
    """Operators between two parameters, or a parameter and a number."""
    a, b = _names(rng, 2)
    params = [a, b]
    if rng.random() < 0.5:
        params, b = [a], str(int(rng.choice(constants)))
    docs = (f"Add {b} to {a}.", f"Subtract {b} from {a}.", f"Multiply {a} by {b}.", f"Divide {a} by {b}.")
    inputs = _numbers(rng, _CASES, len(params))
    return _draw(rng, docs, params, f"return {a} {{}} {b}", ("+", "-", "*", "//"), r"[-+*/]\+", inputs)


def comparison(rng, constants) -> Draw:
    """Comparisons with a bound."""
    a = _names(rng, 1)[0]
    c = int(rng.choice(constants))
    docs = tuple(f"True if {a} is {how} {c}." for how in ("below", "at most", "above", "at least"))
    inputs = ((c - 1,), (c,), (c + 1,), (c + int(rng.integers(2, 20)),))
    return _draw(rng, docs, [a], f"return {a} {{}} {c}", ("<", "<=", ">", ">="), r"[<>=]\+", inputs)


def off_by_one(rng, constants) -> Draw:
    """Ends of a list."""
    del constants
    a = _names(rng, 1)[0] + "s"
    docs = tuple(f"The {what} of {a}." for what in ("first", "second", "last", "one before the last"))
    inputs = tuple((list(_distinct(rng, 5)),) for _ in range(_CASES))
    return _draw(rng, docs, [a], f"return {a}[{{}}]", ("0", "1", "-1", "-2"), r"[-0-9]\+", inputs)


def reduction(rng, constants) -> Draw:
    """Built-in functions of a list."""
    del constants
    a = _names(rng, 1)[0] + "s"
    docs = tuple(f"The {what} of {a}." for what in ("smallest", "largest", "total", "number"))
    inputs = tuple((list(_distinct(rng, int(rng.integers(3, 6)), 6, 60)),) for _ in range(_CASES))
    return _draw(rng, docs, [a], f"return {{}}{a})", ("min(", "max(", "sum(", "len("), "[a-z]*(", inputs)


def letters(rng, constants) -> Draw:
    """String methods."""
    del constants
    a = _names(rng, 1)[0]
    docs = tuple(f"{a} {how}." for how in ("in capitals", "in small letters", "with capital words", "without ends"))
    pairs = [_names(rng, 2) for _ in range(_CASES)]
    inputs = tuple((f" {x} {y.upper()} ",) if i % 2 else (f" {x.upper()} {y}",) for i, (x, y) in enumerate(pairs))
    fragments = ("upper(", "lower(", "title(", "strip(")
    return _draw(rng, docs, [a], f"return {a}.{{}})", fragments, "[a-z]*(", inputs)


def logic(rng, constants) -> Draw:
    """All, any and their opposites, of two truth values."""
    del constants
    a, b = _names(rng, 2)
    docs = tuple(f"True if {how} set: {a}, {b}." for how in ("all are", "any is", "one is not", "none is"))
    fragments = tuple(f"return {name}(" for name in ("all", "any", "not all", "not any"))
    inputs = ((True, True), (True, False), (False, True), (False, False))
    return _draw(rng, docs, [a, b], f"{{}}[{a}, {b}])", fragments, "return [a-z ]*(", inputs)


def variable(rng, constants) -> Draw:
    """The wrong variable of four."""
    c = int(rng.choice(constants))
    docs = tuple(f"{c} times the {which} side." for which in ("leftmost", "rightmost", "lower", "upper"))
    inputs = tuple(_distinct(rng, 4) for _ in range(_CASES))
    return _draw(rng, docs, _names(rng, 4, SIDES), f"return {c} * {{}}", SIDES, "[a-z]*$", inputs)


def _tariffs(rng, constants) -> str:
    """The lines that define the module-level constants."""
    values = rng.choice(constants, 4, replace=False)
    return "".join(f"{name} = {int(value)}\n" for name, value in zip(_names(rng, 4, TARIFFS), values, strict=True))


def constant(rng, constants) -> Draw:
    """The wrong constant in the body."""
    a = _names(rng, 1)[0]
    docs = tuple(f"Add the {name.lower()} to {a}." for name in TARIFFS)
    inputs, helper = _numbers(rng, _CASES, 1), _tariffs(rng, constants)
    return _draw(rng, docs, [a], f"return {a} + {{}}", TARIFFS, r"[A-Z]\+", inputs, helper)


def default(rng, constants) -> Draw:
    """The wrong default in the head."""
    a, b = _names(rng, 2)
    docs = tuple(f"Default of {b} is the {name.lower()}." for name in TARIFFS)
    inputs, helper = _numbers(rng, _CASES, 1), _tariffs(rng, constants)
    return _draw(rng, docs, [a, f"{b}={{}}"], f"return {a} * {b}", TARIFFS, r"[A-Z]\+", inputs, helper)


def arguments(rng, constants) -> Draw:
    """Arguments of a call, swapped or doubled."""
    a, b = SIDES[:2]
    pairs = [(a, b), (b, a), (a, a), (b, b)]
    docs = tuple(f"Join {how}." for how in ("in order", "in reverse", "the first twice", "the second twice"))
    helper = f"def join(x, y):\n    return {int(rng.choice(constants))} * x + y\n"
    inputs = tuple(_distinct(rng, 2) for _ in range(_CASES))
    return _draw(rng, docs, [a, b], "return join{}", [f"({x}, {y})" for x, y in pairs], "(.*)", inputs, helper)


FAMILIES: dict[str, Family] = {
    f.__name__: f
    for f in (
        arithmetic,
        comparison,
        off_by_one,
        reduction,
        letters,
        logic,
        variable,
        constant,
        default,
        arguments,
    )
}

"""Families of bugs. Each draws a documented one-line function in four variants; one is right, another is the bug.

The documentation alone tells which variant is right. The variants of a family are told apart by its inputs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

PARAMETERS = (
    "price cost rate count size width height depth weight level score total limit step speed age year day hour "
    "minute left right first second start stop low high base offset gain loss share part whole length"
).split()


@dataclasses.dataclass(frozen=True)
class Draw:
    """One function of a family.

    Attributes:
      doc: what the function should do.
      heads: the `def` line without its name, "(a, b)", one a variant (all equal unless the bug is in the head).
      lines: the last body line, one a variant.
      right: index of the right variant.
      inputs: argument tuples; together they tell every variant from the right one.
      helper: source of a function that the body calls, or "".
    """

    doc: str
    heads: tuple[str, ...]
    lines: tuple[str, ...]
    right: int
    inputs: tuple[tuple[Any, ...], ...]
    helper: str = ""


Family = Callable[[np.random.Generator, list[int]], Draw]


def _names(rng: np.random.Generator, n: int) -> list[str]:
    return [PARAMETERS[i] for i in rng.choice(len(PARAMETERS), n, replace=False)]


def _numbers(rng: np.random.Generator, shape: tuple[int, int], low: int, high: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(x) for x in row) for row in rng.integers(low, high, shape))


def _draw(rng, docs, params, lines, inputs, helper="") -> Draw:
    right = int(rng.integers(len(lines)))
    heads = (f"({', '.join(params)})",) * len(lines)
    return Draw(docs[right], heads, tuple(f"return {line}" for line in lines), right, inputs, helper)


def arithmetic(rng, constants) -> Draw:
    a, b = _names(rng, 2)
    if rng.random() < 0.5:
        docs = (f"Add {a} and {b}.", f"Subtract {b} from {a}.", f"Multiply {a} by {b}.", f"Divide {a} by {b}.")
        params, second = [a, b], b
    else:
        c = int(rng.choice(constants))
        docs = (f"Add {c} to {a}.", f"Subtract {c} from {a}.", f"Multiply {a} by {c}.", f"Divide {a} by {c}.")
        params, second = [a], str(c)
    inputs = _numbers(rng, (5, len(params)), 3, 60)
    return _draw(rng, docs, params, [f"{a} {op} {second}" for op in ("+", "-", "*", "//")], inputs)


def comparison(rng, constants) -> Draw:
    a = _names(rng, 1)[0]
    c = int(rng.choice(constants))
    docs = tuple(f"True if {a} is {how} {c}." for how in ("below", "at most", "above", "at least"))
    inputs = ((c - 1,), (c,), (c + 1,), (c + int(rng.integers(2, 20)),))
    return _draw(rng, docs, [a], [f"{a} {op} {c}" for op in ("<", "<=", ">", ">=")], inputs)


def bounds(rng, constants) -> Draw:
    a = _names(rng, 1)[0]
    c = int(rng.choice(constants))
    docs = tuple(f"Numbers from {c} to {a}, {how}." for how in ("both in", "no last", "no first", "no ends"))
    lines = [f"list(range({c}{lo}, {a}{hi}))" for lo, hi in (("", " + 1"), ("", ""), (" + 1", " + 1"), (" + 1", ""))]
    inputs = tuple((c + int(d),) for d in rng.choice(np.arange(2, 8), 3, replace=False))
    return _draw(rng, docs, [a], lines, inputs)


def reduction(rng, constants) -> Draw:
    del constants
    a = _names(rng, 1)[0] + "s"
    docs = tuple(f"The {what} of {a}." for what in ("smallest", "largest", "total", "number"))
    inputs = tuple(
        ([int(x) for x in rng.choice(np.arange(6, 60), int(rng.integers(3, 6)), replace=False)],) for _ in "abc"
    )
    return _draw(rng, docs, [a], [f"{f}({a})" for f in ("min", "max", "sum", "len")], inputs)


def letters(rng, constants) -> Draw:
    del constants
    a = _names(rng, 1)[0]
    docs = tuple(
        f"{a} {how}." for how in ("in capitals", "in small letters", "with capital words", "without outer spaces")
    )
    words = [PARAMETERS[i] for i in rng.choice(len(PARAMETERS), 4, replace=False)]
    inputs = ((f" {words[0]} {words[1].upper()} ",), (f" {words[2].upper()} {words[3]}",))
    return _draw(rng, docs, [a], [f"{a}.{f}()" for f in ("upper", "lower", "title", "strip")], inputs)


def logic(rng, constants) -> Draw:
    del constants
    a, b = _names(rng, 2)
    docs = tuple(
        f"True if {how} {a} {word} {b}."
        for how, word in (("both", "and"), ("any of", "and"), ("none of", "and"), ("just one of", "and"))
    )
    lines = [f"{a} and {b}", f"{a} or {b}", f"not ({a} or {b})", f"{a} != {b}"]
    return _draw(rng, docs, [a, b], lines, ((True, True), (True, False), (False, True), (False, False)))


def variable(rng, constants) -> Draw:
    names = _names(rng, 4)
    c = int(rng.choice(constants))
    docs = tuple(f"Multiply {name} by {c}." for name in names)
    inputs = tuple(tuple(int(x) for x in rng.choice(np.arange(2, 40), 4, replace=False)) for _ in "ab")
    return _draw(rng, docs, names, [f"{c} * {name}" for name in names], inputs)


def constant(rng, constants) -> Draw:
    a = _names(rng, 1)[0]
    c = [int(x) for x in rng.choice(constants, 4, replace=False)]
    others = [[x for x in c if x != right] for right in c]
    docs = tuple(f"Add {r} to {a}, not {o[0]}, {o[1]} or {o[2]}." for r, o in zip(c, others, strict=True))
    return _draw(rng, docs, [a], [f"{a} + {x}" for x in c], _numbers(rng, (2, 1), 1, 60))


def default(rng, constants) -> Draw:
    a, b = _names(rng, 2)
    c = [int(x) for x in rng.choice(constants, 4, replace=False)]
    others = [[x for x in c if x != right] for right in c]
    right = int(rng.integers(4))
    o = others[right]
    doc = f"Default {b} is {c[right]}, not {o[0]}, {o[1]} or {o[2]}."
    heads = tuple(f"({a}, {b}={x})" for x in c)
    return Draw(doc, heads, (f"return {a} * {b}",) * 4, right, _numbers(rng, (2, 1), 1, 60))


def arguments(rng, constants) -> Draw:
    a, b, c = _names(rng, 3)
    orders = [(a, b, c), (b, a, c), (a, c, b), (c, b, a)]
    docs = tuple(f"Join {x}, then {y}, then {z}." for x, y, z in orders)
    weights = [int(x) for x in rng.choice(constants, 2, replace=False)]
    helper = f"def join(x, y, z):\n    return {weights[0]} * x + {weights[1]} * y + z\n"
    inputs = tuple(tuple(int(x) for x in rng.choice(np.arange(2, 40), 3, replace=False)) for _ in "ab")
    return _draw(rng, docs, [a, b, c], [f"join({x}, {y}, {z})" for x, y, z in orders], inputs, helper)


FAMILIES: dict[str, Family] = {
    f.__name__: f
    for f in (arithmetic, comparison, bounds, reduction, letters, logic, variable, constant, default, arguments)
}

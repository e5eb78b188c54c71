"""Repair tasks, generated: thousands of distinct small projects, each with one bug.

The held-out split shares no function name, no module name, no constant and no layout with the training split
(parameter names come from one common list).
"""

import dataclasses
import itertools
import json
from typing import Any

import numpy as np

from envs.repair.families import FAMILIES, Draw

VERBS = "get make find read take form pick plan mark note give show tell rank sort tune trim draw keep hold".split()
NOUNS = (
    "cart bill shop room seat ship road park farm tree bird boat coin card game team song film book page desk lamp "
    "door wall roof tank pump gear bolt wire disk port link node path file form list item user".split()
)
SPLITS = ("train", "heldout")
_PATHS = ("{}.py", "src/{}.py", "lib/{}.py", "app/{}.py", "pkg/{}.py", "core/{}.py")
_DOCS = ('    """{}"""', "    # {}", "# {}")  # docstring, comment inside, comment above the function
_HEADERS = ("", "import math\n", "import sys\n", "# tools\n")
_EXTRAS = ("none", "before", "after")  # where an unrelated function stands

# What each split draws from: every fifth of each list is held out.
_LAYOUTS = list(itertools.product(range(len(_PATHS)), range(len(_DOCS)), range(len(_HEADERS)), range(len(_EXTRAS))))
_CONSTANTS = list(range(2, 100))


def _split(items: list, split: str, salt: int) -> list:
    order = np.random.default_rng(salt).permutation(len(items))
    cut = len(items) // 5
    return [items[i] for i in sorted(order[:cut] if split == "heldout" else order[cut:])]


@dataclasses.dataclass(frozen=True)
class RepairTask:
    """One project with a bug.

    Attributes:
      index: its place in the split.
      split, family: where it comes from.
      path: the file with the bug, relative to the project.
      function: the function with the bug.
      source: text of that file.
      line: number of the wrong line, from 1.
      candidates: texts of that line, one a variant of the family; the wrong one is among them.
      right, wrong: indices into `candidates`.
      layout: (path, documentation, header, extra function) styles.
      constants: the numbers that the source was drawn with.
      visible: argument tuples of the check that the agent may run; the bug fails at least one.
      hidden: argument tuples of the hidden test.
      expected: results that the right variant gives for `hidden`.
    """

    index: int
    split: str
    family: str
    path: str
    function: str
    source: str
    line: int
    candidates: tuple[str, ...]
    right: int
    wrong: int
    layout: tuple[int, ...]
    visible: tuple[tuple[Any, ...], ...]
    hidden: tuple[tuple[Any, ...], ...]
    expected: tuple[Any, ...]

    @property
    def prompt(self) -> str:
        return f"Fix {self.function} in {self.path}. Test with python3 check.py, then submit."

    def with_line(self, text: str) -> str:
        """The source with the faulty line replaced."""
        lines = self.source.split("\n")
        lines[self.line - 1] = text
        return "\n".join(lines)

    @property
    def check(self) -> str:
        """Source of check.py: prints ok, or the first failing call and exits 1."""
        wanted = evaluate(self.with_line(self.candidates[self.right]), self.function, self.visible)
        cases = ", ".join(f"({args!r}, {want!r})" for args, want in zip(self.visible, wanted, strict=True))
        module = self.path.removesuffix(".py").replace("/", ".")
        return (
            f"from {module} import {self.function}\n"
            f"for args, want in [{cases}]:\n"
            f"    got = {self.function}(*args)\n"
            f"    if got != want:\n"
            f"        raise SystemExit(f'FAIL {{args}}: {{got}}, not {{want}}')\n"
            "print('ok')\n"
        )

    @property
    def files(self) -> dict[str, bytes]:
        """The project, as the sandbox gets it."""
        return {self.path: self.source.encode(), "check.py": self.check.encode()}


def evaluate(source: str, function: str, inputs) -> list[Any]:
    """Results of `function` in `source` for each argument tuple. Only for sources generated here."""
    scope: dict[str, Any] = {}
    exec(compile(source, "<task>", "exec"), scope)  # noqa: S102 - our own generated code
    return json.loads(json.dumps([scope[function](*args) for args in inputs]))


def _function(name: str, head: str, doc: str, doc_style: int, line: str) -> str:
    documented = _DOCS[doc_style].format(doc)
    parts = [documented, f"def {name}{head}:"] if doc_style == 2 else [f"def {name}{head}:", documented]
    return "\n".join([*parts, f"    {line}"]) + "\n"


def _source(name: str, draw: Draw, variant: int, layout: tuple[int, ...], extra: str) -> str:
    _, doc_style, header, where = layout
    body = _function(name, draw.heads[variant], draw.doc, doc_style, draw.lines[variant])
    before, after = (extra if _EXTRAS[where] == side else "" for side in ("before", "after"))
    blocks = [_HEADERS[header], draw.helper, before, body, after]
    return "\n".join(block for block in blocks if block)


def make_task(split: str, index: int, seed: int = 0) -> RepairTask:
    """Task `index` of a split; the same for the same arguments."""
    rng = np.random.default_rng((seed, SPLITS.index(split), index))
    names = _split([f"{v}_{n}" for v in VERBS for n in NOUNS], split, 1)
    modules = _split(NOUNS, split, 2)
    layout = _split(_LAYOUTS, split, 3)
    constants = _split(_CONSTANTS, split, 4)

    family = list(FAMILIES)[int(rng.integers(len(FAMILIES)))]
    draw = FAMILIES[family](rng, constants)
    name, other = (names[i] for i in rng.choice(len(names), 2, replace=False))
    style = layout[int(rng.integers(len(layout)))]
    extra = f"def {other}(x):\n    return x\n"
    wrong = int(rng.choice([i for i in range(4) if i != draw.right]))
    sources = [_source(name, draw, variant, style, extra) for variant in range(4)]
    results = [evaluate(source, name, draw.inputs) for source in sources]
    differing = [i for i, args in enumerate(draw.inputs) if results[wrong][i] != results[draw.right][i]]
    if not differing or any(results[v] == results[draw.right] for v in range(4) if v != draw.right):
        return make_task(split, index, seed + 1_000_003)  # an unlucky draw: inputs that do not tell variants apart
    shown = {int(rng.choice(differing)), int(rng.integers(len(draw.inputs)))}
    lines = [source.split("\n") for source in sources]
    number = next(i for i in range(len(lines[0])) if len({text[i] for text in lines}) > 1)
    return RepairTask(
        index=index,
        split=split,
        family=family,
        path=_PATHS[style[0]].format(modules[int(rng.integers(len(modules)))]),
        function=name,
        source=sources[wrong],
        line=number + 1,
        candidates=tuple(text[number] for text in lines),
        right=draw.right,
        wrong=wrong,
        layout=style,
        visible=tuple(draw.inputs[i] for i in sorted(shown)),
        hidden=draw.inputs,
        expected=tuple(results[draw.right]),
    )

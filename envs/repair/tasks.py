"""Repair tasks, generated: thousands of distinct small projects, each with one bug.

The held-out split shares no function name, no file, no constant and no layout with the training split (the words that
names are put together from, and the parameter names, are common).
"""

import dataclasses
import itertools
import json
from typing import Any

import numpy as np

from envs.repair.families import FAMILIES, Draw
from venusrl.core.errors import ConfigError

VERBS = "get make find read take form pick plan mark note give show tell rank sort tune trim draw keep hold".split()
NOUNS = "cart bill shop room seat ship road park farm tree bird boat coin card game team song film book page".split()
MODULES = "desk lamp door wall roof tank pump gear bolt wire disk port link node path file form item user hook".split()
SPLITS = ("train", "heldout")
_FOLDERS = ("src/", "lib/", "app/", "pkg/", "core/", "base/")
_DOCS = ('    """{}"""', "    # {}", "# {}")  # docstring, comment inside, comment above the function
_HEADERS = ("", "import math\n", "import sys\n", "# tools\n")
_EXTRAS = ("none", "before", "after")  # where an unrelated function stands

# What each split draws from: every fifth of each list is held out.
_LAYOUTS = list(itertools.product(range(len(_DOCS)), range(len(_HEADERS)), range(len(_EXTRAS)), (0, 1, 2)))
_FILES = [f"{folder}{module}.py" for folder in _FOLDERS for module in MODULES]
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
      candidates: fragments of that line, one a variant of the family; the wrong one stands in `source`.
      right, wrong: indices into `candidates`.
      pattern: a sed pattern whose first match in that line is the fragment, whichever variant stands there.
      layout: (documentation, header, place of the extra function, blank lines at the end) styles.
      visible: argument tuples of the check that the agent may run, one or two; the bug fails at least one.
      hidden: argument tuples of the hidden test: those and others.
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
    pattern: str
    layout: tuple[int, ...]
    visible: tuple[tuple[Any, ...], ...]
    hidden: tuple[tuple[Any, ...], ...]
    expected: tuple[Any, ...]

    @property
    def prompt(self) -> str:
        return f"Fix {self.function} in {self.path}. Test with python3 check.py, then submit."

    def variant(self, index: int) -> str:
        """The source with variant `index` in the place of the wrong one."""
        lines = self.source.split("\n")
        old, new = self.candidates[self.wrong], self.candidates[index]
        lines[self.line - 1] = lines[self.line - 1].replace(old, new, 1)
        return "\n".join(lines)

    @property
    def check(self) -> str:
        """Source of check.py: prints ok, or the first failing call (or the kind of error) and exits 1."""
        wanted = evaluate(self.variant(self.right), self.function, self.visible)
        cases = ", ".join(f"({args!r}, {want!r})" for args, want in zip(self.visible, wanted, strict=True))
        module = self.path.removesuffix(".py").replace("/", ".")
        return (
            "import sys\n"
            "sys.excepthook = lambda kind, error, trace: print('FAIL', kind.__name__)\n"
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
    doc_style, header, where, blank_lines = layout
    fragment = draw.fragments[variant]
    body = _function(name, draw.head.replace("{}", fragment), draw.doc, doc_style, draw.line.replace("{}", fragment))
    before, after = (extra if _EXTRAS[where] == side else "" for side in ("before", "after"))
    blocks = [_HEADERS[header], draw.helper, before, body, after]
    return "\n".join(block for block in blocks if block) + "\n" * blank_lines


def make_task(split: str, index: int, seed: int = 0) -> RepairTask:
    """Task `index` of a split; the same for the same arguments.

    Raises:
      ConfigError: no such split.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r} is unknown; one of {', '.join(SPLITS)}")
    rng = np.random.default_rng((seed, SPLITS.index(split), index))
    names = _split([f"{v}_{n}" for v in VERBS for n in NOUNS], split, 1)
    files = _split(_FILES, split, 2)
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
        path=files[int(rng.integers(len(files)))],
        function=name,
        source=sources[wrong],
        line=number + 1,
        candidates=draw.fragments,
        right=draw.right,
        wrong=wrong,
        pattern=draw.pattern,
        layout=style,
        visible=tuple(draw.inputs[i] for i in sorted(shown)),
        hidden=draw.inputs,
        expected=tuple(results[draw.right]),
    )

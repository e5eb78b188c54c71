"""Simple shell tasks, generated: a small folder of files, one sentence, and what must hold after one command.

Half of the prompts name the tool ("Use cat to ..."): a model of 135M parameters solves few of the others at first, so
the hints are where its first rewards come from. The held-out split shares no file name, folder name or word of
content with the training split; extensions, wordings and small numbers are common.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from venusrl.core.errors import ConfigError
from venusrl.sandbox.contract import WORKSPACE

SPLITS = ("train", "heldout")
_NAMES = {
    "train": (
        "notes report data list draft plan menu budget letter summary recipe journal memo agenda invoice script "
        "results sales orders readme poem song diary story guide index table scores users items tasks books movies "
        "names dates prices events photos backup archive config settings server client parser loader helper utils model"
    ).split(),
    "heldout": "essay chart profile ticket stock travel lesson garden market survey engine worker".split(),
}
_FOLDERS = {
    "train": "src docs old tmp lib work files build assets logs stuff home public shared bin include".split(),
    "heldout": "project storage inbox samples vault team".split(),
}
_WORDS = {
    "train": (
        "apple river stone cloud green happy winter bread tiger piano yellow bridge candle forest rocket silver lemon "
        "castle pepper ocean window copper basket mirror ladder hammer button cotton dragon falcon"
    ).split(),
    "heldout": "banana mountain purple teacher guitar orange rabbit pencil summer violin".split(),
}
_EXTENSIONS = ("txt", "md", "log", "csv", "json")


@dataclasses.dataclass(frozen=True)
class BashTask:
    """One task. Paths are relative to the working directory.

    Attributes:
      index: its place in the split.
      split, family: where it comes from.
      prompt: what is asked.
      files: before the command.
      files_after: exactly what must be there after it.
      folders_after: folders that must be there besides those of `files_after`.
      output: what the command must print; None where its output is not looked at.
      compare: how: "text" (equal but for white space around it), "words" (each is among what was printed),
        "paths" (the same set, "./" aside), "count" (the number, at most a name beside it).
      gold: a command that solves it.
    """

    index: int
    split: str
    family: str
    prompt: str
    files: Mapping[str, bytes]
    files_after: Mapping[str, bytes]
    folders_after: frozenset[str]
    output: tuple[str, ...] | None
    compare: str
    gold: str


class _Draw:
    """Random choices of one task. File names and folders are drawn without repetition."""

    def __init__(self, split: str, rng: np.random.Generator):
        self._rng = rng
        self._names = [str(x) for x in rng.permutation(_NAMES[split])]
        self._folders = [str(x) for x in rng.permutation(_FOLDERS[split])]
        self._words = _WORDS[split]

    def pick(self, items):
        return items[int(self._rng.integers(len(items)))]

    def number(self, low: int, high: int) -> int:
        """low to high, both included."""
        return int(self._rng.integers(low, high + 1))

    def file(self, extension: str = "") -> str:
        return f"{self._names.pop()}.{extension or self.pick(_EXTENSIONS)}"

    def folder(self) -> str:
        return self._folders.pop()

    def words(self, count: int) -> list[str]:
        """Distinct words."""
        return [str(x) for x in self._rng.choice(self._words, size=count, replace=False)]

    def shuffled(self, items: list[str]) -> list[str]:
        return [items[i] for i in self._rng.permutation(len(items))]

    def lines(self, count: int) -> bytes:
        return b"".join(f"{' '.join(self.words(2))}\n".encode() for _ in range(count))


@dataclasses.dataclass
class _Case:
    """What a family makes; what it leaves out stays as it was before the command."""

    prompt: str
    gold: str
    files: dict[str, bytes]
    after: dict[str, bytes] | None = None
    folders: tuple[str, ...] = ()
    output: tuple[str, ...] | None = None
    compare: str = "text"


def _folder_of_files(draw: _Draw, *needed: str) -> dict[str, bytes]:
    """The files that a task speaks of, and one to three others."""
    names = [*needed, *(draw.file() for _ in range(draw.number(1, 3)))]
    return {name: draw.lines(draw.number(3, 6)) for name in names}


def _lines(data: bytes) -> tuple[str, ...]:
    return tuple(data.decode().splitlines())


def _list(draw: _Draw) -> _Case:
    files = _folder_of_files(draw, draw.file())
    prompt = draw.pick(("List the files in the current directory.", "Use ls to list the files."))
    return _Case(prompt, "ls", files, output=tuple(files), compare="words")


def _pwd(draw: _Draw) -> _Case:
    prompt = draw.pick(("Print the current directory.", "Use pwd to print the current directory."))
    return _Case(prompt, "pwd", _folder_of_files(draw), output=(WORKSPACE,))


def _create(draw: _Draw) -> _Case:
    name, files = draw.file(), _folder_of_files(draw)
    prompt = draw.pick((f"Create an empty file named {name}.", f"Use touch to create the file {name}."))
    return _Case(prompt, f"touch {name}", files, after={**files, name: b""})


def _print(draw: _Draw) -> _Case:
    name = draw.file()
    files = _folder_of_files(draw, name)
    prompt = draw.pick((f"Show the contents of the file {name}.", f"Use cat to show the file {name}."))
    return _Case(prompt, f"cat {name}", files, output=_lines(files[name]))


def _count(draw: _Draw) -> _Case:
    name = draw.file()
    files = {**_folder_of_files(draw), name: draw.lines(draw.number(2, 12))}
    prompt = draw.pick((f"Count the lines in {name}.", f"Use wc to count the lines in {name}."))
    return _Case(prompt, f"wc -l {name}", files, output=(str(len(_lines(files[name]))), name), compare="count")


def _grep(draw: _Draw) -> _Case:
    name, words = draw.file(), draw.words(6)
    word, others = words[0], words[1:]
    lines = [f"{word} {draw.pick(others)}" for _ in range(draw.number(1, 3))]
    lines += [f"{draw.pick(others)} {draw.pick(others)}" for _ in range(draw.number(2, 4))]
    order = draw.shuffled(lines)
    files = {**_folder_of_files(draw), name: "".join(f"{line}\n" for line in order).encode()}
    found = tuple(line for line in order if word in line)
    prompt = draw.pick((f"Print the lines of {name} that contain {word}.", f"Use grep to search for {word} in {name}."))
    return _Case(prompt, f"grep {word} {name}", files, output=found)


def _delete(draw: _Draw) -> _Case:
    name = draw.file()
    files = _folder_of_files(draw, name)
    prompt = draw.pick((f"Delete the file {name}.", f"Use rm to delete {name}."))
    return _Case(prompt, f"rm {name}", files, after={k: v for k, v in files.items() if k != name})


def _rename(draw: _Draw) -> _Case:
    extension = draw.pick(_EXTENSIONS)
    old, new = draw.file(extension), draw.file(extension)
    files = _folder_of_files(draw, old)
    after = {k: v for k, v in files.items() if k != old} | {new: files[old]}
    prompt = draw.pick((f"Rename the file {old} to {new}.", f"Use mv to rename {old} to {new}."))
    return _Case(prompt, f"mv {old} {new}", files, after=after)


def _write(draw: _Draw) -> _Case:
    name, (word,) = draw.file("txt"), draw.words(1)
    files = _folder_of_files(draw)
    prompt = draw.pick((f"Write the word {word} to the file {name}.", f"Use echo to write {word} to {name}."))
    return _Case(prompt, f"echo {word} > {name}", files, after={**files, name: f"{word}\n".encode()})


def _append(draw: _Draw) -> _Case:
    name, (word,) = draw.file("txt"), draw.words(1)
    files = _folder_of_files(draw, name)
    prompt = draw.pick((f"Append the line {word} to the file {name}.", f"Use echo to append {word} to {name}."))
    return _Case(prompt, f"echo {word} >> {name}", files, after={**files, name: files[name] + f"{word}\n".encode()})


def _find(draw: _Draw) -> _Case:
    extension = draw.pick(_EXTENSIONS)
    rest = [e for e in _EXTENSIONS if e != extension]
    found = [draw.file(extension), f"{draw.folder()}/{draw.file(extension)}"]
    files = {name: draw.lines(2) for name in (*found, draw.file(draw.pick(rest)))}
    prompt = draw.pick(
        (f"Find all .{extension} files, also in subdirectories.", f"Use find to find all files named *.{extension}.")
    )
    return _Case(prompt, f'find . -name "*.{extension}"', files, output=tuple(found), compare="paths")


def _mkdir(draw: _Draw) -> _Case:
    folder = draw.folder()
    prompt = draw.pick((f"Create a folder called {folder}.", f"Use mkdir to make the directory {folder}."))
    return _Case(prompt, f"mkdir {folder}", _folder_of_files(draw), folders=(folder,))


def _copy(draw: _Draw) -> _Case:
    extension = draw.pick(_EXTENSIONS)
    old, new = draw.file(extension), draw.file(extension)
    files = _folder_of_files(draw, old)
    prompt = draw.pick((f"Copy the file {old} to {new}.", f"Use cp to copy {old} to {new}."))
    return _Case(prompt, f"cp {old} {new}", files, after={**files, new: files[old]})


def _move(draw: _Draw) -> _Case:
    name, folder = draw.file(), draw.folder()
    files = {**_folder_of_files(draw, name), f"{folder}/{draw.file()}": draw.lines(2)}
    after = {k: v for k, v in files.items() if k != name} | {f"{folder}/{name}": files[name]}
    prompt = draw.pick((f"Move {name} into the directory {folder}.", f"Use mv to move {name} to {folder}."))
    return _Case(prompt, f"mv {name} {folder}", files, after=after)


def _head(draw: _Draw) -> _Case:
    name, n = draw.file(), draw.number(2, 5)
    files = {**_folder_of_files(draw), name: draw.lines(draw.number(n + 1, 9))}
    prompt = draw.pick((f"Show the first {n} lines of {name}.", f"Use head to show the first {n} lines of {name}."))
    return _Case(prompt, f"head -n {n} {name}", files, output=_lines(files[name])[:n])


def _tail(draw: _Draw) -> _Case:
    name, n = draw.file(), draw.number(2, 5)
    files = {**_folder_of_files(draw), name: draw.lines(draw.number(n + 1, 9))}
    prompt = draw.pick((f"Show the last {n} lines of {name}.", f"Use tail to show the last {n} lines of {name}."))
    return _Case(prompt, f"tail -n {n} {name}", files, output=_lines(files[name])[-n:])


FAMILIES: dict[str, Callable[[_Draw], _Case]] = {
    "list": _list,
    "pwd": _pwd,
    "create": _create,
    "print": _print,
    "count": _count,
    "grep": _grep,
    "delete": _delete,
    "rename": _rename,
    "write": _write,
    "append": _append,
    "find": _find,
    "mkdir": _mkdir,
    "copy": _copy,
    "move": _move,
    "head": _head,
    "tail": _tail,
}


def make_task(split: str, index: int, seed: int = 0) -> BashTask:
    """Task `index` of a split; the same for the same arguments. Families take turns.

    Raises:
      ConfigError: no such split.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split!r} is unknown; one of {', '.join(SPLITS)}")
    rng = np.random.default_rng([SPLITS.index(split), seed, index])
    family = list(FAMILIES)[index % len(FAMILIES)]
    case = FAMILIES[family](_Draw(split, rng))
    after = case.files if case.after is None else case.after
    # A folder stays where its files were.
    folders = frozenset(case.folders) | {path.rsplit("/", 1)[0] for path in case.files if "/" in path}
    return BashTask(index, split, family, case.prompt, case.files, after, folders, case.output, case.compare, case.gold)

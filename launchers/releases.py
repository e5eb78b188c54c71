"""Configurations of older releases: fields that are gone, with what replaced them, and fields that are new."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ml_collections import config_dict


@dataclasses.dataclass(frozen=True)
class Removed:
    """Attributes:
    by: the field that replaced it.
    value: its value for a value of the removed field.
    how: in words.
    """

    by: str
    value: Callable[[Any], Any]
    how: str


# Every field that a release had and this one does not.
REMOVED: dict[str, Removed] = {
    "rollout.keep_kv": Removed(
        "rollout.on_update",
        lambda kept: "keep" if kept else "recompute",
        "True is on_update='keep', False 'recompute'",
    ),
}


def replacement(field: str) -> str | None:
    """What to use in place of a removed field, in words; None where it never was one."""
    gone = REMOVED.get(field)
    return None if gone is None else f"config.{gone.by} replaced it: {gone.how}"


def hint(said: str) -> str:
    """The same for the first removed field whose own name stands in an error of the flags' library; "" for none."""
    found = (name for name in REMOVED if f'"{name.split(".")[-1]}"' in said.replace("'", '"'))
    return next((f" ({replacement(name)})" for name in found), "")


def bring_up(given: dict[str, Any], known: config_dict.ConfigDict) -> tuple[dict[str, Any], list[str]]:
    """A configuration as read from config.json, with the fields of this release.

    Args:
      given: of any release.
      known: the fields of this one, with their defaults.

    Returns:
      (the fields, lines that say what was done). Fields that no release had stay, for a check to refuse.
    """
    fields = _copy(given)
    notes = []
    for name, gone in REMOVED.items():
        group, _, own = name.rpartition(".")
        inner = fields.get(group)
        if isinstance(inner, dict) and own in inner:
            was, now = inner.pop(own), gone.by.rpartition(".")[2]
            inner.setdefault(now, gone.value(was))
            notes.append(f"config.{name}={was!r} is gone; config.{gone.by}={inner[now]!r} replaced it")
    if missing := _fill(fields, known, ""):
        taken = ", ".join(f"config.{name}={value!r}" for name, value in missing)
        notes.append(f"of an older release; what it lacks takes its default: {taken}")
    return fields, notes


def _copy(given: Any) -> Any:
    return {name: _copy(value) for name, value in given.items()} if isinstance(given, dict) else given


def _fill(fields: dict[str, Any], known: config_dict.ConfigDict, where: str) -> list[tuple[str, Any]]:
    """Adds what is missing; what was added."""
    added = []
    for name, default in known.items():
        if isinstance(default, config_dict.ConfigDict):
            inner = fields.setdefault(name, {})
            if isinstance(inner, dict):
                added += _fill(inner, default, f"{where}{name}.")
        elif name not in fields:
            fields[name] = default
            added.append((f"{where}{name}", default))
    return added

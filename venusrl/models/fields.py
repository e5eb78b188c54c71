"""JSON files of a model's folder: read whole, and looked up with a check of every value."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from venusrl.core.errors import CheckpointError

LARGEST = 1e15  # no number of a model's files is larger; float32 holds its square


def check_file(path: Path) -> None:
    """Refuses what would be waited for, or read without an end: a FIFO, a socket, a device, a folder.

    Raises:
      CheckpointError: something is at `path`, and it is no regular file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise CheckpointError(f"{path} is no file; put the model's own there")


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
      CheckpointError: no such file, no file, or no UTF-8.
    """
    check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"no {path.name} in {path.parent}; fix model.checkpoint, or copy the file too") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
      CheckpointError: no such file, it is not one JSON object, or a text in it has half a character ("\\ud800").
    """
    text = read_text(path)
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object; copy it again")
    return value


def short(value: Any) -> str:
    """A value for a message, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 512:  # Python refuses to print some
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Fields:
    """Typed look-ups in a JSON object. What is wrong is collected; null is as good as missing."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = ""):
        self.raw, self._prefix = raw, prefix
        self.problems: list[str] = []

    def problem(self, key: str, why: str) -> None:
        self.problems.append(f"{self._prefix}{key}={short(self.raw.get(key))}: {why}")

    def has(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def number(self, key: str, default: float | None = None, most: float = LARGEST) -> float:
        """A number above 0, at most `most`; `default`, if there is one, where the file has none."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.problem(key, "a positive number is needed")
            return default or 1.0
        if value > most:
            self.problem(key, f"at most {most:g} is believed")
            return default or 1.0
        return float(value)

    def integer(self, key: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """A whole number from 1 to `most`."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.problem(key, "a positive whole number is needed")
            return default or 1
        if value > most:
            self.problem(key, f"at most {most} is believed")
            return most
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.problem(key, "true or false is needed")
        return default if value is None else bool(value)

    def group(self, key: str) -> dict[str, Any]:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            self.problem(key, "an object is needed")
            return {}
        return value or {}

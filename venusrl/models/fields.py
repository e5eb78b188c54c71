"""JSON files of a model's folder: read whole, and looked up with a check of every value."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from venusrl.core.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
      CheckpointError: no such file, or it is not one JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"no {path.name} in {path.parent}; fix model.checkpoint, or copy the file too") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); copy it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not a JSON object; copy it again")
    return value


def short(value: Any) -> str:
    """A value for a message, cut where it is long."""
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

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; `default`, if there is one, where the file has none."""
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.problem(key, "a positive number is needed")
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

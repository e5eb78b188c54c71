"""The least and the most of every number of the contract, and what its texts may be. Each is checked here, for all.

Whoever can name a number to a node can otherwise end it: a limit of 2^64 bytes is 0 to the kernel, and no clock can be
set to 10^400 seconds.
"""

import math
import operator
from collections.abc import Callable, Mapping

from venusrl.core.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
SHORTEST_S, LONGEST_S = 1e-3, 1e12  # seconds of whatever can be waited for
# Whole numbers: of templates, of commands and their terminals, of files.
WHOLE: dict[str, tuple[int, int]] = {
    "memory_bytes": (16 * MIB, 16 * TIB),
    "pids": (2, 1 << 20),
    "file_bytes": (4096, 16 * TIB),
    "disk_bytes": (MIB, 16 * TIB),
    "output_bytes": (256, 256 * MIB),
    "layer_bytes": (4096, 256 * TIB),
    "rows": (1, 0xFFFF),
    "columns": (1, 0xFFFF),
    "signal": (1, 64),
    "mode": (0, 0o7777),
    "max_bytes": (0, GIB),
    "process": (0, (1 << 63) - 1),
}
SECONDS = ("ttl_s", "setup_s", "oom_wait_s", "start_s", "lease_s", "timeout_s", "silent_s")
MOST_NAME = 255  # characters of a label
MOST_PATH = 4096  # of a path, as the kernel has it
MOST_TEXT = 16 * MIB  # of what else is text: a command, the values of variables together
MOST_BODY = GIB  # bytes of what is sent at once: a script, what is written
MOST_ENTRIES = 10_000  # of a list, or of a mapping
_SHOWN = 60  # characters of a value that an error names


def shown(value: object) -> str:
    """A value as an error names it: in one line, and not long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    text = repr(value[: 2 * _SHOWN] if isinstance(value, str | bytes) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def whole(what: str, name: str, value: object) -> int:
    """An integer within its bounds (WHOLE). A bool is none; what else has `__index__` is.

    Raises:
      ConfigError: "WHAT=value: give an integer of ...".
    """
    least, most = WHOLE[name]
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise ConfigError(f"{what}={shown(value)}: give an integer of at least {least}, at most {most}")
    return number


def seconds(what: str, value: object) -> float:
    """A time that can be waited for.

    Raises:
      ConfigError: "WHAT=value: give a positive number of seconds ...".
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not SHORTEST_S <= number <= LONGEST_S:
        raise ConfigError(f"{what}={shown(value)}: give a positive number of seconds, {SHORTEST_S:g} to {LONGEST_S:g}")
    return number


def text(what: str, value: object, most: int = MOST_NAME) -> str:
    """Text of at most so many characters, without NUL, that can be written as UTF-8.

    Raises:
      ConfigError: "WHAT=value: give text ...".
    """
    if not isinstance(value, str) or len(value) > most or "\0" in value or not _is_utf8(value):
        raise ConfigError(
            f"{what}={shown(value)}: give text of at most {most} characters, without NUL or half characters"
        )
    return value


def data(what: str, value: object, most: int = MOST_BODY) -> bytes:
    """Bytes, at most so many.

    Raises:
      ConfigError: it is something else, or more.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ConfigError(f"{what} is {type(value).__name__}: give bytes")
    if len(value) > most:
        raise ConfigError(f"{what} has {len(value)} bytes: give at most {most}")
    return bytes(value)


def texts(what: str, values: object, most: int) -> tuple[str, ...]:
    """A tuple of texts that are not blank.

    Raises:
      ConfigError: "WHAT=value: give a tuple of strings that are not empty".
    """
    if not isinstance(values, tuple) or len(values) > MOST_ENTRIES:
        raise ConfigError(f"{what}={shown(values)}: give a tuple of strings that are not empty, at most {MOST_ENTRIES}")
    for number, value in enumerate(values):
        if not text(f"{what}[{number}]", value, most).strip():
            raise ConfigError(f"{what}={shown(values)}: give a tuple of strings that are not empty")
    return values


def entries(what: str, values: object, check: Callable[[str, object, object], object]) -> dict:
    """What `check` makes of every (name of it, key, value) of a mapping, by key.

    Raises:
      ConfigError: it is no mapping, or has too many entries.
    """
    if not isinstance(values, Mapping) or len(values) > MOST_ENTRIES:
        raise ConfigError(f"{what}={shown(values)}: give a mapping of at most {MOST_ENTRIES} entries")
    return {key: check(f"{what}[{shown(key)}]", key, value) for key, value in values.items()}


def _is_utf8(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

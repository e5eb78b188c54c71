"""What the spawner is told, checked before anything is done about it: it has more rights than who tells it."""

import re
from collections.abc import Callable, Mapping

from venusrl.core.errors import ConfigError
from venusrl.sandbox import bounds

_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_REASON = re.compile(r"[a-z-]{1,30}")

Check = Callable[[str, object], object]


def _whole(name: str) -> Check:
    return lambda what, value: bounds.whole(what, name, value)


def _matches(pattern: re.Pattern) -> Check:
    def check(what: str, value: object) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ConfigError(f"{what}={bounds.shown(value)}: give text as {pattern.pattern}")

    return check


def _path(what: str, value: object) -> None:
    if not bounds.text(what, value, bounds.MOST_PATH).startswith("/"):
        raise ConfigError(f"{what}={bounds.shown(value)}: give an absolute path")


def _maybe(check: Check) -> Check:
    return lambda what, value: None if value is None else check(what, value)


def _flag(what: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{what}={bounds.shown(value)}: give true or false")


def _number(what: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ConfigError(f"{what}={bounds.shown(value)}: give a number")


def _more(what: str, value: object) -> None:
    _number(what, value)
    if value > bounds.WHOLE["memory_bytes"][1]:
        raise ConfigError(f"{what}={bounds.shown(value)}: give less")


def _variables(what: str, value: object) -> None:
    def check(entry: str, key: object, one: object) -> None:
        bounds.text(entry, key)
        bounds.text(entry, one, bounds.MOST_TEXT)

    bounds.entries(what, value, check)


def _oom(what: str, value: object) -> None:
    if value not in ("kill", "hold"):
        raise ConfigError(f"{what}={bounds.shown(value)}: give 'kill' or 'hold'")


_LIMITS: dict[str, Check] = {
    **{name: _whole(name) for name in ("memory_bytes", "pids", "file_bytes", "disk_bytes", "output_bytes")},
    "ttl_s": bounds.seconds, "oom_wait_s": bounds.seconds, "oom": _oom, "env": _variables,
    "layer": _maybe(_path), "build": _flag,
}  # fmt: skip
_HOLDER: dict[str, Check] = {name: _LIMITS[name] for name in ("memory_bytes", "pids", "ttl_s")} | {"hold": _path}
_SAVED: dict[str, Check] = {"folder": _path, "criu": _path}
_BERTH: Check = _matches(re.compile(r"([0-9a-f]{2}){0,110}"))
_ASKED: dict[str, Check] = {"request": _number}
FIELDS: dict[str, dict[str, Check]] = {
    "create": _LIMITS,
    "hold": _HOLDER,
    "restore": _LIMITS | _SAVED | {"base": _number, "berth": _BERTH, "parked": _flag},
    "kill": {"reason": _matches(_REASON)},
    "usage": {},
    "resize": _ASKED | {"memory_bytes": _whole("memory_bytes"), "lent": _maybe(_more)},
    "save": _ASKED | _SAVED | {"ghost_bytes": _number},
    "meet": _ASKED | {"berth": _BERTH},
}


def check(message: object) -> None:
    """Raises:
    ConfigError: it is no message, or a field of it is missing or out of range.
    """
    op = message.get("op") if isinstance(message, Mapping) else None
    fields = FIELDS.get(op) if isinstance(op, str) and op != "hold" else None
    if fields is None:
        raise ConfigError(f"op={bounds.shown(op)}: there is no such message")
    if op == "create" and "hold" in message:
        fields = FIELDS["hold"]
    if op != "usage":
        fields = {"id": _matches(_ID), **fields}
    for name, test in fields.items():
        if name not in message:
            raise ConfigError(f"{op} {name} is missing")
        test(f"{op} {name}", message[name])

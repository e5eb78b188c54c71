"""What the frames between owners and agents hold, checked where they come in: field by field, kind by kind.

An agent can have been taken over, and a client of a daemon can send anything. What does not fit ends at most who sent
it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from venusrl.core.errors import ConfigError
from venusrl.sandbox import bounds
from venusrl.sandbox.wire import WireError

_MOST_NUMBER = (1 << 63) - 1
_KINDS = ("file", "dir", "link", "other")
_CHANGES = ("create", "write", "chmod", "remove", "move_from", "move_to", "lost")
STREAMS = ("output", "stdout", "stderr", "pty")
STOPPED = (None, "deadline", "silent", "cancelled")

Test = Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST_NUMBER


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _MOST_NUMBER


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MOST_NUMBER


def _is_code(value: Any) -> bool:
    return type(value) is int and -0xFF <= value <= 0xFF


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _among(*values: Any) -> Test:
    return lambda value: (value is None or isinstance(value, str)) and value in values


def _row(*tests: Test) -> Test:
    return (
        lambda row: isinstance(row, list)
        and len(row) == len(tests)
        and all(test(value) for test, value in zip(tests, row, strict=True))
    )


def _list(test: Test) -> Test:
    return lambda rows: isinstance(rows, list) and all(test(row) for row in rows)


_entry = _row(_is_text, _among(*_KINDS), _is_whole, _is_whole, _is_time)
_END = {"exit_code": _is_code, "total": _is_whole, "timed_out": _among(*STOPPED), "seconds": _is_time, "oom": _is_flag}
# What an agent answers, by what it was asked; nothing where there is nothing to say.
_ANSWERS: dict[str, dict[str, Test]] = {
    "exec": _END,
    "start": {"pid": _is_whole},
    "connect": {"pid": _is_whole},
    "processes": {"processes": _list(_row(_is_whole, _is_whole, _is_text, _is_number))},
    "list": {"entries": _list(_entry)},
    "stat": {"entry": _entry},
}


def _check(frame: Mapping, wanted: Mapping[str, Test], what: str) -> None:
    for name, test in wanted.items():
        if name not in frame or not test(frame[name]):
            raise WireError(f"{what}: {name}={bounds.shown(frame.get(name))}")


def check_said(header: Any) -> None:
    """Of an agent: an answer, what it tells of a command or a watched path, or of itself.

    Raises:
      WireError: it is none of these.
    """
    if not isinstance(header, dict):
        raise WireError(f"a frame whose header is {bounds.shown(header)}")
    if "setup_error" in header:
        _check(header, {"setup_error": _is_text}, "the error of a set-up")
    elif "ready" in header or "paused" in header:
        _check(header, dict.fromkeys(header.keys() & {"ready", "paused"}, _is_flag), "its state")
    elif "id" in header:
        _check(header, {"id": _is_whole}, "an answer")
        if "errno" in header:
            _check(header, {"errno": lambda value: _is_whole(value) and 0 < value < 4096}, "an error")
    elif "watch" in header:
        changes = _list(_row(_among(*_CHANGES), lambda name: _is_text(name) and len(name) <= bounds.MOST_PATH))
        _check(header, {"watch": _is_whole, "events": changes}, "changes of a path")
    elif "stream" in header:
        _check(header, {"job": _is_whole, "stream": _among(*STREAMS)}, "output")
    else:
        _check(header, {"job": _is_whole, **_END}, "the end of a command")


def check_answer(op: str, header: Mapping) -> None:
    """Of an agent, to a request of that kind. WireError where it does not answer that."""
    if "errno" not in header:
        _check(header, _ANSWERS.get(op, {}), f"the answer to {op}")


# What a client of a daemon may ask of an agent, by `op`: a check for each field, that raises ConfigError.


def _seconds(what: str, value: Any) -> None:
    if value is not None:
        bounds.seconds(what, value)


def _whole(name: str) -> Callable[[str, Any], None]:
    return lambda what, value: bounds.whole(what, name, value) and None


def _number(what: str, value: Any) -> None:
    if not _is_whole(value):
        raise ConfigError(f"{what}={bounds.shown(value)}: give an integer of at least 0, at most {_MOST_NUMBER}")


def _number_or_none(what: str, value: Any) -> None:
    if value is not None:
        _number(what, value)


def _path(what: str, value: Any) -> None:
    if not isinstance(value, str) or "\0" in value or len(value) > bounds.MOST_PATH:
        raise ConfigError(
            f"{what}={bounds.shown(value)}: give a path of at most {bounds.MOST_PATH} characters, without NUL"
        )


def _path_or_none(what: str, value: Any) -> None:
    if value is not None:
        _path(what, value)


def _variables(what: str, value: Any) -> None:
    def check(entry: str, key: Any, one: Any) -> None:
        bounds.text(entry, key, bounds.MOST_NAME)
        bounds.text(entry, one, bounds.MOST_TEXT)

    bounds.entries(what, value, check)


def _terminal(what: str, value: Any) -> None:
    if value is not None:
        if not isinstance(value, list) or len(value) != 2:
            raise ConfigError(f"{what}={bounds.shown(value)}: give rows and columns")
        bounds.whole(f"{what} rows", "rows", value[0])
        bounds.whole(f"{what} columns", "columns", value[1])


def _flag(what: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{what}={bounds.shown(value)}: give true or false")


def _stdin(what: str, value: Any) -> None:
    if value not in ("bytes", "pipe"):
        raise ConfigError(f"{what}={bounds.shown(value)}: give 'bytes' or 'pipe'")


def _mode(what: str, value: Any) -> None:
    if value is not None:
        bounds.whole(what, "mode", value)


_COMMAND = {
    "timeout_s": _seconds, "silent_s": _seconds, "env": _variables, "script_bytes": _number, "cwd": _path_or_none,
    "stdin": _stdin, "pty": _terminal, "merged": _flag, "window": _number_or_none,
}  # fmt: skip
REQUESTS: dict[str, dict[str, Callable[[str, Any], None]]] = {
    "exec": _COMMAND,
    "start": _COMMAND,
    "processes": {},
    "connect": {"job": _number, "window": _number},
    "window": {"job": _number, "bytes": _number_or_none},
    "cancel": {"job": _number},
    "input": {"job": _number},
    "signal": {"job": _number, "number": _whole("signal")},
    "resize": {"job": _number, "rows": _whole("rows"), "columns": _whole("columns")},
    "read": {"path": _path, "offset": _number, "max_bytes": _whole("max_bytes")},
    "write": {"path": _path, "offset": _number, "mode": _mode},
    "stat": {"path": _path},
    "list": {"path": _path},
    "watch": {"path": _path},
    "unwatch": {"watch": _number},
    "pause": {},
    "resume": {},
}


def check_asked(header: Any) -> None:
    """Of a client, for an agent.

    Raises:
      ValueError: it has no `op` or `id` that there is; the client does not speak this.
      ConfigError: a field is missing or out of range.
    """
    if not isinstance(header, dict) or not isinstance(header.get("op"), str) or header["op"] not in REQUESTS:
        raise ValueError(f"clients may ask for {', '.join(sorted(REQUESTS))}")
    if not _is_whole(header.get("id")):
        raise ValueError(f"id={bounds.shown(header.get('id'))} is no number of a request")
    fields = REQUESTS[header["op"]]
    if unknown := header.keys() - fields.keys() - {"op", "id"}:
        raise ConfigError(f"{header['op']} {bounds.shown(min(map(str, unknown)))}: there is no such field")
    for name, check in fields.items():
        if name not in header:
            raise ConfigError(f"{header['op']} {name} is missing")
        check(f"{header['op']} {name}", header[name])

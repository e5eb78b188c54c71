"""What the owner of a sandbox asks of its agent, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from venusrl.core.errors import ConfigError
from venusrl.sandbox.bounds import MOST_PATH, data, seconds, shown
from venusrl.sandbox.contract import ExecResult, FileChange, check_env

MOST_CHANGES = 10_000  # of a watched path that wait to be taken
_USERS = ("", "sandbox")


def unfollowed(job: int) -> dict:
    """Its output is not taken any more; it goes on."""
    return {"op": "window", "job": job, "bytes": None}


def command(
    what: str,
    script: str | bytes,
    timeout_s: float | None,
    silent_s: float | None,
    user: str,
    cwd: str | None,
    user_env: Mapping[str, str] | None,
) -> tuple[dict, bytes]:
    """The request's header and the script's bytes. ConfigError for what cannot be."""
    times = {"timeout_s": timeout_s, "silent_s": silent_s}
    times = {name: value if value is None else seconds(f"{what} {name}", value) for name, value in times.items()}
    if user not in _USERS:
        raise ConfigError(f"{what} user={shown(user)}: the process backend has one user, 'sandbox'")
    if cwd is not None and (not isinstance(cwd, str) or not cwd or "\0" in cwd or len(cwd) > MOST_PATH):
        raise ConfigError(f"{what} cwd={shown(cwd)}: give a directory, without NUL")
    env = check_env(f"{what} user_env", {} if user_env is None else user_env)
    raw = data(f"{what} script", encoded(script) if isinstance(script, str) else script)
    header = {"op": what, **times, "env": env, "script_bytes": len(raw)}
    return {**header, "cwd": cwd}, raw


def encoded(script: str) -> bytes:
    """As UTF-8; undecodable bytes as they were, and what is no text at all (a lone surrogate) as it is."""
    try:
        return script.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return script.encode("utf-8", "surrogatepass")


def exec_result(answer: dict, output: bytes) -> ExecResult:
    return ExecResult(
        exit_code=answer["exit_code"],
        output=output,
        output_total=answer["total"],
        timed_out=answer["timed_out"] in ("deadline", "silent", "cancelled"),
        seconds=answer["seconds"],
        oom=answer["oom"],
        silent=answer["timed_out"] == "silent",
    )


def add_changes(changes: asyncio.Queue[FileChange | None], events: list[tuple[str, str]]) -> None:
    """Of a watched path; where they come faster than they are taken, that is what is said."""
    for kind, name in events:
        if changes.qsize() == MOST_CHANGES:
            while not changes.empty():
                changes.get_nowait()
            changes.put_nowait(FileChange("lost", ""))
        changes.put_nowait(FileChange(kind, name))

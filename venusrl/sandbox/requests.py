"""What the owner of a sandbox asks of its agent, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from venusrl.core.errors import ConfigError
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
    for name, value in (("timeout_s", timeout_s), ("silent_s", silent_s)):
        if value is not None and not value > 0:
            raise ConfigError(f"{what} {name}={value!r}: give a positive number of seconds")
    if user not in _USERS:
        raise ConfigError(f"{what} user={user!r}: the process backend has one user, 'sandbox'")
    if cwd is not None and (not cwd or "\0" in cwd):
        raise ConfigError(f"{what} cwd={cwd!r}: give a directory, without NUL")
    env = dict(user_env or {})
    check_env(f"{what} user_env", env)
    raw = encoded(script) if isinstance(script, str) else script
    header = {"op": what, "timeout_s": timeout_s, "silent_s": silent_s, "env": env, "script_bytes": len(raw)}
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

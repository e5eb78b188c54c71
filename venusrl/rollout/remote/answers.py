"""HTTP answers, and the errors that they stand for."""

import json
from typing import Any

from pydantic_core import from_json
from starlette.responses import Response

from venusrl.core.errors import CheckpointError, ContractError, VenusError, WorkerError
from venusrl.core.http import error_body
from venusrl.rollout.remote.lease import Held

HELD = 409


def status_of(error: VenusError) -> int:
    """400 for what a caller got wrong, 409 for whom the worker does not belong to, 503 for what failed here."""
    if isinstance(error, Held):
        return HELD
    return 400 if isinstance(error, (ContractError, CheckpointError)) else 503


def error_of(status: int, text: str) -> VenusError:
    """What a client raises for an answer that is no success."""
    try:
        text = str(from_json(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):  # it is not from a worker, nor from a worker's door
        text = f"HTTP {status}: {text[:200]}"
    if status == HELD:
        return Held(text)
    return ContractError(text) if status == 400 else WorkerError(text)


def answer(status: int, error: object) -> Response:
    """An error, in ASCII: what it quotes may be no text."""
    return Response(json.dumps(told(status, error)), status, media_type="application/json")


def told(status: int, error: object) -> dict[str, Any]:
    """The body of an answer that is no success. Half of a surrogate pair, which few readers take, is written out."""
    text = str(error).encode(errors="backslashreplace").decode()
    return error_body(text, "server_error" if status >= 500 else "invalid_request_error")

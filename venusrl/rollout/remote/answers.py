"""HTTP answers and bodies, and the errors that they stand for."""

import json

from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from venusrl.core.errors import CheckpointError, ContractError, VenusError, WorkerError
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
        text = str(from_json(text)["error"])
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {status}: {text[:200]}"
    if status == HELD:
        return Held(text)
    return ContractError(text) if status == 400 else WorkerError(text)


def answer(status: int, error: object) -> Response:
    """An error, in ASCII: what it quotes may be no text."""
    return Response(json.dumps({"error": str(error)}), status, media_type="application/json")


async def read(request: HttpRequest, most: int) -> bytes:
    """The body.

    Raises:
      ContractError: it has more than `most` bytes, of which no more are read; or it ends before its time.
    """
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise ContractError(f"the body has more than {most} bytes; send less")
            parts.append(part)
    except ClientDisconnect:
        raise ContractError(f"the caller hung up after {size} bytes of the body") from None
    return b"".join(parts)

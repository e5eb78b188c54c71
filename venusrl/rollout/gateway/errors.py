"""Errors in the OpenAI API's form, with the codes that clients look for."""

import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from venusrl.core.errors import ContractError, VenusError
from venusrl.core.http import Gone, error_body
from venusrl.rollout.gateway.api import BadCall

RETRY_S = 1  # seconds after which a refused call may be tried again


class Busy(VenusError):
    """More calls wait than the queue holds."""


def too_long(tokens: int, most: int, field: str = "messages") -> BadCall:
    """A prompt that leaves no room; worded as the clients' own checks expect it."""
    return BadCall(
        f"This model's maximum context length is {most} tokens. However, your prompt has {tokens} tokens, which leaves "
        "no room for a reply. Please reduce the length of the prompt.",
        field,
        "context_length_exceeded",
    )


def told(error: Exception) -> dict:
    """What clients parse."""
    if isinstance(error, BadCall):
        return error_body(str(error), code=error.code, param=error.param)
    if isinstance(error, Busy):
        return error_body(str(error), "rate_limit_error", "queue_full")
    return error_body(str(error), "invalid_request_error" if isinstance(error, ContractError) else "server_error")


def error_response(status: int, text: str) -> JSONResponse:
    return JSONResponse(error_body(text), status_code=status)


async def refused(request: HttpRequest, error: Exception) -> Response:
    """The answer to a call that raised `error`: the caller's fault, or ours."""
    status = 400 if isinstance(error, ContractError) else 503
    if isinstance(error, Busy):
        return JSONResponse(told(error), status_code=429, headers={"retry-after": str(RETRY_S)})
    return JSONResponse(told(error), status_code=status)


async def no_such(request: HttpRequest, error: Exception) -> Response:
    """404, 405 and the like."""
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error.detail), status_code=error.status_code, headers=error.headers)


async def left(request: HttpRequest, error: Exception) -> Response:
    """Nobody is there to read it; 499 is what others log for such calls."""
    return Response(status_code=499)


async def failed(request: HttpRequest, error: Exception) -> Response:
    """A defect of ours ends this call alone."""
    logging.error("%s %s failed", request.method, request.url.path, exc_info=error)
    body = error_body(f"an error of the server's: {type(error).__name__}", "server_error")
    return JSONResponse(body, status_code=500)


HANDLERS = {VenusError: refused, HTTPException: no_such, Gone: left, Exception: failed}

"""How requests to a node are read, and how it answers what goes wrong."""

import json
import re

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from venusrl.core.errors import ConfigError, ContractError, SandboxCapacity, SandboxLost, SandboxUnsupported
from venusrl.core.http import body_of
from venusrl.sandbox import bounds

_KEY = re.compile(r"[0-9a-f]{64}")
_RETRY_S = 1
_MOST_JSON = 1 << 20  # bytes of a request about a sandbox


class Unproven(SandboxUnsupported):
    """A node's proof does not hold here, or no more; it may ask for a challenge."""


class Moved(Exception):
    """The sandbox is at another node now."""

    def __init__(self, node: str):
        self.node = node


_STATUS = {
    Unproven: 401,
    ConfigError: 400,
    ContractError: 413,
    SandboxLost: 410,
    SandboxUnsupported: 501,
    SandboxCapacity: 503,
}


async def json_of(request: Request, most: int = _MOST_JSON) -> dict:
    """The body; none is an empty one. ConfigError where it is no JSON object, or does not say that it is."""
    data = await body_of(request, most)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if data and kind != "application/json":
        raise ConfigError(f"content-type={bounds.shown(kind)}: send the body as application/json")
    try:
        body = json.loads(data) if data else {}
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ConfigError("the body is no JSON object")
    return body


def key_of(request: Request) -> str:
    key = request.path_params["key"]
    if not _KEY.fullmatch(key):
        raise ConfigError(f"key={key!r}: give the 64 hexadecimal digits of a template")
    return key


def path_of(request: Request) -> str:
    path = request.query_params.get("path", "")
    if not path:
        raise ConfigError("path is missing: give ?path=")
    return path


async def redirect(request: Request, error: Exception) -> Response:
    """To where a sandbox is now; 308 for clients that follow addresses."""
    node, path = error.node, request.url.path + (f"?{request.url.query}" if request.url.query else "")
    headers = {} if node.startswith("unix:") else {"Location": f"{node}{path}"}
    return JSONResponse({"error": "Moved", "node": node, "message": f"it is at {node}"}, 308, headers=headers)


async def say(request: Request, error: Exception) -> Response:
    """Errors as {error, message}; what helps to raise the same one on the other side."""
    body = {"error": type(error).__name__, "message": str(error).encode(errors="replace").decode()}
    if isinstance(error, OSError):
        return JSONResponse(body | {"error": "OSError", "errno": error.errno, "path": _shown_path(error)}, 422)
    if isinstance(error, SandboxLost):
        body |= {"reason": error.reason, "id": error.sandbox_id}
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
    headers = {"Retry-After": str(_RETRY_S)} if status == 503 else None
    return JSONResponse(body, status, headers=headers)


def _shown_path(error: OSError) -> str | None:
    return None if error.filename is None else str(error.filename).encode(errors="replace").decode()


async def nobody(request: Request, error: Exception) -> Response:
    """Its caller has gone; nobody hears it."""
    return Response(status_code=400)


async def fail(request: Request, error: Exception) -> Response:
    """A defect; it ends this request alone, and is in the log."""
    return JSONResponse({"error": "SandboxError", "message": f"the node failed: {type(error).__name__}"}, 500)

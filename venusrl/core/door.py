"""What stands before every HTTP service: who may call, from which page, and how slowly.

- Host and Origin: a page in somebody's browser cannot call a service of this machine, not even one whose name was made
  to point here (DNS rebinding). Programs send no Origin.
- A bearer key, compared in constant time; needed wherever others than this machine's users can connect.
- Bodies come within `BODY_S` seconds, more where they are long; answers are taken within `SEND_S` a part.

The time for a request's head is kept by listening.Server, and that for answers which wait in buffers.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import os
import re
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from venusrl.core.errors import ConfigError
from venusrl.core.http import error_body

BODY_S = 30.0  # seconds for a body, and one more for every SLOWEST bytes of it
SLOWEST = 16 * 1024  # bytes a second
SEND_S = 60.0  # seconds that a caller may take to read a part of an answer
SHORTEST_KEY, LONGEST_KEY = 16, 4096  # characters
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, key: str | None) -> None:
    """Raises:
    ConfigError: other machines can connect to `host`, and there is no key.
    """
    if key is None and not is_loopback(host):
        raise ConfigError(f"--host={host} can be reached from other machines: give --key_file, or a loopback address")


def read_key(path: str, field: str = "--key_file") -> str:
    """The key in a file that its owner alone can read.

    Args:
      field: that names the file.

    Raises:
      ConfigError: it cannot be read, others can read it, or what it holds is no key.
    """
    try:
        with open(path, encoding="ascii") as file:
            mode, key = os.fstat(file.fileno()).st_mode, file.read(2 * LONGEST_KEY).strip()
    except OSError as error:
        raise ConfigError(f"{field}={path!r}: {error.strerror or error}; give a file with the key in it") from error
    except ValueError:  # not ASCII, or no path
        key, mode = "", 0
    if mode & 0o077:
        raise ConfigError(f"{field}={path!r}: others can read it; chmod 600 it")
    if not SHORTEST_KEY <= len(key) <= LONGEST_KEY or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{field}={path!r}: a key has {SHORTEST_KEY} to {LONGEST_KEY} printable characters, in ASCII, without "
            "white space; make one with `openssl rand -hex 32`"
        )
    return key


class Door:
    """An application behind its door.

    Args:
      app: what answers.
      host: address that it listens on. On the loopback it is called by the names of the loopback alone.
      key: that callers show as `Authorization: Bearer KEY`; None lets everybody in.
      origins: of web pages that may call, as "https://host:port".
      also: whether a call (its ASGI scope) needs no key, for another reason.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str = "127.0.0.1",
        key: str | None = None,
        origins: Sequence[str] = (),
        also: Callable[[Scope], bool] = lambda scope: False,
    ):
        self._also = also
        if origins:  # their browsers ask first, and read no answer that does not name them
            app = CORSMiddleware(app, origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"])
        self._app = app
        self._names = LOCAL_NAMES | {host} if is_loopback(host) else None
        self._digest = None if key is None else _digest(key)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008, "reason": refusal[1][:100]})
            return await _answer(send, *refusal)
        if scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        return await _Timed(receive, send).run(self._app, scope)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, why) where the call is refused."""
        headers = Headers(scope=scope)
        host = _name(headers.get("host", ""))
        if self._names is not None and host not in self._names:
            return 421, f"this service is not called {host[:100]!r}; use one of {', '.join(sorted(self._names))}"
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            return 403, f"pages of {origin[:100]!r} may not call this service"
        if origin is None and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "web pages may not call this service"
        preflight = scope["type"] == "http" and scope["method"] == "OPTIONS" and origin is not None
        if self._digest is not None and not preflight:  # which browsers send without the key
            scheme, _, key = headers.get("authorization", "").partition(" ")
            shown = scheme.lower() == "bearer" and hmac.compare_digest(_digest(key.strip()), self._digest)
            if not shown and not self._also(scope):
                return 401, "this service needs its key, as `Authorization: Bearer KEY`"
        return None


class _Timed:
    """One call, with the time that its caller may take."""

    def __init__(self, receive: Receive, send: Send):
        self._receive, self._send = receive, send
        self._until: float | None = None  # seconds of the loop's clock; of the body's end
        self._whole = self._late = self._begun = False

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        self._until = asyncio.get_running_loop().time() + BODY_S
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            if not self._late:
                raise
        if self._late and not self._begun:
            await _answer(self._send, 408, f"the body did not come within {BODY_S:.0f} s; send it faster")

    async def receive(self) -> Message:
        if self._whole or self._late:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            self._late = True
            return {"type": "http.disconnect"}
        self._until += len(message.get("body", b"")) / SLOWEST
        self._whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if self._late:
            return  # answered by `run`
        self._begun = True
        try:
            async with asyncio.timeout(SEND_S):
                await self._send(message)
        except TimeoutError as error:
            raise OSError(f"the caller took nothing for {SEND_S:.0f} s") from error


async def _answer(send: Send, status: int, text: str) -> None:
    body = json.dumps(error_body(text))
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


def target_of(scope: Scope) -> str:
    """The path as it was sent, with its query."""
    query = scope.get("query_string", b"").decode("latin-1")
    return scope.get("raw_path", scope["path"].encode()).decode("latin-1") + (f"?{query}" if query else "")


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    found = _HOST.fullmatch(host.lower())
    return found["name"].strip("[]") if found else host


def _digest(key: str) -> bytes:
    """Of one length whatever the key is, so that comparing takes as long for all."""
    return hashlib.sha256(key.encode(errors="replace")).digest()

"""What the HTTP services share: bounded bodies, work that ends when its caller hangs up, and streams of events."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from venusrl.core.errors import ContractError

T = TypeVar("T")


def error_body(
    text: str, kind: str = "invalid_request_error", code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """An error as every service tells it: in the OpenAI API's form.

    Args:
      kind: "invalid_request_error" where the caller can mend it, "server_error" where it cannot.
      code: that programs look for.
      param: the field, where it is one's fault.
    """
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


class Gone(Exception):
    """The caller hung up."""


async def hang_up(receive: Receive) -> None:
    """Returns once the caller hangs up. The body has to be read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def body_of(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises:
      ContractError: it has more than `most` bytes.
      Gone: the caller hung up before its end.
    """
    parts, size = [], 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise ContractError(f"the body has more than {most} bytes; send less")
        if not message.get("more_body"):
            return b"".join(parts)


async def until_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled where the caller hangs up first. The body has to be read before.

    Raises:
      Gone: the caller hung up; `work` has ended.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Gone
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class Stream(Response):
    """An answer in parts, ended as soon as the caller hangs up; `parts` is closed then."""

    def __init__(self, request: Request, parts: AsyncIterator[bytes], media_type: str):
        super().__init__(media_type=media_type, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._request, self._parts = request, parts

    async def __call__(self, scope, receive, send) -> None:
        try:
            await until_gone(self._request, self._send(send))
        except (Gone, OSError):
            pass
        finally:
            await self._parts.aclose()

    async def _send(self, send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

"""The endpoint that streams a turn. Plain ASGI: it has to notice at once when the caller hangs up."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable

from starlette.requests import Request as HttpRequest

from venusrl.core.errors import VenusError
from venusrl.core.http import Gone, body_of, hang_up
from venusrl.rollout.remote.answers import answer, status_of, told
from venusrl.rollout.remote.wire import BEAT_S, GenerateBody, parse
from venusrl.rollout.worker import Request, Worker

LONGEST_BODY = 16 * 2**20  # bytes of a request that is no KV and no weights

LAST_WORD_S = 1.0  # for a caller to hear why its stream ends; one that does not read is not waited for


@dataclasses.dataclass(eq=False)
class _Stream:
    """Attributes:
    gone: done once nobody wants it any more; with what its caller is told, None where there is no caller.
    ended: its slot is free.
    task: that answers.
    """

    gone: asyncio.Future
    ended: asyncio.Event
    task: asyncio.Task

    def end(self, why: VenusError | None) -> None:
        if not self.gone.done():
            self.gone.set_result(why)


class Generate:
    """POST /generate: a line of JSON for each chunk, an empty one every BEAT_S seconds without."""

    def __init__(self, worker: Worker, check: Callable[[HttpRequest], None], beat_s: float = BEAT_S):
        """Args:
        check: raises where the caller may not; asked once the body is there.
        """
        self._worker = worker
        self._check = check
        self._beat_s = beat_s
        self._streams: dict[str, list[_Stream]] = {}

    async def cancel(self, trajectory: str) -> None:
        """Ends what streams for `trajectory`, and returns when it has ended."""
        await self._end(list(self._streams.get(trajectory, ())), None)

    async def cancel_all(self, why: VenusError) -> None:
        """Ends every stream; its caller is told why."""
        await self._end([stream for streams in self._streams.values() for stream in streams], why)

    async def _end(self, streams: list[_Stream], why: VenusError | None) -> None:
        for stream in streams:
            stream.end(why)
        waits = [asyncio.ensure_future(stream.ended.wait()) for stream in streams]
        if waits:
            await asyncio.wait(waits, timeout=LAST_WORD_S)
        for stream in streams:
            if not stream.ended.is_set():
                stream.task.cancel()
        for wait in waits:
            await wait

    async def __call__(self, scope, receive, send) -> None:
        http = HttpRequest(scope, receive)
        if http.method != "POST":
            return await answer(405, "use POST")(scope, receive, send)
        try:
            fields = await _parsed(await body_of(http, LONGEST_BODY))
            self._check(http)
        except Gone:
            return  # nobody is there to be answered
        except VenusError as error:
            return await answer(status_of(error), error)(scope, receive, send)
        request = Request(**dict(fields))
        stream = _Stream(asyncio.get_running_loop().create_future(), asyncio.Event(), asyncio.current_task())
        listening = asyncio.ensure_future(_end_with_caller(receive, stream))
        self._streams.setdefault(request.trajectory, []).append(stream)
        begun = False

        async def line(fields: dict | None) -> None:
            nonlocal begun
            if not begun:
                headers = [(b"content-type", b"application/x-ndjson")]
                begun = True
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            body = b"\n" if fields is None else json.dumps(fields).encode() + b"\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        failure: VenusError | None = None
        try:
            async with contextlib.aclosing(self._worker.generate(request)) as chunks:
                async for chunk in _until(stream.gone, chunks, self._beat_s):
                    await line(None if chunk is None else dataclasses.asdict(chunk))
            failure = stream.gone.result() if stream.gone.done() else None
        except VenusError as error:
            failure = error
        finally:
            listening.cancel()
            stream.ended.set()
            streams = self._streams[request.trajectory]
            streams.remove(stream)
            if not streams:
                del self._streams[request.trajectory]
        if failure is not None and not begun:
            return await answer(status_of(failure), failure)(scope, receive, send)
        if failure is not None:
            status = status_of(failure)
            await line({**told(status, failure), "status": status})
        if not begun:
            return await answer(499, "the request was cancelled before it began")(scope, receive, send)
        await send({"type": "http.response.body", "body": b""})


async def _parsed(data: bytes) -> GenerateBody:
    return await asyncio.to_thread(parse, GenerateBody, data) if len(data) > 2**16 else parse(GenerateBody, data)


async def _until(gone: asyncio.Future, chunks, beat_s: float):
    """Items of `chunks` until they or the caller end; None whenever there was none for `beat_s` seconds."""
    while True:
        item = asyncio.ensure_future(anext(chunks))
        try:
            while not (item.done() or gone.done()):
                done, _ = await asyncio.wait({item, gone}, timeout=beat_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    yield None
        finally:
            if not item.done():
                item.cancel()
                await asyncio.wait({item})
        if item.cancelled():
            return
        try:
            yield item.result()
        except StopAsyncIteration:
            return


async def _end_with_caller(receive, stream: _Stream) -> None:
    await hang_up(receive)
    stream.end(None)

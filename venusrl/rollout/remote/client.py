"""A worker in another process, by its address. Whether it is there is presence.py's business; what it does is here."""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from urllib.parse import quote

import httpx

from venusrl.core.clock import Clock
from venusrl.core.errors import ConfigError, ContractError, VenusError, WorkerError
from venusrl.rollout.remote.presence import ATTEMPTS, GOODBYE_S, Presence, Tenure
from venusrl.rollout.remote.wire import BEAT_S, SESSION_HEADER, Applied, ChunkAnswer, Description, Taken, parse
from venusrl.rollout.worker import Chunk, Load, Request

LONG = 2**13  # tokens of a context, above which it is written in a thread
AT_ONCE = 1024  # trajectories of a call that has many; far below the longest body
SILENCE_S = 6 * BEAT_S  # of a stream, after which its connection counts as broken


class RemoteWorker(Presence):
    """See venusrl.rollout.worker.Worker."""

    def __init__(
        self,
        address: str,
        write_weights: Callable[[Any], bytes],
        run: str = "",
        key: str = "",
        reconnect_s: float = 10.0,
        max_length: int = 0,
        clock: Clock | None = None,
        model: Mapping[str, Any] | None = None,
    ):
        """Args:
        address: "http://HOST:PORT".
        write_weights: from parameters to the bytes of a safetensors file.
        run: in whose name the worker is claimed; "" claims nothing, and is refused where somebody has.
        key: sent as a bearer token; "" sends none.
        reconnect_s: seconds for which requests wait for a worker that does not answer.
        max_length: tokens of the sequences that it will be asked for, to be known before it answers.
        model: what of the model no weights tell; see server.Codec.
        """
        super().__init__(address, run, key, reconnect_s, max_length, clock, model)
        self._write_weights = write_weights
        self._streaming: set[str] = set()
        self._resets = 0

    async def start(self, patient: bool = False) -> None:
        await super().start(patient)
        self._tasks.insert(0, self._keep_up(self._tell()))

    # Requests

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        if request.trajectory in self._streaming:
            raise ContractError(f"trajectory {request.trajectory} already has a request on {self.name}")
        tenure = self._present()
        self._streaming.add(request.trajectory)
        ended = False
        try:
            async with contextlib.aclosing(self._turn(tenure, request)) as chunks:
                async for chunk in chunks:
                    ended = chunk.stop is not None
                    yield chunk
        except VenusError:
            ended = True
            raise
        finally:
            if not ended:
                await self._cancel(tenure, request.trajectory)
            self._streaming.discard(request.trajectory)

    async def _turn(self, tenure: Tenure, request: Request) -> AsyncIterator[Chunk]:
        """The chunks; where the connection breaks before the first one, over several attempts. Where it breaks later,
        the turn ends as preempted: what is left is another request."""
        for attempt in range(ATTEMPTS):
            await self._unless_gone(tenure, tenure.said.join())  # its priority is known there before it is
            await self._unless_gone(tenure, tenure.ready.wait())
            version, resets = tenure.version, self._resets
            items: asyncio.Queue = asyncio.Queue()
            http = self._fresh if attempt else self._client  # a kept connection may be one that is just being closed
            reader = asyncio.create_task(self._read(http or self._client, tenure, request, items))
            tenure.gone.add_done_callback(tell := lambda _, items=items: items.put_nowait(self._gone()))
            begun = False
            try:
                while True:
                    try:
                        async with asyncio.timeout(SILENCE_S):
                            item = await items.get()
                    except TimeoutError:
                        if tenure.told.is_set():
                            raise
                        item = None  # the worker does not answer anybody
                    if isinstance(item, Exception):
                        raise item
                    if item is None:
                        continue
                    if resets != self._resets:
                        raise WorkerError(f"request of {request.trajectory}: {self.name} was reset")
                    self._check_version(tenure, version, item)
                    version, begun = item.version, begun or bool(item.tokens)
                    yield item
                    if item.stop is not None:
                        return
            except (httpx.HTTPError, TimeoutError) as error:
                broken = error
            finally:
                tenure.gone.remove_done_callback(tell)
                reader.cancel()
                await asyncio.wait({reader})
            await self._broken(tenure, broken)
            await self._unless_gone(tenure, tenure.told.wait())
            await self._cancel(tenure, request.trajectory)
            if begun:
                yield Chunk([], [], version, "preempted")
                return
        self._lose(tenure, f"its connection broke {ATTEMPTS} times before an answer")
        raise self._gone()

    async def _read(self, http: httpx.AsyncClient, tenure: Tenure, request: Request, items: asyncio.Queue) -> None:
        """Puts chunks into `items`, None for a sign of life, and at last what ended them, if it was no last chunk."""
        headers = {SESSION_HEADER: tenure.session}
        try:
            call = http.stream("POST", "/generate", content=await _body(request), headers=headers)
            async with call as answer:
                if answer.status_code != 200:
                    raise self._refused(tenure, answer.status_code, (await answer.aread()).decode(errors="replace"))
                async for line in answer.aiter_lines():
                    said = parse(ChunkAnswer, line) if line else None
                    if said is not None and said.error is not None:
                        raise self._refused(tenure, said.status, line)
                    items.put_nowait(None if said is None else said.chunk())
            raise httpx.RemoteProtocolError("its answer ended before its time")  # of no use after a last chunk
        except Exception as error:  # noqa: BLE001 - whatever it is, the turn that waits here has to hear of it
            items.put_nowait(error)

    def _check_version(self, tenure: Tenure, least: int, chunk: Chunk) -> None:
        """Raises WorkerLost where it has other weights than it was given: nothing it says can be used."""
        most = max(tenure.version, tenure.version if tenure.sent is None else tenure.sent)
        if not least <= chunk.version <= most:
            given = least if least == most else f"{least} to {most}"
            self._lose(tenure, f"it answers with weights of version {chunk.version}; it was given {given}")
            raise self._gone()

    async def _cancel(self, tenure: Tenure, trajectory: str) -> None:
        """Its slot is free when this returns, unless the worker does not answer."""
        if tenure.gone.done() or not tenure.told.is_set():
            return
        with contextlib.suppress(httpx.HTTPError, TimeoutError, VenusError):
            async with asyncio.timeout(GOODBYE_S):
                await self._send("POST", "/cancel", tenure, json={"trajectory": trajectory})

    async def preempt(self, trajectory: str) -> None:
        await self._call("POST", "/preempt", json={"trajectory": trajectory})

    def prioritise(self, trajectory: str, priority: int, resident: bool) -> None:
        self._say(trajectory, {"trajectory": trajectory, "priority": priority, "resident": resident})

    async def release(self, trajectory: str) -> None:
        """Does not wait for the worker: it hears of it before the next request."""
        self._say(trajectory, None)

    def _say(self, trajectory: str, order: dict[str, Any] | None) -> None:
        if self._tenure is not None and not self._tenure.gone.done():
            self._tenure.said.put_nowait((trajectory, order))

    async def _tell(self) -> None:
        """Passes on what `prioritise` and `release` have to say: all that there is, in a call each."""
        while True:
            await self._met.wait()
            tenure = self._tenure
            with contextlib.suppress(WorkerError):
                while True:
                    said = [await self._unless_gone(tenure, tenure.said.get())]
                    while not tenure.said.empty():
                        said.append(tenure.said.get_nowait())
                    released, orders = last_words(said)
                    try:
                        await self._pass_on(tenure, "/release", "trajectories", released)
                        await self._pass_on(tenure, "/prioritise", "orders", orders)
                    finally:
                        for _ in said:
                            tenure.said.task_done()

    async def _pass_on(self, tenure: Tenure, path: str, field: str, items: list) -> None:
        for begin in range(0, len(items), AT_ONCE):
            part = items[begin : begin + AT_ONCE]
            try:
                await self._call("POST", path, tenure, content=_json({field: part}))
            except ContractError as error:
                if len(part) == 1:
                    logging.warning("worker %s: %s", self.name, error)
                    continue
                for item in part:  # one that is refused keeps back no other
                    await self._pass_on(tenure, path, field, [item])

    # KV and weights

    async def export_kv(self, trajectory: str) -> bytes | None:
        answer = await self._call("GET", f"/kv/{quote(trajectory)}")
        return answer.content if answer.status_code == 200 else None

    async def import_kv(self, prefix: bytes | None) -> int:
        if prefix is None:
            return 0
        return parse(Taken, (await self._call("PUT", "/kv", content=prefix)).content).tokens

    async def update_weights(self, params: Any, version: int) -> None:
        """Raises WorkerLost where it does not answer: others do not wait for it, and it gets them when it is back."""
        tenure = self._present()
        data = await asyncio.to_thread(self._write_weights, params)
        tenure.updates += 1
        try:
            self._give_up_on_updates(tenure)
            async with tenure.updating:
                tenure.sent = version
                answer = await self._call("PUT", f"/weights/{version}", tenure, content=data)
                has = parse(Applied, answer.content).version
                if has != version:
                    self._lose(tenure, f"it was given weights of version {version} and has {has}")
                    raise self._gone()
                tenure.version = version
        finally:
            tenure.updates -= 1

    async def reset(self) -> None:
        """For a client whose versions begin anew. Between two runs the worker's process sees to it by itself."""
        tenure = self._present()
        self._resets += 1
        tenure.updates += 1  # what it says of its weights meanwhile is of before
        try:
            async with tenure.updating:
                tenure.version = parse(Applied, (await self._call("POST", "/reset", tenure)).content).version
                tenure.sent = None
        finally:
            tenure.updates -= 1

    def load(self) -> Load:
        """As of a moment ago."""
        return self._load

    async def refresh(self) -> Load:
        """As of now."""
        info = parse(Description, (await self._call("GET", "/info")).content)
        self._load = Load(**info.load)
        return self._load


def last_words(said: list[tuple[str, dict | None]]) -> tuple[list[str], list[dict]]:
    """(trajectories to be released, then orders): what remains of what was said in this order. Trajectories know
    nothing of one another; of one, a release takes back every order before it, and the last order those before."""
    released: dict[str, None] = {}
    orders: dict[str, dict] = {}
    for trajectory, order in said:
        orders.pop(trajectory, None)
        if order is None:
            released[trajectory] = None
        else:
            orders[trajectory] = order
    return list(released), list(orders.values())


async def _body(request: Request) -> bytes:
    """In JSON; of a long one in a thread. Not by `asdict`, which copies id by id: 100 ms for 131,072."""
    fields = dict(vars(request))
    return await asyncio.to_thread(_json, fields) if len(request.tokens) > LONG else _json(fields)


def _json(fields: dict[str, Any]) -> bytes:
    """ASCII: what is no text is refused by the worker, by name."""
    return json.dumps(fields).encode()


def check_addresses(addresses: tuple[str, ...], reconnect_s: float) -> None:
    """Raises ConfigError where RemoteWorker could not be made of them."""
    for address in addresses:
        try:
            url = httpx.URL(address)
            right = url.scheme in ("http", "https") and bool(url.host) and url.path in ("", "/") and not url.query
            right = right and 0 < (url.port or 80) < 2**16
        except (httpx.InvalidURL, TypeError):
            right = False
        if not right:
            raise ConfigError(f"rollout.addresses has {address!r}; give addresses like 'http://HOST:PORT'")
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"rollout.addresses={addresses} names a worker twice; name each once")
    if not (math.isfinite(reconnect_s) and reconnect_s >= 0):
        raise ConfigError(f"rollout.reconnect_s={reconnect_s}; give seconds, 0 or more")

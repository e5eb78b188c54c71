"""Whether a worker in another process is there, and calls to it.

A worker that does not answer is waited for, `reconnect_s` seconds at most; then whoever waits is told that it is lost
(WorkerLost). It is asked further on, and joins again when it answers. See link.py and lease.py.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Self, TypeVar

import httpx

from venusrl.core.calls import client
from venusrl.core.clock import Clock, WallClock
from venusrl.core.errors import ConfigError, ContractError, VenusError, WorkerError, WorkerLost
from venusrl.rollout.remote.answers import error_of
from venusrl.rollout.remote.lease import Held
from venusrl.rollout.remote.link import Link, State
from venusrl.rollout.remote.wire import SESSION_HEADER, Description, parse
from venusrl.rollout.worker import Load

PROBE_S = 5.0  # until an answer to "are you there" counts as none
PROBE_EVERY_S = 1.0
LEAST_PROBE_S = 0.5
LONGEST_BACKOFF_S = 30.0  # between attempts at a worker that answers and cannot be used
CONNECT_S = 3.0
GOODBYE_S = 2.0  # for what is said on the way out: cancelling a request, giving up the lease
ATTEMPTS = 3  # at a call whose connection breaks while the worker answers others
IDLE_S = 2.0  # for which an idle connection is kept; far below what servers do, see core.listening.KEEP_ALIVE_S

NOBODY_LISTENS = "nobody listens there"

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Tenure:
    """From the moment at which the worker answers until it is lost.

    Attributes:
      session: the word under which the worker knows it.
      gone: done, with the reason, when it ends.
      ready: set while requests may be sent.
      told: set while anything may be sent.
      said: what `prioritise` and `release` have to tell, in order: (trajectory, its order, None where it has ended).
      version: of the weights that the worker has.
      sent: the version that was last sent; None where nothing was.
      updates: under way.
      updating: held by one of them.
    """

    session: str
    gone: asyncio.Future
    ready: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    told: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    said: asyncio.Queue = dataclasses.field(default_factory=asyncio.Queue)
    version: int = 0
    sent: int | None = None
    updates: int = 0
    updating: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    @property
    def settled(self) -> bool:
        """Whether it has weights of this run, and no others are on their way."""
        return self.sent is not None and not self.updates


class Presence:
    """A worker's place in a run: away, joining, connected or unreachable.

    Attributes:
      address, name: "http://HOST:PORT".
      slots, max_length, kv_tokens: see venusrl.rollout.worker.Worker; known once it has answered.
      version: of the weights that it has, as far as is known.
      welcome: awaited when it answers, to give it weights and then requests; without it, it is used as it is.
      farewell: called at once when it is lost, before its requests hear of it.
      ended: a defect that ended the watch over it; it does not come back then, and `failure` says so.
    """

    def __init__(
        self,
        address: str,
        run: str,
        key: str,
        reconnect_s: float,
        max_length: int,
        clock: Clock | None,
        model: Mapping[str, Any] | None = None,
    ):
        """See RemoteWorker."""
        self._model = dict(model or {})
        self._their_model: Mapping[str, Any] = {}
        self.address = self.name = address
        self.max_length = max_length
        self.slots = self.kv_tokens = 0
        self.welcome: Callable[[Self], Awaitable[None]] | None = None
        self.farewell: Callable[[Self], None] | None = None
        self.ended: WorkerError | None = None
        self._run = run
        self._process = os.urandom(8).hex()
        self._key = key
        self._needed_length = max_length
        self._clock = clock or WallClock()
        self._link = Link(reconnect_s)
        self._http: httpx.AsyncClient | None = None  # keeps connections
        self._fresh: httpx.AsyncClient | None = None  # does not
        self._tenure: Tenure | None = None
        self._load = Load(0, 0, 0, 0, 0, 0.0)
        self._tasks: list[asyncio.Task] = []
        self._joining: asyncio.Task | None = None
        self._wake = asyncio.Event()
        self._probed = asyncio.Event()  # set, and replaced, after every probe
        self._met = asyncio.Event()  # there is a tenure
        self._refusals = 0  # in a row, of a worker that answers
        self._rest_until = 0.0  # seconds of the clock, until which such a one is not asked again
        self._complaint = ""  # the last that was logged

    @property
    def failure(self) -> WorkerError | None:
        if self._http is None or self._link.state is not State.AWAY:
            return None
        return self._gone()

    @property
    def version(self) -> int:
        return self._tenure.version if self._tenure else 0

    async def start(self, patient: bool = False) -> None:
        """Asks whether it is there; from then on it is watched.

        Args:
          patient: nobody there, or somebody else's, is no error: it joins when it can.

        Raises:
          WorkerError: nobody answers there, or it belongs to somebody else (not where `patient`).
          ConfigError, ContractError: it is of another model, or takes shorter sequences (not where `patient`).
        """
        limits = {"max_connections": None, "keepalive_expiry": IDLE_S}
        options: dict[str, Any] = {"timeout": httpx.Timeout(None, connect=CONNECT_S)}
        if self._key:
            options["headers"] = {"authorization": f"Bearer {self._key}"}
        self._http = client(self.address, limits=httpx.Limits(max_keepalive_connections=64, **limits), **options)
        self._fresh = client(self.address, limits=httpx.Limits(max_keepalive_connections=0, **limits), **options)
        await self._probe()
        if not patient:
            try:
                if self._link.state is State.AWAY:
                    raise WorkerError(f"worker {self.name}: {self._link.reason}")
                await self._join(self._tenure)
            except BaseException:  # whatever ends it, nothing stays open
                await self.close()
                raise
        self._wake.set()  # what answers joins at once
        self._tasks = [self._keep_up(self._watch())]

    def _keep_up(self, work: Coroutine[Any, Any, None]) -> asyncio.Task:
        """A task for as long as the client is open. Where it ends by a defect, the worker is lost for good: nobody is
        left to ask for it, or to pass on what is said."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._gave_up)
        return task

    def _gave_up(self, task: asyncio.Task) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        why = f"its client has failed: {error!r}"
        logging.error("worker %s is lost: %s", self.name, why, exc_info=error)
        self.ended = WorkerError(f"worker {self.name} is lost: {why}")
        self.ended.__cause__ = error
        for other in (*self._tasks, *([self._joining] if self._joining else [])):
            other.cancel()
        self._link.lost(why)
        self._changed()

    async def close(self) -> None:
        """Leaves the process as it is, and its lease to others. Within a few seconds, whatever the worker does."""
        tasks = [*self._tasks, *([self._joining] if self._joining else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        tenure, self._tenure = self._tenure, None
        http, fresh, self._http, self._fresh = self._http, self._fresh, None, None
        if tenure is not None and not tenure.gone.done():
            tenure.gone.set_result(f"worker {self.name} is closed")
            if self._run and self._link.state is not State.UNREACHABLE:
                with contextlib.suppress(httpx.HTTPError, TimeoutError):
                    async with asyncio.timeout(GOODBYE_S):
                        await fresh.request("DELETE", "/lease", headers={SESSION_HEADER: tenure.session})
        for each in (http, fresh):
            if each is not None:
                await each.aclose()

    # Calls

    @property
    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            raise self._gone()
        return self._http

    def _present(self) -> Tenure:
        if self._http is None or self._tenure is None or self._tenure.gone.done():
            raise self._gone()
        return self._tenure

    async def _call(self, method: str, path: str, tenure: Tenure | None = None, **options) -> httpx.Response:
        """Every call of this kind may be made twice."""
        tenure = tenure or self._present()
        for _ in range(ATTEMPTS):
            await self._unless_gone(tenure, tenure.told.wait())
            try:
                answer = await self._unless_gone(tenure, self._send(method, path, tenure, **options))
            except httpx.HTTPError as error:
                await self._broken(tenure, error)
                continue
            if answer.status_code >= 400:
                raise self._refused(tenure, answer.status_code, answer.text)
            return answer
        self._lose(tenure, f"its connection broke {ATTEMPTS} times at {method} {path}")
        raise self._gone()

    async def _send(self, method: str, path: str, tenure: Tenure, **options) -> httpx.Response:
        """Once more on a fresh connection where a kept one breaks: the other side may just have closed it."""
        headers = {SESSION_HEADER: tenure.session}
        try:
            return await self._client.request(method, path, headers=headers, **options)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            if self._fresh is None:
                raise
            return await self._fresh.request(method, path, headers=headers, **options)

    async def _unless_gone(self, tenure: Tenure, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives.

        Raises:
          WorkerLost: the worker is lost first; `work` is cancelled.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, tenure.gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise self._gone()
        return task.result()

    def _refused(self, tenure: Tenure, status: int, text: str) -> VenusError:
        """What is raised for an answer that is no success."""
        error = error_of(status, text)
        if isinstance(error, Held):
            self._lose(tenure, str(error))
            return self._gone()
        return error

    def _gone(self) -> WorkerError:
        """What those hear who wait for it."""
        if self._http is None:
            return WorkerError(f"worker {self.name} is closed")
        return WorkerLost(f"worker {self.name} is lost: {self._link.reason}")

    # Whether it is there

    async def _broken(self, tenure: Tenure, error: Exception) -> None:
        """A connection has broken: asks whether the worker is there. Where nobody listens any more, nothing is to be
        waited for."""
        if _refused_connection(error):
            self._lose(tenure, NOBODY_LISTENS)
            return
        probed = self._probed
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_EVERY_S + PROBE_S):
                await self._unless_gone(tenure, probed.wait())

    def _lose(self, tenure: Tenure, why: str) -> None:
        if tenure is self._tenure and not tenure.gone.done():
            self._link.lost(why)
            self._changed()

    def _give_up_on_updates(self, tenure: Tenure) -> None:
        if tenure.updates and self._link.state is State.UNREACHABLE:
            self._link.lost(f"{self._link.reason}, and there are new weights")
            self._changed()

    def _changed(self) -> None:
        """Carries out what the link says."""
        tenure, state = self._tenure, self._link.state
        if tenure is None or tenure.gone.done():
            return
        if state is State.UNREACHABLE:
            if tenure.told.is_set():
                logging.warning("worker %s does not answer: %s", self.name, self._link.reason)
            tenure.ready.clear()
            tenure.told.clear()
            self._give_up_on_updates(tenure)
        elif state is State.AWAY:
            self._complain()
            self._met.clear()
            try:
                if self.farewell is not None:
                    self.farewell(self)
            except Exception:  # whatever it raises, those who wait hear that the worker is lost
                self._back_off()
                logging.exception("worker %s: saying that it is lost has failed", self.name)
            tenure.gone.set_result(self._link.reason)
        else:
            tenure.told.set()
            if state is State.CONNECTED:
                tenure.ready.set()

    async def _watch(self) -> None:
        """Asks for ever whether it is there, and lets it join when it is."""
        while True:
            wait_s = PROBE_EVERY_S
            if self._rest_s > 0:
                wait_s = self._rest_s
            elif self._link.state is State.UNREACHABLE:
                wait_s = min(wait_s, self._link.left(self._clock.now()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            self._wake.clear()
            if self._rest_s > 0:
                continue  # it was turned away meanwhile
            try:
                await self._probe()
            except Exception as error:  # noqa: BLE001 - whatever it is, the worker is not used, and asked again later
                self._turn_away(self._tenure, error, "asking for it")
            self._probed.set()
            self._probed = asyncio.Event()
            if self._link.state is State.JOINING and (self._joining is None or self._joining.done()):
                self._joining = asyncio.create_task(self._try_to_join(self._tenure))

    @property
    def _rest_s(self) -> float:
        """Seconds for which a worker that was turned away is not asked again."""
        return self._rest_until - self._clock.now() if self._link.state is State.AWAY and self._refusals else 0.0

    def _back_off(self) -> None:
        self._refusals += 1
        rest_s = min(LONGEST_BACKOFF_S, PROBE_EVERY_S * 2 ** min(self._refusals, 10))
        self._rest_until = self._clock.now() + rest_s

    async def _probe(self) -> None:
        """One question, which renews the lease too."""
        away, began, tenure = self._link.state is State.AWAY, self._clock.now(), self._tenure
        session = os.urandom(8).hex() if away else tenure.session
        settled, patience = not away and tenure.settled, PROBE_S
        if self._link.state is State.UNREACHABLE:
            patience = min(PROBE_S, max(LEAST_PROBE_S, self._link.left(began)))
        try:
            async with asyncio.timeout(patience):
                answer = await self._ask(session, away)
        except (httpx.HTTPError, TimeoutError) as error:
            now, late = self._clock.now(), isinstance(error, TimeoutError)
            if late and now - began > 2 * patience + LEAST_PROBE_S:
                return  # it is this process that stood still; ask again
            if _refused_connection(error):
                self._link.lost(NOBODY_LISTENS)
            else:
                self._link.silent(now, f"no answer for {patience:.0f} s" if late else repr(error), began)
        else:
            if not away and self._link.state is State.AWAY:
                return  # lost meanwhile: the answer is about what was
            if answer.status_code != 200:
                self._link.lost(str(error_of(answer.status_code, answer.text)))
            else:
                self._heard(answer, session, away, settled)
        if self._link.state is State.AWAY:
            self._complain()
        self._changed()

    async def _ask(self, session: str, start: bool) -> httpx.Response:
        call: tuple[str, str] = ("GET", "/info") if not self._run else ("POST", "/lease")
        claim = {"run": self._run, "process": self._process, "session": session, "start": start}
        body = {"json": {**claim, "first": self._tenure is None}} if self._run else {}
        try:
            return await self._client.request(*call, **body)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            return await self._fresh.request(*call, **body)

    def _heard(self, answer: httpx.Response, session: str, away: bool, settled: bool) -> None:
        """Args:
        away: it was not there when it was asked.
        settled: it had weights of this run then.
        """
        try:
            info = parse(Description, answer.content)
            load = Load(**info.load)
        except (ContractError, TypeError) as error:
            return self._link.lost(f"what answers there is no worker of this release ({error})")
        if info.failure is not None:
            return self._link.lost(info.failure)
        self._load = load
        if away:
            self._tenure = Tenure(session if self._run else "", asyncio.get_running_loop().create_future())
            self._tenure.version = info.version
            self.slots, self.max_length, self.kv_tokens = info.slots, info.max_length, info.kv_tokens
            self._their_model = info.model
            self._met.set()
        elif settled and self._tenure.settled and self._run and info.weights_of != session:
            return self._link.lost("it has weights that this run did not give it")
        self._link.answered(info.instance)

    async def _try_to_join(self, tenure: Tenure) -> None:
        try:
            await self._join(tenure)
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker is not used, and asked again later
            if not (isinstance(error, WorkerLost) and tenure.gone.done()):  # else it is said already
                self._turn_away(tenure, error, "giving it its weights")
        else:
            if self._complaint:
                logging.warning("worker %s takes requests", self.name)
            self._complaint, self._refusals = "", 0

    def _turn_away(self, tenure: Tenure | None, error: Exception, what: str) -> None:
        """It is not used because of `error`; the more often that is, the later it is asked again."""
        why = str(error) if isinstance(error, VenusError) else f"{what} failed: {error!r}"
        if not isinstance(error, VenusError) and why != self._complaint:
            logging.error("worker %s: %s", self.name, why, exc_info=error)
        self._back_off()
        if tenure is None or (tenure is self._tenure and tenure.gone.done()):
            self._link.lost(why)
            self._complain()
        else:
            self._lose(tenure, why)

    async def _join(self, tenure: Tenure) -> None:
        if self.max_length < self._needed_length:
            raise ContractError(
                f"worker {self.name} takes sequences of {self.max_length} tokens, this run has "
                f"{self._needed_length}; start it with the same rollout.max_length"
            )
        ours, theirs = self._model, self._their_model
        differ = [
            f"{name}={theirs[name]!r} (here {ours[name]!r})"
            for name in ours
            if theirs.get(name, ours[name]) != ours[name]
        ]
        if differ:
            raise ConfigError(f"worker {self.name} has another model: {', '.join(differ)}; start it with this one")
        self.max_length = self._needed_length or self.max_length
        if self.welcome is not None:
            await self.welcome(self)
        self._link.joined()
        self._changed()

    def _complain(self) -> None:
        """Says once why it is not used."""
        if self._link.reason != self._complaint and self._tasks:
            self._complaint = self._link.reason
            logging.warning("worker %s is not used: %s", self.name, self._complaint)


def _refused_connection(error: BaseException | None) -> bool:
    """Whether nobody listens at the address."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError):
            return True
        if isinstance(error, BaseExceptionGroup):
            return all(_refused_connection(e) for e in error.exceptions)
        error = error.__cause__ or error.__context__
    return False

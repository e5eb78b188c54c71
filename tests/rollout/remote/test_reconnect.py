"""A worker whose connection breaks, that freezes, is started again or changes hands."""

import asyncio
import contextlib
import time

import httpx
import pytest

from tests.rollout.remote.wires import PROMPT, SCRIPT, serving, until, write
from tests.rollout.worker_suite import collect, tokens
from venusrl.core.errors import ConfigError, VenusError, WorkerError, WorkerLost
from venusrl.core.listening import KEEP_ALIVE_S
from venusrl.rollout.remote import client as client_module
from venusrl.rollout.remote import presence
from venusrl.rollout.remote.client import RemoteWorker, check_addresses
from venusrl.rollout.remote.lease import LEASE_S
from venusrl.rollout.remote.link import State
from venusrl.rollout.remote.presence import PROBE_S
from venusrl.rollout.worker import Request


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    """Tenths of seconds in place of seconds."""
    for name, seconds in dict(PROBE_S=0.3, PROBE_EVERY_S=0.05, LEAST_PROBE_S=0.1, GOODBYE_S=0.3).items():
        monkeypatch.setattr(presence, name, seconds)
    monkeypatch.setattr(client_module, "SILENCE_S", 0.6)
    monkeypatch.setattr(client_module, "GOODBYE_S", 0.3)


def request(name: str = "g0/0", seed: int = 1, **options) -> Request:
    return Request(name, list(PROMPT), 64, seed=seed, **options)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    made = []
    while not made or made[-1] != SCRIPT.tokenizer.im_end:
        made.append(SCRIPT.next_token([*PROMPT, *made], 1))
    return made


class Home:
    """What a rollout service does for a worker: gives it weights when it answers, and notes when it is lost."""

    def __init__(self, client: RemoteWorker, version: int = 5):
        self.version, self.joins, self.losses, self.failed = version, 0, 0, None
        self._client = client
        client.welcome, client.farewell = self.welcome, self.farewell

    async def welcome(self, worker):
        await worker.update_weights({"version": self.version}, self.version)
        self.joins += 1

    def farewell(self, worker):
        assert worker.failure is not None
        self.losses += 1


@contextlib.asynccontextmanager
async def at_home(served, **options):
    client = served.client(**options)
    home = Home(client)
    await client.start(patient=True)
    try:
        await until(lambda: home.joins)
        yield client, home
    finally:
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < 5


# Connections


def test_the_client_lets_go_of_idle_connections_long_before_a_server_does():
    """Both at 5 s, 15 of 150 clients took a healthy worker for lost after 5.0 s idle. 5 s is uvicorn's default."""
    assert presence.IDLE_S < 5 / 2 < KEEP_ALIVE_S / 2


def test_a_lease_outlives_an_answer_that_does_not_come():
    assert presence.PROBE_EVERY_S + 2 * PROBE_S < LEASE_S


async def test_calls_over_a_connection_that_the_server_is_closing_are_made_again():
    async with serving() as served, at_home(served) as (client, home):
        served.wire.mode = "once"
        for k in range(30):
            await client.preempt("nobody")
            await client.refresh()
            await client.release(f"g{k}/0")
            assert await client.export_kv("nobody") is None
        assert tokens(await collect(client, request()))[-1] == SCRIPT.tokenizer.im_end
        await client.update_weights({}, 6)
        assert client.failure is None and home.losses == 0 and home.joins == 1
        assert "g29/0" in served.worker.released


async def test_a_request_whose_connection_breaks_before_an_answer_is_made_again(expected):
    async with serving() as served, at_home(served) as (client, home):
        served.worker.gate.clear()
        turn = asyncio.create_task(collect(client, request()))
        await until(lambda: served.worker.running)
        served.wire.cut()
        await until(lambda: len(served.worker.requests) == 2)
        served.worker.gate.set()
        assert tokens(await turn) == expected and home.losses == 0


async def test_a_stream_that_breaks_ends_as_preempted_with_what_it_has(expected):
    """What is left is another request, here or elsewhere; nothing is generated twice."""
    async with serving() as served, at_home(served) as (client, home):
        got = []
        served.hold_after(2)
        async for chunk in client.generate(request()):
            got.append(chunk)
            if len(got) == 2:
                served.wire.cut()
        served.worker.gate.set()
        assert got[-1].stop == "preempted" and tokens(got) == expected[:4]
        await until(lambda: not served.worker.running)
        rest = await collect(client, Request("g0/0", [*PROMPT, *tokens(got)], 64, seed=1))
        assert tokens(got) + tokens(rest) == expected and home.losses == 0


async def test_a_stream_without_a_sign_of_life_counts_as_broken(expected, monkeypatch):
    """A connection that somebody on the way forgot: the worker answers others, and this one never."""
    monkeypatch.setattr(client_module, "ATTEMPTS", 1000)  # however slow this machine is
    async with serving() as served, at_home(served) as (client, home):
        monkeypatch.setattr(client_module, "SILENCE_S", 0.05)  # below what the server promises
        served.worker.gate.clear()
        turn = asyncio.create_task(collect(client, request()))
        await until(lambda: len(served.worker.requests) >= 2)
        monkeypatch.setattr(client_module, "SILENCE_S", 5.0)
        served.worker.gate.set()
        assert tokens(await turn) == expected and home.losses == 0


async def test_a_request_that_waits_long_for_its_turn_is_no_broken_one(expected):
    async with serving() as served, at_home(served) as (client, _home):
        served.worker.gate.clear()
        turn = asyncio.create_task(collect(client, request()))
        await asyncio.sleep(3 * client_module.SILENCE_S)
        served.worker.gate.set()
        assert tokens(await turn) == expected and len(served.worker.requests) == 1


# Workers that go and come back


async def test_a_worker_that_freezes_for_less_than_reconnect_s_keeps_its_requests(expected):
    async with serving() as served, at_home(served, reconnect_s=20.0) as (client, home):
        served.worker.gate.clear()
        turn = asyncio.create_task(collect(client, request()))
        await until(lambda: served.worker.running)
        served.wire.freeze()
        await until(lambda: client._link.state is State.UNREACHABLE)
        late = asyncio.create_task(collect(client, request("g0/1", seed=2)))  # waits, as the others do
        client.prioritise("g0/0", 3, True)
        await asyncio.sleep(0.3)
        assert client.failure is None and not late.done()
        served.wire.thaw()
        served.worker.gate.set()
        assert tokens(await turn) == expected and len(tokens(await late)) > 5
        assert (home.joins, home.losses) == (1, 0) and served.worker.standing == {"g0/0": (3, True)}


async def test_a_worker_that_freezes_for_longer_is_lost_and_joins_again_with_the_weights_of_the_day(expected):
    async with serving() as served, at_home(served) as (client, home):
        got = []
        served.hold_after(2)
        with pytest.raises(WorkerLost, match="no answer"):
            async for chunk in client.generate(request()):
                got.append(chunk)
                served.wire.freeze()
        served.worker.gate.set()
        assert home.losses == 1 and client.failure is not None
        with pytest.raises(WorkerLost):
            await collect(client, request("g0/1"))
        home.version = 9
        served.wire.thaw()
        await until(lambda: client.failure is None and home.joins == 2)
        await until(lambda: not served.worker.running)
        assert served.given[-1] == ({"version": 9}, 9) and client.version == 9
        rest = await collect(client, Request("g0/0", [*PROMPT, *tokens(got)], 64, seed=1))
        assert tokens(got) + tokens(rest) == expected
        assert {chunk.version for chunk in rest} == {9}


async def test_a_worker_that_is_started_again_gets_weights_before_requests(expected):
    """The new process has the weights that it began with, and the same address."""
    async with serving() as served, at_home(served) as (client, home):
        first = await collect(client, request())
        assert {chunk.version for chunk in first} == {5}
        home.version = 6
        await served.restart()
        await until(lambda: home.joins == 2)
        assert served.given == [({"version": 6}, 6)] and home.losses == 1
        assert {chunk.version for chunk in await collect(client, request())} == {6}


async def test_nobody_who_listens_is_known_at_once():
    """Not after `reconnect_s`: what would be waited for has ended."""
    async with serving() as served, at_home(served, reconnect_s=60.0) as (client, home):
        served.worker.gate.clear()
        turn = asyncio.create_task(collect(client, request()))
        await until(lambda: served.worker.running)
        await served.wire.refuse()
        with pytest.raises(WorkerLost, match="nobody listens"):
            await asyncio.wait_for(turn, 5)
        await served.wire.open()
        served.worker.gate.set()
        await until(lambda: home.joins == 2)


async def test_a_worker_that_comes_late_joins():
    async with serving() as served:
        await served.wire.refuse()
        client = served.client()
        home = Home(client)
        await client.start(patient=True)
        await asyncio.sleep(0.3)
        assert home.joins == 0 and "nobody listens" in str(client.failure)
        await served.wire.open()
        await until(lambda: home.joins == 1 and client.failure is None)
        assert len(await collect(client, request())) > 1
        await client.close()


async def test_an_update_does_not_wait_for_a_frozen_worker():
    """600 s, once. It has the weights of the day when it is back."""
    async with serving() as served, at_home(served, reconnect_s=60.0) as (client, home):
        served.wire.freeze()
        began = time.monotonic()
        home.version = 6
        with pytest.raises(WorkerLost, match="no answer"):
            await client.update_weights({"version": 6}, 6)
        assert time.monotonic() - began < 3
        served.wire.thaw()
        await until(lambda: home.joins == 2)
        assert served.worker.version == 6


async def test_closing_does_not_wait_for_a_frozen_worker():
    async with serving() as served, at_home(served, reconnect_s=60.0) as (client, _home):
        served.worker.gate.clear()
        turns = [asyncio.create_task(collect(client, request(f"g0/{i}", seed=i))) for i in range(4)]
        await until(lambda: len(served.worker.running) == 4)
        served.wire.freeze()
        began = time.monotonic()
        for turn in turns:
            turn.cancel()
        await asyncio.wait(turns)
        await client.release("g0/0")
        await client.close()
        assert time.monotonic() - began < 3
        served.worker.gate.set()


# Whose it is


class Hand:
    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


async def test_another_run_is_refused_and_told_who_has_the_worker_and_for_how_long():
    async with serving() as served, at_home(served, run="one@host:/runs/a") as (client, home):
        with pytest.raises(WorkerError, match=r"belongs to run one@host:/runs/a for 1[45] s more"):
            await served.client("another").start()
        async with httpx.AsyncClient(base_url=served.address) as anybody:
            for call in (
                anybody.put("/weights/7", content=b"{}"),
                anybody.post("/generate", json={"trajectory": "t", "tokens": [1], "max_tokens": 1}),
                anybody.post("/cancel", json={"trajectory": "g0/0"}),
                anybody.put("/kv", content=b"[]"),
                anybody.get("/kv/g0/0"),
            ):
                answer = await call
                assert answer.status_code == 409 and "one@host:/runs/a" in answer.json()["error"]["message"]
            assert (await anybody.get("/info")).json()["run"] == "one@host:/runs/a"
            assert "session" not in (await anybody.get("/info")).text
            assert (await anybody.get("/load")).status_code == 200
        assert served.worker.version == 5 and client.failure is None and home.losses == 0


async def test_a_worker_is_free_as_soon_as_its_run_is_over():
    async with serving() as served:
        async with at_home(served, run="one"):
            pass
        other = served.client("another")
        await other.start()
        await other.close()


async def test_a_run_that_stood_still_does_not_share_its_worker_with_the_one_that_took_it():
    """Its lease ran out, and another run has the worker: no token of the other's weights gets into its trajectories."""
    hand = Hand()
    async with serving(clock=hand) as served, at_home(served, run="one") as (client, home):
        served.worker.gate.clear()
        turn = asyncio.create_task(collect(client, request()))
        await until(lambda: served.worker.running)
        client._tasks[1].cancel()  # the first run stands still
        hand.time += LEASE_S + 1
        other = served.client("another")
        others = Home(other, version=5)
        await other.start()
        served.worker.gate.set()
        with pytest.raises(WorkerLost, match="taken over by run another"):
            await turn
        with pytest.raises(WorkerLost):
            await client.update_weights({}, 6)
        assert home.losses == 1 and served.worker.version == 5 and others.joins == 1
        assert len(await collect(other, request())) > 1
        await other.close()


async def test_weights_of_somebody_else_are_noticed_without_a_request():
    hand = Hand()
    async with serving(clock=hand) as served, at_home(served, run="one") as (_client, home):
        hand.time += LEASE_S + 1
        async with httpx.AsyncClient(base_url=served.address) as anybody:
            answer = await anybody.put("/weights/5", content=b"{}")
        if answer.status_code == 200:  # else the client was sooner
            await until(lambda: home.joins == 2)
            assert home.losses == 1 and served.given[-1] == ({"version": 5}, 5)


async def test_the_same_run_started_again_has_its_worker_at_once():
    """After kill -9 nobody has said goodbye; what the old process asked for is cancelled."""
    async with serving() as served, at_home(served, run="one") as (client, _home):
        served.worker.gate.clear()
        turn = asyncio.create_task(collect(client, request()))
        await until(lambda: served.worker.running)
        again = served.client("one")
        homes = Home(again, version=3)
        await again.start()
        served.worker.gate.set()
        with pytest.raises(WorkerLost):
            await turn
        assert homes.joins == 1 and served.worker.version == 3  # older than before: the run goes on from a checkpoint
        await asyncio.sleep(0.5)  # the old process, should it live, does not take it back
        assert {chunk.version for chunk in await collect(again, request())} == {3} and homes.losses == 0
        await again.close()


async def test_a_worker_with_other_weights_than_it_was_given_is_not_used():
    async with serving() as served, at_home(served) as (client, home):
        served.worker.version = 4  # behind the client's back
        with pytest.raises(WorkerLost, match="weights of version 4; it was given 5"):
            await collect(client, request())
        await until(lambda: home.joins == 2)
        assert {chunk.version for chunk in await collect(client, request())} == {5}
        take = served.worker.update_weights

        async def forget(params, version):
            await take(params, version - 1)

        served.worker.update_weights = forget
        with pytest.raises(WorkerLost, match="given weights of version 6 and has 5"):
            await client.update_weights({}, 6)


# What answers is anything


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b"[]", b"{}", b"\xff\xfe", b'{"failure": null}', b"[" * 100_000, b'{"failure": null, "load": 5}'],
    ids=lambda body: body[:20].hex(),
)
async def test_whatever_answers_at_an_address_ends_no_run(body):
    async def answer(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = RemoteWorker(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", write, "one")
    with pytest.raises(WorkerError, match="worker"):
        await client.start()
    client = RemoteWorker(client.address, write, "one")
    await client.start(patient=True)
    await asyncio.sleep(0.3)
    assert client.failure is not None and not client._tasks[1].done()
    await client.close()
    server.close()


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"5", b'{"tokens": 5}', b'{"version": "x"}', b"[" * 100_000, b"\xff"],
    ids=lambda x: x[:20].hex(),
)
async def test_an_answer_that_is_no_chunk_fails_its_request_only(line, monkeypatch):
    async def nonsense(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": line + b"\n"})

    async with serving() as served, at_home(served) as (client, _home):
        with monkeypatch.context() as patched:
            patched.setattr("venusrl.rollout.remote.streams.Generate.__call__", nonsense)
            with pytest.raises(VenusError):
                await collect(client, request())
        await until(lambda: client.failure is None)
        assert len(await collect(client, request())) > 1


async def test_the_key_goes_with_every_call():
    seen = []

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 21\r\n\r\n" + b'{"error": "no key!!"}')
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(WorkerError, match="no key!!"):
        await RemoteWorker(address, write, "one", key="s3cret").start()
    assert b"authorization: bearer s3cret" in seen[0].lower()
    server.close()


@pytest.mark.parametrize(
    "addresses, reconnect_s, says",
    [
        (("127.0.0.1:9001",), 1.0, "127.0.0.1:9001"),
        (("ftp://host:1",), 1.0, "ftp://host:1"),
        (("http://",), 1.0, "http://"),
        (("http://host:99999",), 1.0, "99999"),
        ((5,), 1.0, "5"),
        (("http://host:1/path",), 1.0, "path"),
        (("http://a:1", "http://a:1"), 1.0, "twice"),
        (("http://a:1",), -1.0, "reconnect_s=-1.0"),
        (("http://a:1",), float("nan"), "reconnect_s=nan"),
    ],
)
def test_addresses_that_are_none_are_refused_before_anything_starts(addresses, reconnect_s, says):
    with pytest.raises(ConfigError, match=says):
        check_addresses(addresses, reconnect_s)

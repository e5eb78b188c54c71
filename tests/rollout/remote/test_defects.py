"""What a client's tasks in the background run into: it is said, the worker is lost, and nobody waits for ever."""

import asyncio
import contextlib
import itertools

import pytest

from tests.rollout.remote.wires import PROMPT, serving, until
from tests.rollout.worker_suite import collect
from venusrl.core.errors import ConfigError, WorkerLost
from venusrl.rollout.remote import presence
from venusrl.rollout.remote.link import State
from venusrl.rollout.worker import Request


@pytest.fixture(autouse=True)
def _hasty(monkeypatch):
    """Hundredths of seconds in place of seconds."""
    for name, seconds in dict(PROBE_S=0.3, PROBE_EVERY_S=0.02, LEAST_PROBE_S=0.1, GOODBYE_S=0.3).items():
        monkeypatch.setattr(presence, name, seconds)


def request(name: str = "g0/0") -> Request:
    return Request(name, list(PROMPT), 64, seed=1)


@contextlib.asynccontextmanager
async def joined(served, welcome=None, farewell=None):
    async def give(worker):
        await worker.update_weights({"version": 5}, 5)

    client = served.client()
    client.welcome, client.farewell = welcome or give, farewell
    await client.start(patient=True)
    try:
        await until(lambda: welcome or client._link.state is State.CONNECTED)
        yield client
    finally:
        await client.close()


async def test_weights_that_cannot_be_written_turn_the_worker_away_with_the_reason_ever_more_rarely(caplog):
    """It was tried once a second for ever, and nobody heard why."""
    tried = []

    async def welcome(worker):
        tried.append(asyncio.get_running_loop().time())
        if len(tried) < 5:
            raise ValueError("a tensor of no type")
        await worker.update_weights({"version": 5}, 5)

    async with serving() as served, joined(served, welcome) as client:
        await until(lambda: tried)
        await until(lambda: client.failure is not None)
        with pytest.raises(WorkerLost, match="a tensor of no type"):
            await collect(client, request())
        await until(lambda: client._link.state is State.CONNECTED)
        waits = [b - a for a, b in itertools.pairwise(tried)]
        assert len(tried) == 5 and waits[-1] > 0.3 > waits[0]  # 2, 4, 8 and 16 times PROBE_EVERY_S
        assert caplog.text.count("is not used: giving it its weights failed: ValueError('a tensor of no type')") == 1
        assert len(await collect(client, request())) > 1


async def test_a_failed_goodbye_is_logged_and_those_who_wait_hear_that_the_worker_is_lost(caplog):
    def farewell(worker):
        raise ValueError("a defect of the service's")

    async with serving() as served, joined(served, farewell=farewell) as client:
        served.worker.gate.clear()
        turn = asyncio.create_task(collect(client, request()))
        await until(lambda: served.worker.running)
        await served.wire.refuse()
        with pytest.raises(WorkerLost, match="nobody listens"):
            await asyncio.wait_for(turn, 5)
        assert "a defect of the service's" in caplog.text
        served.worker.gate.set()
        await served.wire.open()
        await until(lambda: client._link.state is State.CONNECTED)  # the watch over it goes on


async def test_a_question_that_fails_by_a_defect_is_a_refusal_and_asked_again(caplog):
    async with serving() as served, joined(served) as client:
        ask = client._ask
        left = [2]

        async def fail(session, start):
            left[0] -= 1
            if left[0] >= 0:
                raise KeyError("no such header")
            return await ask(session, start)

        client._ask = fail
        await until(lambda: client.failure is not None)
        assert "no such header" in str(client.failure) and "is not used: asking for it failed" in caplog.text
        await until(lambda: client._link.state is State.CONNECTED)
        assert left[0] < 0 and len(await collect(client, request())) > 1


async def test_backing_off_has_an_end_however_often_a_worker_is_turned_away(monkeypatch):
    """1.0 * 2 ** 1024 is an OverflowError: after some hours it would have ended the watch."""
    monkeypatch.setattr(presence, "LONGEST_BACKOFF_S", 0.3)

    async def welcome(worker):
        if worker._refusals < 2000:
            worker._refusals = 2000
            raise ConfigError("for the test")
        await worker.update_weights({"version": 5}, 5)

    async with serving() as served, joined(served, welcome) as client:
        await until(lambda: client._link.state is State.CONNECTED)
        assert not any(task.done() for task in client._tasks)


@pytest.mark.parametrize("which", ["_tell", "_watch"])
async def test_a_task_that_ends_by_a_defect_loses_the_worker_for_good_and_says_so(which, caplog):
    """Turns waited for ever for what was to be said first."""
    async with serving() as served, joined(served) as client:
        lost = []
        client.farewell = lost.append
        served.worker.gate.clear()
        turn = asyncio.create_task(collect(client, request()))
        await until(lambda: served.worker.running)
        if which == "_tell":
            client.prioritise("g0/0", object(), True)  # cannot be written
        else:
            client._wake = None
        with pytest.raises(WorkerLost, match=r"its client has failed: (TypeError|AttributeError)"):
            await asyncio.wait_for(turn, 5)
        served.worker.gate.set()
        assert lost == [client] and client.ended is not None and "its client has failed" in caplog.text
        await asyncio.sleep(0.1)
        assert "its client has failed" in str(client.failure) and all(task.done() for task in client._tasks)
        with pytest.raises(WorkerLost, match="its client has failed"):
            await asyncio.wait_for(collect(client, request("g0/1")), 5)

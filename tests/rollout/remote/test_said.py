"""What a client tells its worker without waiting: orders and releases, together and in effect in their order."""

import json
import random
import threading

from tests.rollout.remote.wires import PROMPT, SCRIPT, serving, until
from tests.rollout.worker_suite import collect, tokens
from venusrl.rollout.remote import client as client_module
from venusrl.rollout.remote.client import last_words
from venusrl.rollout.remote.wire import GenerateBody, parse
from venusrl.rollout.worker import LONGEST_ID, Request


def order(trajectory: str, priority: int) -> dict:
    return {"trajectory": trajectory, "priority": priority, "resident": bool(priority % 2)}


def test_the_last_words_leave_a_worker_as_all_of_them_in_turn_would():
    for seed in range(300):
        rng = random.Random(seed)
        said = [
            (name, None if rng.random() < 0.3 else order(name, rng.randrange(100)))
            for name in rng.choices("abc", k=rng.randrange(12))
        ]
        before = {name: order(name, -1) for name in "abc"}
        one_by_one, together = dict(before), dict(before)
        for name, what in said:
            one_by_one.pop(name, None)
            if what is not None:
                one_by_one[name] = what
        released, orders = last_words(said)
        for name in released:
            together.pop(name)
        together |= {what["trajectory"]: what for what in orders}
        assert together == one_by_one, said
        assert set(released) == {name for name, what in said if what is None}
        assert len(released) == len(set(released)) and len(orders) == len({o["trajectory"] for o in orders})


async def test_what_is_said_before_a_turn_takes_few_calls_whatever_it_is():
    """A POST each, one after the other: 400 orders held up a turn by seconds."""
    async with serving(slots=4) as served:
        client = served.client()
        await client.start()
        calls = []
        send = client._send

        async def count(method, path, *args, **options):
            calls.append(path)
            return await send(method, path, *args, **options)

        client._send = count
        for k in range(2000):
            client.prioritise(f"g{k % 500}/0", k, True)
        for k in range(300):
            await client.release(f"g{k}/0")
        client.prioritise("g0/0", 7, False)
        assert tokens(await collect(client, Request("g0/0", list(PROMPT), 64, seed=1)))[-1] == SCRIPT.tokenizer.im_end
        assert len(calls) <= 6, calls
        expected = {f"g{k}/0": (1500 + k, True) for k in range(300, 500)} | {"g0/0": (7, False)}
        assert served.worker.standing == expected
        assert sorted(served.worker.released) == sorted(f"g{k}/0" for k in range(300))
        await client.close()


async def test_an_order_that_is_refused_keeps_back_no_other(caplog):
    async with serving() as served:
        client = served.client()
        await client.start()
        for name in ("a", "b" * (LONGEST_ID + 1), "half of \ud83d", "c"):
            client.prioritise(name, 1, True)
        await until(lambda: set(served.worker.standing) == {"a", "c"})
        await until(lambda: "orders.0.trajectory" in caplog.text)
        assert client.failure is None
        await client.close()


async def test_a_long_context_is_written_in_a_thread_and_comes_as_it_is(monkeypatch):
    threads, write = [], client_module._json
    monkeypatch.setattr(
        client_module, "_json", lambda fields: (threads.append(threading.current_thread()), write(fields))[1]
    )
    for length in (10, 131_072):
        request = Request("t", list(range(length)), 4, 0.5, 3, "who", 2)
        body = await client_module._body(request)
        assert Request(**dict(parse(GenerateBody, body))) == request and json.loads(body) == vars(request)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]

"""A stream whose caller does not read."""

import asyncio
import json

from tests.rollout.remote.wires import PROMPT, SCRIPT
from tests.rollout.scripted import ScriptedWorker
from venusrl.rollout.remote.lease import Held
from venusrl.rollout.remote.streams import Generate


async def test_a_caller_that_does_not_read_does_not_keep_the_worker_from_the_next_run():
    """What lies between is full, and whoever writes to it stands still."""
    worker = ScriptedWorker(SCRIPT)
    generate = Generate(worker, lambda http: None)
    written = asyncio.Event()
    body = json.dumps({"trajectory": "t", "tokens": list(PROMPT), "max_tokens": 64}).encode()
    parts = [{"type": "http.request", "body": body}]

    async def receive():
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message):
        written.set()
        await asyncio.Event().wait()

    scope = {"type": "http", "method": "POST", "headers": []}
    turn = asyncio.create_task(generate(scope, receive, send))
    await asyncio.wait_for(written.wait(), 5)
    await asyncio.wait_for(generate.cancel_all(Held("the worker was taken over")), 5)
    await asyncio.wait_for(asyncio.wait({turn}), 5)
    assert not worker.running and not generate._streams


async def test_a_caller_that_hangs_up_within_its_body_is_neither_served_nor_answered():
    worker, sent = ScriptedWorker(SCRIPT), []
    generate = Generate(worker, lambda http: None)
    parts = [{"type": "http.disconnect"}, {"type": "http.request", "body": b'{"trajectory"', "more_body": True}]

    async def receive():
        return parts.pop()

    async def send(message):
        sent.append(message)

    await generate({"type": "http", "method": "POST", "headers": []}, receive, send)
    assert sent == [] and not worker.requests

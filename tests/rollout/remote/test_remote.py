"""A worker behind HTTP keeps the Worker contract, and says what is wrong with a request that is."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import re
import struct
import time

import flax.linen as nn
import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save

from tests.rollout.test_workers import CONFIG, OPTIONS
from tests.rollout.worker_suite import WorkerSuite, collect, tokens
from venusrl.core.door import Door
from venusrl.core.errors import CheckpointError, ConfigError, ContractError, WorkerError
from venusrl.core.listening import Server, listen
from venusrl.models import hf
from venusrl.models.decoder import init_params
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.jax_worker import JaxWorker
from venusrl.rollout.engine.transfer import from_bytes, to_bytes
from venusrl.rollout.remote.client import RemoteWorker
from venusrl.rollout.remote.server import Codec, worker_app
from venusrl.rollout.remote.wire import SESSION_HEADER
from venusrl.rollout.worker import Request

STOP = (0, 21)


@pytest.fixture(scope="session")
def params():
    return [nn.unbox(init_params(CONFIG, jax.random.key(i))) for i in range(2)]


def codec_of(worker: JaxWorker) -> Codec:
    kv = worker._engine.kv_shape
    return Codec(lambda data: from_bytes(data, kv), to_bytes, lambda data: hf.from_bytes(data, CONFIG), kv.most_bytes)


@contextlib.asynccontextmanager
async def served(params, name="inner"):
    """A worker, its server in this process, and a client of it."""
    worker = JaxWorker(name, Engine(CONFIG, params, 4, STOP, OPTIONS))
    step = worker._engine.step
    worker._engine.step = lambda: (time.sleep(0.01), step())[1]  # a turn takes longer than a call
    await worker.start()
    codec = codec_of(worker)
    listener, address = listen("127.0.0.1", 0)
    server = Server(Door(worker_app(worker, codec)), listener, grace_s=1)
    task = asyncio.create_task(server.run())
    client = RemoteWorker(address, lambda params: hf.to_bytes(params, CONFIG), run="a run")
    await client.start()
    try:
        yield client, worker, server
    finally:
        await client.close()
        server.stop()
        await task
        await worker.close()


class Fresh(RemoteWorker):
    """Asks for its load whenever somebody does, so that the suite sees it as of now."""

    inner: JaxWorker

    def load(self):
        return self.inner.load()


class TestRemoteWorker(WorkerSuite):
    STOP = STOP

    @pytest.fixture
    async def worker(self, params):
        async with served(params[0]) as (client, inner, _):
            client.__class__ = Fresh
            client.inner = inner
            yield client

    @pytest.fixture
    def new_params(self, params):
        return params[1]


async def test_kv_moves_between_two_servers(params):
    context = [5, 6, 7, 8, 9, 1, 2, 3, 4, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    async with served(params[0], "a") as (a, _, _), served(params[0], "b") as (b, other, _):
        whole = tokens(await collect(a, Request("t/0", context, 6, 1.0, 5)))
        data = await a.export_kv("t/0")
        assert await b.import_kv(data) > len(context)
        again = Request("t/0", [*context, *whole], 6, 1.0, 5)
        assert tokens(await collect(a, again)) == tokens(await collect(b, again))
        assert other.load().prefilled_tokens == 0  # all of it came
        with pytest.raises(ContractError, match="damaged"):
            await b.import_kv(data[:-3])
        assert await a.export_kv("nobody") is None
        assert (await b.refresh()).moved_tokens == other.load().moved_tokens > 0
        text = (await b._client.get("/metrics")).text
        assert 'venusrl_worker_moved_tokens_total{worker="b"}' in text


BAD_REQUESTS = [
    (b"{", "JSON"),
    (b"", "JSON"),
    (b"[]", "object"),
    (b"[" * 100_000, "recursion limit"),
    (b"\xff\xfe\x00", "JSON"),
    (b'{"tokens": [1], "max_tokens": 4}', "trajectory: field required"),
    *(
        (b'{"trajectory": "t", "tokens": [1], "max_tokens": 4, %b}' % field, says)
        for field, says in [
            (b'"max_tokens": "many"', "max_tokens='many'"),
            (b'"max_tokens": true', "max_tokens=True"),
            (b'"max_tokens": 0', "max_tokens"),
            (b'"max_tokens": %d' % 2**70, "max_tokens"),
            (b'"max_tokens": ' + b"9" * 5000, "JSON"),
            (b'"tokens": [1, -1]', "tokens.1=-1"),
            (b'"tokens": [1, 1.5]', "tokens.1=1.5"),
            (b'"tokens": [1, %d]' % 2**63, "tokens.1"),
            (b'"tokens": []', "0 context tokens"),
            (b'"tokens": null', "tokens=None"),
            (b'"tokens": {}', "tokens={}"),
            (b'"temperature": NaN', "temperature=nan"),
            (b'"temperature": 1e400', "temperature=inf"),
            (b'"temperature": -1', "temperature=-1"),
            (b'"trajectory": "\\ud83d"', "JSON"),
            (b'"trajectory": {}', "trajectory={}"),
            (b'"trajectory": "%b"' % (b"x" * 5000), "trajectory"),
            (b'"namespace": null', "namespace=None"),
            (b'"seed": -1', "seed"),
            (b'"seed": %d' % 2**62, "seed"),
            (b'"sed": 1', "sed=1"),
        ]
    ),
]


async def test_bad_requests_are_answered_with_what_is_wrong(params):
    async with served(params[0]) as (client, inner, _):
        headers = {"venus-session": client._tenure.session}
        async with httpx.AsyncClient(base_url=client.address, headers=headers) as http:
            for body, says in BAD_REQUESTS:
                answer = await http.post("/generate", content=body)
                assert answer.status_code == 400 and says in answer.json()["error"]["message"], (body[:90], answer.text)
            for path in ("/cancel", "/preempt", "/prioritise", "/release", "/lease"):
                for body in (b"{", b"[]", b"{}", b'{"trajectory": 5, "priority": true, "run": []}', b"[" * 100_000):
                    assert (await http.post(path, content=body)).status_code == 400, (path, body[:90])
            large = b'{"orders": [{"trajectory": "t", "priority": %d, "resident": true}]}' % 2**70
            assert (await http.post("/prioritise", content=large)).status_code == 400
            assert (await http.get("/generate")).status_code == 405
            assert (await http.put("/kv", content=b"nothing")).status_code == 400
            assert (await http.put("/weights/7", content=b"nothing")).status_code == 400
            assert (await http.put(f"/weights/{10**30}", content=b"")).status_code == 400
            assert (await http.put("/weights/-1", content=b"")).status_code == 400
        assert inner.load().running == inner.load().waiting == 0
        await collect(client, Request("t/0", [1, 2, 3], 4))  # it lives


async def test_a_token_outside_the_vocabulary_is_refused_and_the_worker_goes_on(params):
    """2^63 - 1 ended the worker for every later caller."""
    async with served(params[0]) as (client, inner, _):
        for token in (CONFIG.vocab_size, 2**31 - 1, 2**63 - 1):
            with pytest.raises(ContractError):
                await collect(client, Request("t/0", [1, token], 4))
            assert inner.failure is None
            await collect(client, Request("t/1", [1, 2, 3], 4))


async def test_a_client_that_hangs_up_frees_what_it_had(params):
    """Both where the answer has begun and where the request still waits."""
    async with served(params[0]) as (client, inner, _):
        body = {"tokens": [1, 2, 3], "max_tokens": 40, "seed": 3}
        for late in (False, True):
            if late:  # it waits for its turn
                inner._engine._begin = lambda: False
            headers = {"venus-session": client._tenure.session}
            async with httpx.AsyncClient(base_url=client.address, headers=headers) as other:
                task = asyncio.create_task(
                    other.post("/generate", content=json.dumps({**body, "trajectory": f"t/{late}"}))
                )
                await asyncio.sleep(0.2)
                task.cancel()
                await asyncio.wait({task})
            async with asyncio.timeout(10):
                while inner.load().running or inner.load().waiting or inner._streams:
                    await asyncio.sleep(0.02)


async def test_a_server_that_goes_is_a_lost_worker(params):
    async with served(params[0]) as (client, _, server):
        await collect(client, Request("t/0", [1, 2, 3], 4))
        server.stop()
        await asyncio.sleep(0.5)
        with pytest.raises(WorkerError, match="lost"):
            await collect(client, Request("t/0", [1, 2, 3], 4))
        assert client.failure is not None
        with pytest.raises(WorkerError, match="lost"):
            await client.update_weights(params[1], 9)
        client.prioritise("t/0", 1, True)  # no error: nobody waits for it


async def test_nobody_at_an_address():
    client = RemoteWorker("http://127.0.0.1:9", lambda params: b"")
    with pytest.raises(WorkerError, match=r"127\.0\.0\.1:9"):
        await client.start()
    await client.close()


async def test_kv_with_wrong_contents_is_refused_over_http_and_the_worker_goes_on(params):
    context = list(range(1, 19))
    async with served(params[0]) as (client, inner, _):
        await collect(client, Request("t/0", context, 6, 1.0, 5))
        data = await client.export_kv("t/0")
        assert await client.import_kv(data) <= inner._engine.options.page  # what it has already
        body = data[25:]
        (length,) = struct.unpack_from("<I", body)
        header = json.loads(body[4 : 4 + length])
        for change in ({"tokens": [99] * 18}, {"arrays": header["arrays"][:-2]}, {"namespace": None}, {"version": "4"}):
            text = json.dumps({**header, **change}).encode()
            wrong = struct.pack("<I", len(text)) + text + body[4 + length :]
            with pytest.raises(ContractError, match="KV"):
                await client.import_kv(data[:9] + hashlib.blake2b(wrong, digest_size=16).digest() + wrong)
        with pytest.raises(ContractError, match="bytes; send less"):
            await client.import_kv(bytes(inner._engine.kv_shape.most_bytes + 1))
        async with httpx.AsyncClient(base_url=client.address) as short:  # a body that ends before its time
            _reader, writer = await asyncio.open_connection(short.base_url.host, short.base_url.port)
            session = client._tenure.session.encode()
            writer.write(
                b"PUT /kv HTTP/1.1\r\nhost: 127.0.0.1\r\nvenus-session: %b\r\ncontent-length: 1000\r\n\r\nabc" % session
            )
            await writer.drain()
            writer.close()
        assert inner.failure is None and len(await collect(client, Request("t/1", context, 4))) >= 1


async def test_weights_in_bfloat16_go_over_the_wire(params):
    """What accelerators use; it was KeyError: 'BF16'."""
    halves = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params[0])
    back = hf.from_bytes(hf.to_bytes(halves, CONFIG, "bfloat16"), CONFIG)
    for mine, theirs in zip(jax.tree.leaves(halves), jax.tree.leaves(back), strict=True):
        assert theirs.dtype == np.float32 and np.array_equal(np.asarray(mine, np.float32), theirs)
    with pytest.raises(CheckpointError, match="F64"):
        hf.from_bytes(save({"model.norm.weight": np.zeros(16)}), CONFIG)


async def test_weights_of_another_run_replace_everything(params):
    """An older version than the one before, and no KV of the other's weights."""
    context = list(range(1, 19))
    async with served(params[0]) as (client, inner, _):
        await client.update_weights(params[0], 9)
        first = tokens(await collect(client, Request("t/0", context, 6, 0.0)))
        await client.close()
        other = RemoteWorker(client.address, lambda params: hf.to_bytes(params, CONFIG), run="another run")
        await other.start()
        with pytest.raises(WorkerError, match="weights of another caller"):
            await collect(other, Request("t/0", context, 6, 0.0))
        await other.close()
        other = RemoteWorker(client.address, lambda params: hf.to_bytes(params, CONFIG), run="another run")
        await other.start()
        await other.update_weights(params[1], 2)
        chunks = await collect(other, Request("t/0", context, 6, 0.0))
        assert {chunk.version for chunk in chunks} == {2} and tokens(chunks) != first
        assert inner.load().running == inner.load().waiting == 0 and other.version == 2
        await other.update_weights(params[1], 3)
        await other.close()


async def test_the_most_likely_tokens_come_over_the_wire(params):
    async with served(params[0]) as (client, inner, _):
        request = Request("t", [5, 6, 7], 6, 1.0, 5, top_logprobs=3)
        there = [chunk.top for chunk in await collect(client, request)]
        await client.release("t")
        here = [chunk.top for chunk in await collect(inner, Request("u", [5, 6, 7], 6, 1.0, 5, top_logprobs=3))]
        flat = [[pair for top in tops for pair in top] for tops in (there, here)]
        assert flat[0] == flat[1] and all(len(place) == 3 for place in flat[0])


async def test_a_worker_behind_its_door_takes_who_has_the_key_and_no_web_page(params):
    key = "0123456789abcdef"
    worker = JaxWorker("inner", Engine(CONFIG, params[0], 4, STOP, OPTIONS))
    await worker.start()
    shape = worker._engine.kv_shape
    codec = Codec(lambda data: from_bytes(data, shape), to_bytes, lambda data: hf.from_bytes(data, CONFIG))
    listener, address = listen("127.0.0.1", 0)
    server = Server(Door(worker_app(worker, codec), key=key), listener, grace_s=1)
    task = asyncio.create_task(server.run())
    write = lambda params: hf.to_bytes(params, CONFIG)  # noqa: E731
    client, stranger = (RemoteWorker(address, write, run="a run", key=k) for k in (key, "0123456789abcdeX"))
    try:
        await client.start()
        assert await collect(client, Request("t", [5, 6, 7], 4))
        with pytest.raises(WorkerError, match=r"worker \S+: this service needs its key, as `Authorization"):
            await stranger.start(patient=False)
        async with httpx.AsyncClient(base_url=address, headers={"authorization": f"Bearer {key}"}) as http:
            assert (await http.get("/info")).is_success
            assert (await http.get("/info", headers={"origin": "http://evil.example"})).status_code == 403
            assert (await http.get("/info", headers={"host": "evil.example"})).status_code == 421
            assert (await http.get("/info", headers={"authorization": ""})).status_code == 401
    finally:
        await stranger.close()
        await client.close()
        server.stop()
        await task
        await worker.close()


async def test_a_worker_with_another_model_of_the_same_shapes_is_refused_by_what_differs(params):
    """rope_theta 100 against 10,000: it was used, and the tokens were those of another model."""
    ours = CONFIG.beside_weights(STOP)
    for theirs, says in (
        ({**ours, "rope_theta": 100.0}, "rope_theta=100.0 (here 10000.0)"),
        ({**ours, "norm_eps": 1e-3, "stop_tokens": [1]}, "norm_eps=0.001 (here 1e-06), stop_tokens="),
        (ours, None),
        ({}, None),  # of another kind, which does not say
    ):
        worker = JaxWorker("inner", Engine(CONFIG, params[0], 4, STOP, OPTIONS))
        await worker.start()
        codec = dataclasses.replace(codec_of(worker), model=json.loads(json.dumps(theirs)))
        listener, address = listen("127.0.0.1", 0)
        server = Server(Door(worker_app(worker, codec)), listener, grace_s=1)
        task = asyncio.create_task(server.run())
        client = RemoteWorker(address, lambda params: hf.to_bytes(params, CONFIG), run="a run", model=ours)
        try:
            if says is None:
                await client.start()
            else:
                with pytest.raises(ConfigError, match=re.escape(says)):
                    await client.start()
        finally:
            await client.close()
            server.stop()
            await task
            await worker.close()


async def test_a_request_that_is_cancelled_before_it_begins_is_answered(params):
    async with served(params[0]) as (client, inner, _):
        body = {"trajectory": "t", "tokens": [5, 6, 7], "max_tokens": 4}
        headers = {SESSION_HEADER: client._tenure.session}
        inner._engine.step = lambda: (time.sleep(0.05), [])[1]  # it never begins
        turn = asyncio.create_task(client._client.post("/generate", json=body, headers=headers))
        while not inner._streams:
            await asyncio.sleep(0.01)
        await client._client.post("/cancel", json={"trajectory": "t"}, headers=headers)
        assert (await turn).status_code == 499


@pytest.mark.parametrize("version", ["9" * 5000, "-1", "1.5", "x", "2147483648", "\u0663"])
async def test_a_version_that_is_none_is_refused(params, version):
    async with served(params[0]) as (client, _, _):
        headers = {SESSION_HEADER: client._tenure.session}
        assert (await client._client.put(f"/weights/{version}", content=b"x", headers=headers)).status_code == 400


async def test_small_requests_have_small_bodies_and_strangers_are_not_read_at_all(params):
    async with served(params[0]) as (client, _, _):
        junk = json.dumps({f"k{i}": 1 for i in range(20_000)}).encode()
        mine = {SESSION_HEADER: client._tenure.session}
        for path in ("/cancel", "/preempt"):
            assert (await client._client.post(path, content=junk, headers=mine)).status_code == 400
            assert (await client._client.post(path, content=junk)).status_code == 409

"""Who may call a service, and how slowly: over real sockets where time matters."""

import asyncio
import contextlib

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from venusrl.core import door, listening
from venusrl.core.door import Door, check_exposure, is_loopback, read_key
from venusrl.core.errors import ConfigError
from venusrl.core.http import Gone, body_of

KEY = "0123456789abcdef0123456789abcdef"


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"size": len(await body_of(request, 1 << 20))})


def application() -> Starlette:
    async def left(request, error):
        return JSONResponse({}, status_code=499)

    return Starlette(routes=[Route("/", echo, methods=["GET", "POST"])], exception_handlers={Gone: left})


def client(base: str = "http://127.0.0.1:8000", **options) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(Door(application(), **options)), base_url=base)


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "LOCALHOST:80"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": "evil.example@127.0.0.1:99:1"}, 421),
        ({"host": ""}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:8000"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "https://mine.example"}, 200),
    ],
)
async def test_a_web_page_cannot_call_a_service_of_this_machine(headers, status):
    async with client(origins=["https://mine.example"]) as http:
        answer = await http.post("/", headers=headers, content="x")
        assert answer.status_code == status and (status == 200 or answer.json()["error"]["message"])


@pytest.mark.parametrize(
    "header, status",
    [
        (f"Bearer {KEY}", 200),
        (f"bearer  {KEY}", 200),
        (KEY, 401),
        (f"Basic {KEY}", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Bearer {KEY}0", 401),
        ("Bearer", 401),
        (None, 401),
    ],
)
async def test_a_service_with_a_key_answers_nobody_without_it(header, status):
    async with client(key=KEY) as http:
        headers = {} if header is None else {"authorization": header}
        assert (await http.get("/", headers=headers)).status_code == status


async def test_elsewhere_than_on_the_loopback_any_name_will_do_with_the_key():
    async with client("http://node-7.cluster:9000", host="0.0.0.0", key=KEY) as http:
        assert (await http.get("/", headers={"authorization": f"Bearer {KEY}"})).status_code == 200
        assert (await http.get("/")).status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.3", "node-7", ""])
def test_an_address_that_others_reach_needs_a_key(host):
    assert not is_loopback(host)
    check_exposure(host, KEY)
    with pytest.raises(ConfigError, match="--key_file"):
        check_exposure(host, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_the_loopback_needs_none(host):
    check_exposure(host, None)


@pytest.mark.parametrize(
    "text", [b"", b"short", b"two words that are long enough", "schlüssel-schlüssel".encode(), b"\xff"]
)
def test_a_file_that_has_no_key_is_refused(tmp_path, text):
    (tmp_path / "key").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="key_file"):
        read_key(str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="key_file"):
        read_key(str(tmp_path / "missing"))
    (tmp_path / "key").write_text(f"{KEY}\n")
    assert read_key(str(tmp_path / "key")) == KEY


async def test_a_page_that_may_call_can_read_the_answer_and_its_browser_can_ask_first():
    page = {"origin": "https://mine.example"}
    async with client(key=KEY, origins=["https://mine.example"]) as http:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        first = await http.options("/", headers={**page, **asks})
        assert first.status_code == 200 and first.headers["access-control-allow-origin"] == "https://mine.example"
        assert "authorization" in first.headers["access-control-allow-headers"]
        answer = await http.post("/", headers={**page, "authorization": f"Bearer {KEY}"}, content=b"x")
        assert answer.json() == {"size": 1} and answer.headers["access-control-allow-origin"] == "https://mine.example"
        assert (await http.post("/", headers=page, content=b"x")).status_code == 401
        assert (await http.options("/", headers={"origin": "https://evil.example", **asks})).status_code == 403


@contextlib.asynccontextmanager
async def serving():
    listener, address = listening.listen("127.0.0.1", 0)
    server = listening.Server(Door(application()), listener, grace_s=1)
    task = asyncio.create_task(server.run())
    try:
        yield int(address.rsplit(":", 1)[1]), address
    finally:
        server.stop()
        await task


async def slowly(port: int, begin: bytes, drop: bytes, every_s: float) -> bytes:
    """Sends `begin`, then `drop` again and again until the server ends the connection; what it said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)

    async def drip():
        while True:
            await asyncio.sleep(every_s)
            writer.write(drop)

    dripping = asyncio.create_task(drip())
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        dripping.cancel()
        writer.close()


async def test_a_caller_that_sends_slowly_is_ended_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(listening, "HEAD_S", 0.3)
    monkeypatch.setattr(door, "BODY_S", 0.3)
    async with serving() as (port, address), httpx.AsyncClient(base_url=address) as http:
        head = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999\r\n\r\n"
        slow = [
            slowly(port, b"", b"", 1.0),  # never says anything
            slowly(port, b"POST / HTTP/1.1\r\n", b"X-A: b\r\n", 0.05),
            slowly(port, head, b"x", 0.05),
            slowly(port, head + b"x" * 999 + b"POST / HT", b"", 1.0),  # a good call, and half of the next
        ]
        tasks = [asyncio.create_task(one) for one in slow]
        for _ in range(20):
            assert (await http.post("/", content=b"x" * 10_000)).json() == {"size": 10_000}
            await asyncio.sleep(0.02)
        nothing, headless, late, kept = await asyncio.gather(*tasks)
        assert nothing == headless == b"" and b"408" in late.split(b"\r\n")[0]
        assert b'{"size":999}' in kept
        await asyncio.sleep(0.5)
        assert (await http.get("/")).is_success  # an idle connection is not a slow one


async def test_a_long_body_has_more_time(monkeypatch):
    monkeypatch.setattr(door, "BODY_S", 0.2)
    monkeypatch.setattr(door, "SLOWEST", 10_000)
    async with serving() as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 20000\r\n\r\n")
        for _ in range(10):  # 0.5 s at four times the slowest pace
            writer.write(b"x" * 2000)
            await asyncio.sleep(0.05)
        assert b'{"size":20000}' in await reader.read()
        writer.close()


async def test_a_caller_that_reads_nothing_is_ended(monkeypatch):
    monkeypatch.setattr(door, "SEND_S", 0.2)
    ended = asyncio.Event()

    async def pour(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        finally:
            ended.set()

    listener, address = listening.listen("127.0.0.1", 0)
    server = listening.Server(Door(pour), listener, grace_s=1)
    task = asyncio.create_task(server.run())
    _, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]), limit=1)
    writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await asyncio.wait_for(ended.wait(), 10)
    writer.transport.abort()
    server.stop()
    await task


async def test_a_body_that_is_too_long_is_refused():
    async with client() as http:
        with pytest.raises(Exception, match="more than 1048576 bytes"):
            await http.post("/", content=b"x" * (2**20 + 1))

"""Who may call a service, and how slowly: over real sockets where time matters."""

import asyncio
import contextlib
import functools
import re
import select
import socket

import httpx
import pytest
import websockets
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from venusrl.core import door, listening
from venusrl.core.door import Door, check_exposure, is_loopback, read_key
from venusrl.core.errors import ConfigError
from venusrl.core.http import Gone, body_of
from venusrl.rollout.gateway.harness import HarnessHub

KEY = "0123456789abcdef0123456789abcdef"
LONG = 20_000_000  # bytes of an answer
ENDED = asyncio.Event()


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


async def test_a_service_that_others_reach_starts_without_a_key_where_its_maker_says_so():
    """As HarnessHub does, whose addresses cannot be guessed; programs ask `check_exposure`."""
    async with client("http://node-7.cluster:9000", host="0.0.0.0") as http:
        assert (await http.get("/")).status_code == 200
    hub = HarnessHub("0.0.0.0")
    await hub.start()
    try:
        async with httpx.AsyncClient() as http:
            url = hub.enter(object()).replace("0.0.0.0", "127.0.0.1")
            assert (await http.get(f"{url}/models")).status_code == 200
    finally:
        await hub.close()


@pytest.mark.parametrize(
    "host, shown",
    [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost"), ("", "0.0.0.0")],
)
async def test_every_kind_of_address_is_listened_on_and_told_as_an_url_has_it(host, shown):
    listener, address = listening.listen(host, 0)
    assert address.startswith(f"http://{shown}:")
    assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    server = listening.Server(Door(application(), host), listener, grace_s=1)
    task = asyncio.create_task(server.run())
    try:
        async with httpx.AsyncClient() as http:
            assert (await http.get(address)).status_code == 200
    finally:
        server.stop()
        await task


@pytest.mark.parametrize("host", ["256.1.1.1", "a" * 70, "fe80::", "2001:db8::1", "[::1]"])
def test_an_address_that_is_not_of_this_machine_is_refused_by_name(host):
    with pytest.raises(ConfigError, match=re.escape(f"--host={host} --port=0: ")):
        listening.listen(host, 0)


@pytest.mark.parametrize(
    "text, mode, says",
    [
        (b"", 0o600, "16 to 4096"),
        (b"short", 0o600, "16 to 4096"),
        (b"k" * 4097, 0o600, "16 to 4096"),
        (b"k" * 100_000, 0o600, "16 to 4096"),
        (b"two words that are long enough", 0o600, "white space"),
        (b"0123456789abcdef\n0123456789abcdef", 0o600, "white space"),
        (b"0123456789abcdef\0", 0o600, "printable"),
        ("schlüssel-schlüssel".encode(), 0o600, "ASCII"),
        (b"\xff" * 20, 0o600, "ASCII"),
        (KEY.encode(), 0o644, "chmod 600"),
        (KEY.encode(), 0o620, "chmod 600"),
        (KEY.encode(), 0o604, "chmod 600"),
        (None, 0, "No such file"),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.parametrize("field", ["--key_file", "rollout.key_file"])
def test_a_file_that_has_no_key_or_that_others_read_is_refused(tmp_path, field, text, mode, says):
    path = tmp_path / "key"
    if text is not None:
        path.write_bytes(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=f"^{re.escape(field)}='{path}': .*{says}"):
        read_key(str(path), field)


def test_a_file_that_has_a_key_is_read(tmp_path):
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "key").chmod(0o400)
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
async def serving(app=None):
    listener, address = listening.listen("127.0.0.1", 0)
    server = listening.Server(Door(app or application()), listener, grace_s=1)
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
        return await asyncio.wait_for(reader.read(), 10)
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


async def pour(scope, receive, send, part: int = 65536):
    """An answer without an end; ENDED is set when it ends all the same."""
    try:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * part, "more_body": True})
    finally:
        ENDED.set()


async def whole(scope, receive, send):
    """An answer in one piece, longer than the buffers of sockets."""
    headers = [(b"content-length", str(LONG).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * LONG})


async def ended_by_server(caller: socket.socket) -> None:
    """Returns once the other side has reset the connection; nothing is read for it."""
    events = select.poll()
    events.register(caller, 0)  # errors and the end alone
    while not events.poll(0):
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("head", [b"", b"Connection: close\r\n"])
@pytest.mark.parametrize("answer", [whole, pour])
async def test_a_caller_that_reads_nothing_is_ended(monkeypatch, answer, head):
    """By a reset: what it did not take is left neither here nor in the kernel."""
    monkeypatch.setattr(door, "SEND_S", 0.2)
    ENDED.clear()
    async with serving(answer) as (port, _):
        with not_reading(port, head) as caller:
            await asyncio.wait_for(ended_by_server(caller), 10)
            if answer is pour:
                await asyncio.wait_for(ENDED.wait(), 10)


async def test_a_caller_that_reads_slowly_has_its_whole_answer(monkeypatch):
    """It takes longer than SEND_S in sum, and never as long for nothing."""
    monkeypatch.setattr(door, "SEND_S", 0.3)
    async with serving(whole) as (port, _):
        with not_reading(port, b"Connection: close\r\n", buffer=1 << 20) as caller:
            caller.setblocking(False)
            got, began = 0, asyncio.get_running_loop().time()
            while part := await asyncio.get_running_loop().sock_recv(caller, 1 << 20):
                got += len(part)
                if asyncio.get_running_loop().time() - began < 0.6:
                    await asyncio.sleep(0.05)
            assert got > LONG


async def test_a_stream_that_is_read_too_slowly_is_reset_though_its_caller_goes_on(monkeypatch):
    """A part that is not taken in SEND_S ends it at once: its end is not waited for behind what is buffered."""
    monkeypatch.setattr(door, "SEND_S", 0.3)
    ENDED.clear()
    async with serving(functools.partial(pour, part=LONG)) as (port, _):
        with not_reading(port, buffer=1 << 16) as caller:
            caller.setblocking(False)

            async def sip():
                while True:
                    await asyncio.get_running_loop().sock_recv(caller, 1 << 16)
                    await asyncio.sleep(0.02)

            sipping = asyncio.create_task(sip())
            await asyncio.wait_for(ended_by_server(caller), 5)  # a third of what taking a part would take
            assert ENDED.is_set()
            sipping.cancel()


@contextlib.contextmanager
def not_reading(port: int, head: bytes = b"", buffer: int = 4096):
    """A connection that has asked, and reads nothing by itself. `buffer`: bytes that its kernel takes for it."""
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        caller.connect(("127.0.0.1", port))
        caller.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n")
        yield caller


async def test_a_web_socket_may_be_quiet_for_as_long_as_it_likes(monkeypatch):
    """Nothing of this is for connections that were upgraded, as the daemon's are."""
    monkeypatch.setattr(door, "SEND_S", 0.1)

    async def sockets(scope, receive, send):
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": b"x" * LONG})
        await receive()

    async with serving(sockets) as (port, _), websockets.connect(f"ws://127.0.0.1:{port}/", max_size=None) as caller:
        caller.transport.pause_reading()
        await asyncio.sleep(0.5)
        caller.transport.resume_reading()
        assert len(await caller.recv()) == LONG


async def test_a_body_that_is_too_long_is_refused():
    async with client() as http:
        with pytest.raises(Exception, match="more than 1048576 bytes"):
            await http.post("/", content=b"x" * (2**20 + 1))

"""Hostile values in every field of the contract: a clear error, nothing left over, and a neighbour that goes on."""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import socket

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sandbox.conftest import cgroup_paths, in_process, on_host
from tests.sandbox.test_life import until
from venusrl.core.errors import ConfigError, SandboxError, SandboxLost
from venusrl.sandbox import Template, bounds

NUMBERS = [
    0,
    -1,
    1,
    2,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    2**64 + 4096,
    -(2**63),
    10**40,
    10**400,
    0.5,
    -0.0,
    1e-300,
    1e18,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
    True,
    False,
    None,
    "1",
    b"1",
    [],
    {},
    (),
    object(),
]
TEXTS = [
    "",
    "\0",
    "a\0b",
    "\ud800",
    "\udcff",
    "x" * 5000,
    "../..",
    "/",
    ".",
    "\n",
    "é" * 300,
    "🙂",
    5,
    None,
    b"x",
    [],
    {},
]
VALUES = st.sampled_from([*NUMBERS, *TEXTS]) | st.integers() | st.floats() | st.text(max_size=20)
FIELDS = [field.name for field in dataclasses.fields(Template)]


@settings(max_examples=600, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
def test_a_template_is_within_its_bounds_or_refused_in_one_line(fields):
    try:
        template = Template(**{"name": "x", **fields})
    except ConfigError as error:
        assert str(error).startswith("Template.") and "\n" not in str(error) and len(str(error)) < 400
        return
    for name, (least, most) in bounds.WHOLE.items():
        if hasattr(template, name):
            value = getattr(template, name)
            assert type(value) is int and least <= value <= most
    for name in bounds.SECONDS:
        if hasattr(template, name):
            assert bounds.SHORTEST_S <= getattr(template, name) <= bounds.LONGEST_S
    json.dumps({name: getattr(template, name) for name in FIELDS if name not in ("files", "env")})


@pytest.mark.parametrize("name", [*bounds.WHOLE])
def test_the_ends_of_the_bounds(name):
    least, most = bounds.WHOLE[name]
    assert bounds.whole(name, name, least) == least and bounds.whole(name, name, most) == most
    for value in (least - 1, most + 1, 2**64, 10**400, float(least), math.nan, True, "1", None):
        with pytest.raises(ConfigError, match=f"^{name}=.*give an integer of at least {least}, at most {most}$"):
            bounds.whole(name, name, value)


def left_over(pool) -> tuple[int, int, int]:
    """Descriptors of this process and of the spawner, and its groups."""
    counted = [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", pool.spawner_pid)]
    groups = cgroup_paths(f"venusrl-*-{pool.spawner_pid}-*/*")
    return (*counted, len([path for path in groups if path.is_dir()]))


def attempts(sandbox, process, rng: random.Random):
    """Calls with something wrong in each, one after another."""
    number, text = rng.choice(NUMBERS), rng.choice(TEXTS)
    return [
        lambda: sandbox.exec(rng.choice([text, number]), timeout_s=2.0),
        lambda: sandbox.exec("true", timeout_s=number),
        lambda: sandbox.exec("true", silent_s=number, timeout_s=2.0),
        lambda: sandbox.exec("true", user=text, timeout_s=2.0),
        lambda: sandbox.exec("true", cwd=text, timeout_s=2.0),
        lambda: sandbox.exec("true", user_env={text if isinstance(text, str) else "A": text}, timeout_s=2.0),
        lambda: sandbox.exec("true", user_env=number, timeout_s=2.0),
        lambda: sandbox.exec("cat", stdin=text, timeout_s=2.0),
        lambda: sandbox.start("true", pty=(number, 5), timeout_s=2.0),
        lambda: sandbox.start("true", pty=number, timeout_s=2.0),
        lambda: sandbox.connect(number),
        lambda: sandbox.read(text),
        lambda: sandbox.read("f", number),
        lambda: sandbox.write(text, b"x"),
        lambda: sandbox.write("w", text),
        lambda: sandbox.write("w", b"x", number),
        lambda: sandbox.stat(text),
        lambda: sandbox.list(text),
        lambda: asyncio.wait_for(anext(sandbox.watch(text)), 0.05),
        lambda: process.signal(number if number not in (9, 15, 1, 2) else 0),
        lambda: process.resize(number, number),
        lambda: process.send(text),
        lambda: sandbox.kill(text),
    ]


EXPECTED = (ConfigError, OSError, SandboxError, TimeoutError)


@on_host
@pytest.mark.parametrize("seed", range(4))
async def test_hostile_calls_harm_nobody(pool, seed):
    rng = random.Random(seed)
    sandbox, neighbour = await asyncio.gather(pool.create(Template("hostile")), pool.create(Template("neighbour")))
    process = await sandbox.start("sleep 1000", stdin=None)
    await sandbox.write("f", b"x")
    for _ in range(4):
        for call in attempts(sandbox, process, rng):
            try:
                await asyncio.wait_for(call(), 10.0)
            except EXPECTED as error:
                assert "\n" not in str(error)
            if sandbox.lost:
                break
        assert (await neighbour.exec("echo well")).text == "well\n"
    if sandbox.lost is None:
        assert (await sandbox.exec("echo well")).text == "well\n"


@in_process
async def test_creations_that_fail_leave_nothing(pool):
    neighbour = await pool.create(Template("neighbour"))
    before = left_over(pool)
    for fields in (
        {"files": {"a/b": b"", "a": b""}},
        {"files": {"f": bytes(2 << 20)}, "disk_bytes": 1 << 20},
        {"env": {f"A{i}": "x" * 1000 for i in range(200)}},
    ):
        with pytest.raises((SandboxError, OSError)):
            await pool.create(Template("fails", **fields))
    for memory in (2**64, 2**63, 10**400, 0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="memory_bytes="):
            await pool.resize(neighbour, memory)
    await until(lambda: left_over(pool) == before)
    assert (await neighbour.exec("echo well")).text == "well\n" and pool.alive == 1


# The spawner, told what no owner tells it

GOOD = {
    "op": "create",
    "id": "sb-forged",
    "memory_bytes": 64 << 20,
    "pids": 8,
    "file_bytes": 4096,
    "disk_bytes": 1 << 20,
    "output_bytes": 1024,
    "ttl_s": 5.0,
    "oom": "kill",
    "oom_wait_s": 1.0,
    "env": {},
    "layer": None,
    "build": False,
}
FORGED = [
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b"[" * 50_000,
    b"1e999",
    json.dumps({"op": "none"}).encode(),
    *(json.dumps({"op": op}).encode() for op in ("create", "restore", "kill", "resize", "save", "meet", [1], None)),
    *(json.dumps({"op": op, "id": "sb-x", "request": 1}).encode() for op in ("resize", "save", "meet", "kill")),
    *(
        json.dumps({**GOOD, name: value}).encode()
        for name in GOOD
        if name != "op"
        for value in (2**64, 10**400, -1, 1e999, None, [], "x" * 300, {"a": 1}, "\ud800", "a\0b")
    ),
    *(json.dumps({key: value for key, value in GOOD.items() if key != name}).encode() for name in GOOD),
    json.dumps(
        {
            "op": "restore",
            **{k: v for k, v in GOOD.items() if k != "op"},
            "folder": "/none",
            "criu": "/none",
            "base": 0,
            "berth": "00",
            "parked": False,
        }
    ).encode(),
    json.dumps(
        {"op": "create", "id": "sb-h", "hold": "/none", "memory_bytes": 64 << 20, "pids": 2, "ttl_s": 9.0}
    ).encode(),
]


@in_process
async def test_the_spawner_survives_whatever_it_is_told(pool):
    neighbour = await pool.create(Template("neighbour"))
    before, link = left_over(pool), pool._link
    control: socket.socket = link._control
    link._loop.remove_reader(control.fileno())  # what is answered is read here
    control.settimeout(0.02)
    answered = 0
    for packet in FORGED:
        control.send(packet)
        with contextlib.suppress(TimeoutError):
            while True:
                data, fds, _, _ = socket.recv_fds(control, 1 << 17, 1)
                for fd in fds:
                    os.close(fd)
                answer = json.loads(data)
                answered += 1
                if answer["event"] == "created":
                    control.send(json.dumps({"op": "kill", "id": answer["id"], "reason": "killed"}).encode())
    control.setblocking(False)
    link._loop.add_reader(control.fileno(), link._receive)
    assert answered > 100 and (await neighbour.exec("echo well")).text == "well\n"
    assert (await (await pool.create(Template("next"))).exec("echo well")).text == "well\n"
    await until(lambda: left_over(pool)[2] <= before[2] + 4)


# Through the daemon


@pytest.mark.parametrize(
    "field", ["memory_bytes", "pids", "disk_bytes", "file_bytes", "output_bytes", "ttl_s", "start_s"]
)
@pytest.mark.parametrize(
    "value", [str(2**64), "1" + "0" * 400, "-1", "1e999", "NaN", "Infinity", "true", '"1"', "null"]
)
def test_a_hostile_number_is_refused_at_the_door(daemon_address, field, value):
    fields = f'"name": "x", "memory_bytes": 67108864, "disk_bytes": 1048576, "{field}": {value}'
    body = f'{{"template": {{{fields}}}}}'
    answer = httpx.post(f"{daemon_address}/sandboxes", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and field in answer.json()["message"], answer.text
    assert "\n" not in answer.json()["message"] and len(answer.json()["message"]) < 400


async def test_what_no_client_of_ours_sends_is_refused_at_the_door(daemon_address, pool):
    if not hasattr(pool, "address"):
        pytest.skip("through a daemon")
    sandbox = await pool.create(Template("x"))
    async with httpx.AsyncClient(base_url=f"{daemon_address}/sandboxes/{sandbox.id}") as http:
        for path, body in (
            ("/exec", {"script": 5}),
            ("/exec", {"script": "x", "timeout_s": "5"}),
            ("/exec", {"script": "x", "stdin": "?"}),
            ("/exec", {"script": "x", "silent_s": 0}),
            ("/exec", {"script": "x", "user_env": {"A": 1}}),
            ("/resize", {"memory_bytes": 2**64}),
            ("/resize", {"memory_bytes": True}),
            ("/resize", {}),
            ("/migrate", {"node": ""}),
            ("/migrate", {"node": 5}),
            ("/fork", {"lease_s": 10**400}),
            ("/fork", {"more": 1}),
        ):
            answer = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            assert answer.status_code == 400 and "\n" not in answer.json()["message"], (path, body, answer.text)
        for deep in ("[" * 100_000, '{"a":' * 100_000, '{"script": "\\ud800"}'):
            answer = await http.post("/exec", content=deep, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 422), answer.text
        for mode in ("9", "77777", "-1", "x"):
            assert (await http.put("/files", params={"path": "f", "mode": mode}, content=b"")).status_code == 400
        large = await http.put("/files", params={"path": "f"}, content=bytes(sandbox.template.file_bytes + 1))
        assert large.status_code == 413
    with pytest.raises(SandboxLost):
        await pool.connect("sb-none", Template("x"))
    assert (await sandbox.exec("echo well")).text == "well\n"

"""Forged frames, JSON, and output that is cut: what an agent may say, and what both make of what they are told."""

import asyncio
import ctypes
import json
import math
import random
import socket
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sandbox.conftest import in_process
from tests.sandbox.test_life import until
from venusrl.core.errors import SandboxLost
from venusrl.sandbox import Template
from venusrl.sandbox.agent.output import Capture, beginning
from venusrl.sandbox.client import RANGE, ProcessSandbox
from venusrl.sandbox.programs import SOURCES, find_compiler
from venusrl.sandbox.wire import LENGTHS, pack, read_frame


class Keeper:
    """Who made a sandbox, as far as it is asked."""

    def __init__(self):
        self.ended = []

    async def end(self, sandbox_id, reason):
        self.ended.append(reason)


async def forged(*frames: bytes, calls=1) -> tuple[list, ProcessSandbox, Keeper]:
    """What becomes of calls of a sandbox whose agent says that, `ID` being the first one's id."""
    ours, theirs = socket.socketpair()
    streams = await asyncio.open_connection(sock=ours)
    keeper = Keeper()
    sandbox = ProcessSandbox("sb-1", Template("x"), streams, keeper)
    reader, writer = await asyncio.open_connection(sock=theirs)
    writer.write(pack({"ready": True}))
    await sandbox.open({})
    waiting = [asyncio.create_task(sandbox.exec("true", timeout_s=5.0)) for _ in range(calls)]
    header, _ = await read_frame(reader)
    for frame in frames:
        is_mine = b'"ID"' in frame
        writer.write(raw(frame[8:].replace(b'"ID"', str(header["id"]).encode())) if is_mine else frame)
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
    writer.close()
    return results, sandbox, keeper


def raw(head: bytes, body: bytes = b"") -> bytes:
    return LENGTHS.pack(len(head), len(body)) + head + body


END = {"exit_code": 0, "total": 0, "timed_out": None, "seconds": 0.1, "oom": False}
FORGED = {
    "no JSON": raw(b"{"),
    "no object": raw(b"[]"),
    "a number": raw(b"1e999"),
    "deep": raw(b"[" * 100_000),
    "not UTF-8": raw(b'{"id": "\xff"}'),
    "empty": raw(b""),
    "too long a head": LENGTHS.pack(1 << 31, 0),
    "too long a body": LENGTHS.pack(2, 1 << 30) + b"{}",
    "nothing known": pack({}),
    "an unknown kind": pack({"colour": 1}),
    "id of text": pack({"id": "x", **END}),
    "id below 0": pack({"id": -1, **END}),
    "id without end": raw(b'{"id":1' + b"0" * 400 + b"}"),
    "errno 0": raw(b'{"id":"ID","errno":0}'),
    "errno of text": raw(b'{"id":"ID","errno":"x"}'),
    "errno huge": raw(b'{"id":"ID","errno":1e99}'),
    "no end": raw(b'{"id":"ID"}'),
    "a wrong end": raw(b'{"id":"ID","exit_code":"0","total":0,"timed_out":null,"seconds":0.1,"oom":false}'),
    "a huge end": raw(
        b'{"id":"ID","exit_code":0,"total":1' + b"0" * 300 + b',"timed_out":null,"seconds":0,"oom":false}'
    ),
    "a list for a word": raw(b'{"id":"ID","exit_code":0,"total":0,"timed_out":[],"seconds":0,"oom":false}'),
    "NaN": raw(b'{"id":"ID","exit_code":0,"total":0,"timed_out":null,"seconds":NaN,"oom":false}'),
    "an unknown stream": pack({"job": 1, "stream": "other"}, b"x"),
    "stream of a list": pack({"job": 1, "stream": ["output"]}, b"x"),
    "changes that are none": pack({"watch": 1, "events": [["write"]]}),
    "changes of another kind": pack({"watch": 1, "events": "all"}),
    "a set-up's error after it": pack({"setup_error": "no"}),
    "paused with a word": pack({"paused": "yes"}),
    "a pause that nobody asked for": pack({"paused": True}),
}


@pytest.mark.parametrize("kind", FORGED)
async def test_a_forged_frame_ends_the_sandbox_at_once(kind):
    results, sandbox, keeper = await forged(FORGED[kind], calls=2)
    assert all(isinstance(result, SandboxLost) and result.reason == "protocol" for result in results)
    assert sandbox.lost == "protocol" and keeper.ended == ["protocol"]
    with pytest.raises(SandboxLost, match="protocol"):
        await sandbox.exec("true")


async def test_what_is_late_or_of_others_is_no_offence():
    end = raw(b'{"id":"ID","exit_code":3,"total":0,"timed_out":null,"seconds":0,"oom":false}')
    others = [pack({"id": 5 * RANGE + 1, "errno": 2}), pack({"id": 77, "anything": 1}), pack({"job": 99, **END})]
    others += [pack({"job": 99, "stream": "stdout"}, b"x"), pack({"watch": 99, "events": [["lost", ""]]})]
    results, sandbox, keeper = await forged(*others, pack({"ready": True}), end, end)
    assert results[0].exit_code == 3 and not keeper.ended and sandbox.lost != "protocol"


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_mutations_of_real_frames_end_or_are_taken_but_never_hang(data):
    good = bytearray(
        b"".join(
            [
                pack({"id": 1, **END}, b"out"),
                pack({"job": 4, "stream": "output"}, b"x" * 20),
                pack({"id": 2, "errno": 2}),
            ]
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        if data.draw(st.booleans()):
            good[at] = data.draw(st.integers(0, 255))
        else:
            del good[at : at + data.draw(st.integers(1, 9))]

    async def check():
        ours, theirs = socket.socketpair()
        sandbox = ProcessSandbox("sb-1", Template("x"), await asyncio.open_connection(sock=ours), Keeper())
        _, writer = await asyncio.open_connection(sock=theirs)
        waiting = asyncio.create_task(sandbox.exec("true", timeout_s=5.0))
        await asyncio.sleep(0)
        writer.write(bytes(good))
        writer.close()
        sandbox_reason = asyncio.create_task(asyncio.wait_for(sandbox._receiver, 10))
        sandbox.mark_lost("killed") if await _idle(sandbox) else None
        await asyncio.gather(waiting, sandbox_reason, return_exceptions=True)
        assert sandbox.lost in ("protocol", "killed", "node-lost")

    asyncio.run(check())


async def _idle(sandbox) -> bool:
    """Its agent is gone, and nothing more is said."""
    for _ in range(200):
        if sandbox.lost:
            return False
        if sandbox._reader.at_eof():
            return True
        await asyncio.sleep(0.001)
    return True


@in_process
async def test_an_agent_that_lies_is_ended_and_its_neighbour_goes_on(pool):
    liar, neighbour = [await pool.create(Template(name)) for name in ("liar", "neighbour")]
    calls = [asyncio.create_task(liar.exec("sleep 100")) for _ in range(3)]
    await asyncio.sleep(0.2)
    liar._reader.feed_data(pack({"id": -5}))
    for call in calls:
        with pytest.raises(SandboxLost, match="protocol"):
            await asyncio.wait_for(call, 5)
    await until(lambda: pool.alive == 1)
    assert pool.stats().ended == {"protocol": 1}
    assert (await neighbour.exec("echo well")).text == "well\n"


# JSON, as the agent's program reads it, against Python's

READER = r"""
#include "agent.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
struct state here = {.listener = -1, .oom = -1, .paused_at = -1};
double now(void) { return 0; }
void signal_all(int number) { (void)number; }
static void write_value(const struct value *value, struct bytes *to) {
    switch (value->kind) {
    case NONE: add(to, "null", 4); return;
    case BOOL: addf(to, value->integer ? "true" : "false"); return;
    case NUMBER:
        if (value->is_whole) addf(to, "%lld", (long long)value->integer);
        else if (isinf(value->number)) addf(to, "%s1e999", value->number < 0 ? "-" : "");
        else addf(to, "%.17g", value->number);
        return;
    case TEXT: add_text(to, value->text, value->size); return;
    case LIST: case MAP:
        add(to, value->kind == MAP ? "{" : "[", 1);
        for (size_t i = 0; i < value->size; i++) {
            if (i) add(to, ",", 1);
            if (value->kind == MAP) { add_text(to, value->items[i].key, value->items[i].key_size); add(to, ":", 1); }
            write_value(&value->items[i], to);
        }
        add(to, value->kind == MAP ? "}" : "]", 1);
    }
}
char *reread(const char *text, size_t size) {
    struct value *value = parse(text, size);
    if (!value) return NULL;
    struct bytes out = {0};
    if (value->half) add(&out, "half", 4); else write_value(value, &out);
    add(&out, "", 1);
    forget(value);
    return out.data;
}
"""


@pytest.fixture(scope="module")
def reread(tmp_path_factory):
    """The header of a frame as the agent's program understands it, as JSON; None: it is none; "half"."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("json")
    (folder / "reader.c").write_text(READER)
    sources = [str(SOURCES / name) for name in ("json.c", "characters.c", "memory.c", "freezer.c")]
    command = [*compiler, "-std=gnu11", "-O1", "-shared", "-fPIC", f"-I{SOURCES}", "-o", str(folder / "reader.so")]
    subprocess.run([*command, str(folder / "reader.c"), *sources], check=True)
    library = ctypes.CDLL(str(folder / "reader.so"))
    library.reread.restype, library.reread.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_size_t]

    def call(data: bytes) -> str | None:
        found = library.reread(data, len(data))
        if found is None:
            return None
        try:
            return ctypes.string_at(found).decode("utf-8", "surrogateescape")
        finally:
            library.drop(ctypes.byref((ctypes.c_void_p * 3)(found, None, None)))

    return call


def depth(value) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, inner), default=0) if isinstance(value, dict | list) else 0


def halves(value) -> bool:
    """It holds half of a character that is no undecodable byte."""
    if isinstance(value, str):
        return any(0xD800 <= ord(c) < 0xE000 and not 0xDC80 <= ord(c) <= 0xDCFF for c in value)
    if isinstance(value, dict):
        return any(halves(part) for pair in value.items() for part in pair)
    return isinstance(value, list) and any(map(halves, value))


def refuse(word):
    raise ValueError(word)


def same(ours, theirs) -> bool:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list) and isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, int | float) and not isinstance(theirs, bool):
        try:
            theirs = float(theirs) if isinstance(ours, float) else theirs
        except OverflowError:
            theirs = math.inf if theirs > 0 else -math.inf
        return isinstance(ours, int | float) and (ours == theirs or math.isclose(ours, theirs, rel_tol=1e-15))
    return ours == theirs and type(ours) is type(theirs)


def agrees(reread, data: bytes) -> None:
    """Both take it, and understand the same; or neither does. The agent's takes objects of 8 levels at most."""
    try:
        value = json.loads(data.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        value = None
    found = reread(data)
    if not isinstance(value, dict) or depth(value) > 9:
        assert found is None or (isinstance(value, dict) and depth(value) > 8), data
    elif halves(value):
        assert found in ("half", None), data
    else:
        assert found is not None, data
        text = found.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
        assert same(json.loads(text), value), (data, found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
ODD = [
    b"{}",
    b'{"a":01}',
    b'{"a":-0}',
    b'{"a":-}',
    b'{"a":+1}',
    b'{"a":.5}',
    b'{"a":5.}',
    b'{"a":1e}',
    b'{"a":1e5}',
    b'{"a":1E+2}',
    b'{"a":0x10}',
    b'{"a":NaN}',
    b'{"a":Infinity}',
    b'{"a":-Infinity}',
    b'{"a":inf}',
    b'{"a":nan}',
    b'{"a":1e999}',
    b'{"a":' + b"1" * 400 + b"}",
    b'{"a":0.' + b"1" * 400 + b"}",
    b'{"a":9223372036854775807}',
    b'{"a":9223372036854775808}',
    b'{"a":1}x',
    b'{"a":1} ',
    b' \t\r\n{"a":1}',
    b'\x0b{"a":1}',
    b"\xef\xbb\xbf{}",
    b'{"a":1,}',
    b"{,}",
    b'{"a" 1}',
    b'{"a":}',
    b'{"a":"\n"}',
    b'{"a":"\t"}',
    b'{"a":"\x00"}',
    b'{"a":"\\u0000"}',
    b'{"a\\u0000b":1,"a":2}',
    b'{"a":1,"a":2}',
    b'{"a":"\\ud83d\\ude00"}',
    b'{"a":"\\ud83d"}',
    b'{"a":"\\ude00"}',
    b'{"a":"\\ud83dx"}',
    b'{"a":"\\ud83d\\u0041"}',
    b'{"a":"\\udcff"}',
    b'{"a":"\\x"}',
    b'{"a":"\\u12"}',
    b'{"a":"\\u12G4"}',
    b'{"a":"',
    b'{"a":"\\',
    b'{"a":"\\"}',
    b'{"a":tru}',
    b'{"a":truex}',
    b'{"a":' + b"[" * 7 + b"]" * 7 + b"}",
    b'{"a":' + b"[" * 50 + b"]" * 50 + b"}",
    b"[" * 10_000,
    b'{"a":[1 2]}',
    b"",
    b"1",
    b"[]",
]


@pytest.mark.parametrize("data", ODD, ids=range(len(ODD)))
def test_odd_documents(reread, data):
    agrees(reread, data)


@settings(max_examples=200, deadline=None)
@given(value=st.dictionaries(st.text(max_size=6), JSON, max_size=5), ascii=st.booleans())
def test_documents(reread, value, ascii):
    try:
        data = json.dumps(value, ensure_ascii=ascii).encode()
    except UnicodeEncodeError:
        return
    agrees(reread, data)


def mutate(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out) + 1)
        if rng.random() < 0.4:
            out[at:at] = rng.choice(
                [b"\\", b'"', b"0", b"e", b".", b"-", b"{", b"]", b",", b":", b"\\ud800", b" ", b"1"]
            )
        elif rng.random() < 0.5:
            del out[at : at + rng.randrange(1, 4)]
        elif at < len(out):
            out[at] = rng.randrange(32, 127)
    return bytes(out)


@pytest.mark.parametrize("count", [4000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_mutated_documents(reread, count):
    rng = random.Random(count)
    for _ in range(count):
        agrees(reread, mutate(rng, rng.choice(ODD[:50])))


# Output that is cut


def plain(data: bytes, limit: int) -> bytes:
    """The plain twin of Capture: what is kept, from all of it."""
    if len(data) <= limit:
        return data
    head, tail = data[: limit // 2], data[len(data) - (limit - limit // 2) :]
    for cut in range(4):  # the beginning of a character at the end of the head
        rest = head[len(head) - cut :]
        if cut and rest[0] >= 0xC2 and rest[1:] == bytes(b for b in rest[1:] if 0x80 <= b < 0xC0):
            if cut < (2 if rest[0] < 0xE0 else 3 if rest[0] < 0xF0 else 4 if rest[0] < 0xF5 else 1):
                head = head[: len(head) - cut]
            break
    skipped = next((n for n in range(3) if n >= len(tail) or not 0x80 <= tail[n] < 0xC0), 3)
    tail = tail[min(skipped, len(tail)) :]
    return head + b"\n[... %d bytes elided ...]\n" % (len(data) - len(head) - len(tail)) + tail


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text(max_size=40).map(lambda s: s.encode("utf-8", "replace")) | st.binary(max_size=40)),
    st.integers(2, 60),
)
def test_a_cut_splits_no_character(parts, limit):
    capture = Capture(limit)
    for part in parts:
        capture.add(part)
    assert capture.result() == plain(b"".join(parts), limit)


@pytest.mark.parametrize("letter", ["é", "€", "🙂", "x"])
async def test_output_is_cut_between_characters_and_says_so(pool, letter):
    sandbox = await pool.create(Template("x", output_bytes=1001))
    for shift in range(4):
        script = f'printf %s {"y" * shift}; python3 -I -S -c \'print("{letter}" * 5000, end="")\''
        result = await sandbox.exec(script)
        assert "\ufffd" not in result.text and "bytes elided" in result.text
        head, rest = result.output.split(b"\n[... ")
        number, tail = rest.split(b" bytes elided ...]\n")
        assert int(number) + len(head) + len(tail) == result.output_total == shift + 5000 * len(letter.encode())
    process = await sandbox.start(f"sleep 100 # {letter * 100}", follow=False)
    [row] = await sandbox.processes()
    assert row.script == beginning(f"sleep 100 # {letter * 100}".encode(), 80).decode()
    assert row.script.endswith(f"{letter}...") and "\ufffd" not in row.script
    await process.kill()


async def test_write_keeps_the_mode_of_what_is_there_and_takes_another(sandbox):
    async def mode(path):
        return (await sandbox.stat(path)).mode

    await sandbox.write("new", b"x")
    assert await mode("new") == 0o644
    await sandbox.exec("echo '#!/bin/sh' > run; chmod 750 run")
    await sandbox.write("run", b"#!/bin/sh\necho ran\n")
    assert await mode("run") == 0o750 and (await sandbox.exec("./run")).text == "ran\n"
    await sandbox.write("run", b"x", mode=0o600)
    assert await mode("run") == 0o600
    await sandbox.write("made", bytes(9 << 20), 0o755)
    assert await mode("made") == 0o755 and (await sandbox.stat("made")).size == 9 << 20

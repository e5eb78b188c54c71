"""What strangers found wrong with the gateway; each as they met it."""

import asyncio
import json

import httpx
import pytest

from tests.rollout.gateway.test_api import Forced
from tests.rollout.gateway.test_gateway import CALL, HELLO, TOOLS, Bench
from tests.rollout.scripted import Script
from venusrl.models.chat import ChatFormat
from venusrl.rollout.gateway import app as app_module
from venusrl.rollout.gateway import session as session_module
from venusrl.rollout.gateway.api import ChatCall, parsed
from venusrl.rollout.gateway.calls import CallReader, read_calls
from venusrl.rollout.gateway.generated import Generated
from venusrl.rollout.worker import Chunk


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_nothing_stays_of_what_was_generated_after_a_stop_string(stream, path):
    """vllm#47616: tokens after the stop string were captured and trained on; how many depended on the chunks."""
    bench = Bench(Script(lambda turn, seed: "say pre prompt and more"), chunk=8)
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": bench.script.chat.prompt(HELLO)}
    body = {**prompt, "stop": ["prompt"], "return_token_ids": True, "stream": stream, "user": "s"}
    answer = await bench.http.post(path, json=body)
    if stream:
        choice = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")][-1]["choices"][0]
    else:
        choice = answer.json()["choices"][0]
        assert answer.json()["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert bench.script.tokenizer.decode(choice["token_ids"]) == "say pre prompt"
    (segment,) = await bench.segments()
    assert sum(segment["loss_mask"]) == len(choice["token_ids"])


async def test_nothing_stays_of_what_was_generated_after_the_one_call_that_was_asked_for():
    bench = Bench(Script(lambda turn, seed: f"{CALL} and more"), chunk=64)
    fields = {"tools": TOOLS, "parallel_tool_calls": False, "return_token_ids": True, "logprobs": True}
    choice = (await bench.chat(HELLO, **fields))["choices"][0]
    assert bench.script.tokenizer.decode(choice["token_ids"]) == CALL
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_a_stop_string_that_spells_a_control_token_ends_at_the_token():
    bench = Bench()
    tokenizer = bench.script.tokenizer
    generated = Generated(tokenizer, ["<|im_start|>"])
    pieces = [generated.add(Chunk([token], [-1.0], 0)) for token in [*tokenizer.encode("say"), tokenizer.im_start]]
    assert ("".join(pieces), generated.finish) == ("say", "stop")


async def test_a_reply_that_is_cut_inside_a_call_says_so():
    bench = Bench(Script(lambda turn, seed: f"{CALL}\n{CALL}"))
    size = len(bench.script.tokenizer.encode(CALL)) + 9
    choice = (await bench.chat(HELLO, tools=TOOLS, max_tokens=size))["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    "text, arguments",
    [
        ('{"name": "r", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "r", "arguments": ""}', "{}"),
        ('{"name": "r", "arguments": {"x": 1e999}}', None),
        ('{"name": "r", "arguments": {"x": -1e999}}', None),
    ],
)
def test_arguments_are_read_or_shown_never_dropped(text, arguments):
    said, calls = read_calls(block(text))
    assert ([c.arguments for c in calls], said) == (([arguments], None) if arguments else ([], block(text)))


def test_a_thought_that_the_prompt_has_opened_holds_no_call():
    reader = CallReader(thinking=True)
    items = [*reader.feed(f"maybe {CALL}</think>\n\n{CALL}"), *reader.end()]
    assert len([item for item in items if not isinstance(item, str)]) == 1


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


async def test_a_call_that_is_asked_for_of_a_model_that_thinks_comes_after_the_thought():
    script = Forced("x")
    script.chat = ChatFormat(script.tokenizer, THINKS)
    assert script.chat.opens_thought() and not ChatFormat(script.tokenizer).opens_thought()
    bench = Bench(script)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 1}
    await bench.http.post("/v1/chat/completions", json=body)
    text = script.tokenizer.decode(bench.worker.requests[0].tokens)
    assert text.endswith("<think>\n</think>\n\n<tool_call>\n")


async def test_ids_of_calls_are_unique_over_histories():
    """octos#12: a client that trims its history met the same id twice."""
    bench = Bench(Script(lambda turn, seed: CALL))
    ids = [(await bench.chat(HELLO, tools=TOOLS))["choices"][0]["message"]["tool_calls"][0]["id"] for _ in range(3)]
    assert len(set(ids)) == 3


@pytest.mark.parametrize("arguments", [None, "", "null", "{}", {}])
async def test_a_history_may_leave_out_what_is_null(arguments):
    bench = Bench()
    call = {"id": "c", "type": None, "function": {"name": "run", "arguments": arguments}}
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    assert (await bench.http.post("/v1/chat/completions", json={"messages": history})).status_code == 200
    text = bench.script.tokenizer.decode(bench.worker.requests[0].tokens)
    assert '{"name": "run", "arguments": {}}' in text


async def test_logprobs_below_all_numbers_are_told_as_a_number():
    bench = Bench(Script(lambda turn, seed: "say"))
    generate = bench.worker.generate

    async def ranked(request):
        async for chunk in generate(request):
            yield Chunk(chunk.tokens, chunk.logprobs, 0, chunk.stop, [[(5, float("-inf"))] for _ in chunk.tokens])

    bench.worker.generate = ranked
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1}
    entry = (await bench.http.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["top_logprobs"][0]["logprob"] == -9999.0
    streamed = await bench.http.post("/v1/chat/completions", json={**body, "stream": True})
    assert "Infinity" not in streamed.text


def test_offsets_of_a_text_count_its_characters_and_bytes_that_are_none_do_not_pile_up():
    script = Script()
    generated = Generated(script.tokenizer)
    tokens = [*script.tokenizer.encode("é日 ab"), script.tokenizer.im_end]
    for token in tokens:
        generated.add(Chunk([token], [-1.0], 0))
    offsets = generated.text_logprobs()["text_offset"]
    spelled = [script.tokenizer.bytes_of(token) for token in tokens]
    assert offsets[spelled.index(b" ")] == 2 and offsets[-1] == 5
    part = script.tokenizer.encode("é")[0]  # half a character, again and again
    generated, decoded = Generated(script.tokenizer), []
    tokenizer = generated._tokenizer
    generated._tokenizer = type("Counting", (), {
        "decode": lambda self, ids: (decoded.append(len(ids)), tokenizer.decode(ids))[1],
        "bytes_of": lambda self, token: tokenizer.bytes_of(token),
    })()  # fmt: skip
    for _ in range(500):
        generated.add(Chunk([part], [-1.0], 0))
    assert max(decoded) < 100 and len(generated.text) == 500


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"top_p": 0.5}, "top_p"),
        ({"nonsense": 1}, "nonsense"),
        ({"stop": [""]}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"n": 100}, "n"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools[0].function.name"),
    ],
)
async def test_an_error_has_the_field_as_its_param(fields, param):
    bench = Bench()
    bench.gateway._queue = 8
    answer = await bench.http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_prompt_that_is_too_long_is_the_fault_of_the_prompt():
    bench = Bench(max_length=64)
    answer = await bench.http.post("/v1/completions", json={"prompt": "go on " * 99})
    assert answer.json()["error"]["param"] == "prompt"


async def test_addresses_that_end_with_a_slash_are_known():
    assert (await Bench().http.get("/v1/models/")).json()["data"][0]["id"] == "tiny"


async def test_ids_of_the_prompt_are_where_clients_look_for_them():
    bench = Bench()
    answer = await bench.chat(HELLO, return_token_ids=True)
    assert answer["prompt_token_ids"] == answer["choices"][0]["prompt_token_ids"] == bench.worker.requests[0].tokens


def test_a_body_of_a_million_wrong_members_costs_one_error():
    import tracemalloc

    body = b'{"messages": [' + b"0," * 500_000 + b"0]}"
    tracemalloc.start()
    with pytest.raises(Exception, match=r"messages\[0\]"):
        parsed(ChatCall, body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6, peak


@pytest.mark.parametrize("where", ["tools", "arguments", "kwargs"])
async def test_what_a_template_may_show_is_measured_before_it_is_rendered(where, monkeypatch):
    bench = Bench(max_length=64)
    monkeypatch.setattr(bench.script.chat, "prompt", lambda *args: pytest.fail("it was rendered"))
    long = "x" * 500_000
    fields = {"messages": HELLO}
    if where == "tools":
        fields["tools"] = [{"type": "function", "function": {"name": "run", "description": long}}]
    elif where == "arguments":
        call = {"id": "c", "function": {"name": "run", "arguments": {long: 1}}}
        fields["messages"] = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    else:
        fields["chat_template_kwargs"] = {"k": [long]}
    answer = await bench.http.post("/v1/chat/completions", json=fields)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_what_sessions_keep_is_bounded_and_the_longest_idle_are_forgotten(monkeypatch):
    monkeypatch.setattr(app_module, "MOST_BYTES", 60_000)
    bench = Bench()
    for i in range(6):
        extra = [{"role": "user", "content": "go on", "unseen": "x" * 20_000}]
        await bench.chat(extra, session=f"s{i}")
        await bench.clock.advance(1)
    await bench.chat(HELLO, session="last")
    kept = [name for name in bench.gateway._open if name != "last"]
    assert kept and kept == [f"s{i}" for i in range(6 - len(kept), 6)] and len(kept) <= 3
    assert "s0/0" in bench.worker.released


async def test_a_session_keeps_its_newest_segments(monkeypatch):
    monkeypatch.setattr(session_module, "MOST_SEGMENTS", 3)
    bench = Bench()
    for _ in range(5):
        await bench.chat(HELLO)  # every time a conversation of its own
    assert [s["id"] for s in await bench.segments()] == ["s/2", "s/3", "s/4"]
    assert bench.worker.released == ["s/0", "s/1"]
    answer = await bench.chat(HELLO, n=2, seed=1)
    history = [*HELLO, answer["choices"][1]["message"], {"role": "user", "content": "wait"}]
    await bench.chat(history)
    assert [len(s["messages"]) for s in await bench.segments()] == [2, 2, 4]


async def test_a_session_that_is_forgotten_while_it_answers_leaves_its_name_free():
    bench = Bench()
    bench.worker.gate.clear()
    slow = asyncio.create_task(bench.chat(HELLO))
    while not bench.worker.requests:
        await asyncio.sleep(0.01)
    assert (await bench.http.delete("/sessions/s")).is_success
    fresh = asyncio.create_task(bench.chat(HELLO))
    while len(bench.worker.requests) < 2:
        await asyncio.sleep(0.01)
    bench.worker.gate.set()
    await asyncio.gather(slow, fresh)
    assert len({request.trajectory for request in bench.worker.requests}) == 2
    await bench.chat(HELLO)
    assert len(await bench.segments()) == 2 and not bench.gateway._leaving


async def test_a_session_that_is_idle_is_forgotten_by_whoever_looks():
    bench = Bench(idle_s=10.0)
    await bench.chat(HELLO)
    await bench.clock.advance(11)
    assert (await bench.http.get("/sessions/s")).status_code == 404


async def test_large_bodies_do_not_hold_up_small_ones(monkeypatch):
    """Eight callers with megabytes of tools took every thread; a neighbour waited 34 s."""
    bench = Bench(max_length=10**9)
    held, released = asyncio.Event(), asyncio.Event()
    loop, real = asyncio.get_running_loop(), bench.script.chat.prompt

    def prompt(messages, tools, options):
        if tools:
            loop.call_soon_threadsafe(held.set)
            asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
        return real(messages, (), options)

    monkeypatch.setattr(bench.script.chat, "prompt", prompt)
    big = [{"type": "function", "function": {"name": "run", "description": "x" * 100_000}}]
    transport = httpx.ASGITransport(bench.gateway.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30) as http:
        body = {"messages": HELLO, "tools": big, "max_tokens": 1}
        large = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(40)]
        await held.wait()
        assert (await bench.chat(HELLO, session="small"))["choices"]
        released.set()
        assert {answer.status_code for answer in await asyncio.gather(*large)} == {200}

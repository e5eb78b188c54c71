"""The clients that people have, unchanged, against a server: openai (sync, async, streamed) and litellm."""

import asyncio
import contextlib
import json
import os
import time

import httpx
import openai
import pytest

from tests.rollout.gateway.test_gateway import CALL, HELLO, TOOLS, Bench
from tests.rollout.scripted import Script
from venusrl.core.door import Door
from venusrl.core.listening import Server, listen

KEY = "k" * 32


@contextlib.asynccontextmanager
async def served(bench: Bench, key: str | None = None):
    """The base URL of a gateway behind its door."""
    listener, address = listen("127.0.0.1", 0)
    server = Server(Door(bench.gateway.app(), key=key), listener, grace_s=1)
    task = asyncio.create_task(server.run())
    try:
        yield f"{address}/v1"
    finally:
        server.stop()
        await task


def client_of(url: str, key: str = "none"):
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)


async def test_openai_async_whole_and_streamed_say_the_same():
    bench = Bench(Script(lambda turn, seed: "naïve café — 日本語 🙂"))
    async with served(bench) as url, client_of(url) as client:
        whole = await client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True)
        assert whole.choices[0].message.content == "naïve café — 日本語 🙂"
        entries = whole.choices[0].logprobs.content
        assert bytes(b for entry in entries[:-1] for b in entry.bytes).decode() == "naïve café — 日本語 🙂"
        assert whole.usage.completion_tokens == len(entries) and whole.usage.prompt_tokens > 0
        text, told, usage = "", [], None
        options = {"include_usage": True}
        async for chunk in await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options=options, logprobs=True
        ):
            usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                told += choice.logprobs.content if choice.logprobs else []
        assert (text, usage) == (whole.choices[0].message.content, whole.usage)
        assert [entry.bytes for entry in told] == [entry.bytes for entry in entries]
        models = [model async for model in client.models.list()]
        assert models[0].id == "tiny" and models[0].created > 0


async def test_openai_streams_calls_as_calls_and_goes_on_with_their_results():
    said = [f"I look.\n{CALL}\n{CALL}", "done"]
    bench = Bench(Script(lambda turn, seed: said[turn]), chunk=1)
    async with served(bench) as url, client_of(url) as client:
        content, calls, finish = "", {}, None
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, tools=TOOLS, stream=True, user="s", extra_body={"return_token_ids": True}
        )
        async for chunk in stream:
            (choice,) = chunk.choices
            finish = choice.finish_reason or finish
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                call["arguments"] += part.function.arguments or ""
        assert (content, finish) == ("I look.", "tool_calls") and "<tool_call>" not in content
        assert [c["arguments"] for c in calls.values()] == ['{"command": "ls"}'] * 2
        assert len({c["id"] for c in calls.values()}) == 2
        functions = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls.values()
        ]
        results = [{"role": "tool", "tool_call_id": c["id"], "content": "answer"} for c in functions]
        history = [*HELLO, {"role": "assistant", "content": content, "tool_calls": functions}, *results]
        answer = await client.chat.completions.create(model="tiny", messages=history, tools=TOOLS, user="s")
        assert answer.choices[0].message.content == "done"
    assert len(await bench.segments()) == 1  # it went on from the captured tokens


async def test_openai_sync_completions_samples_and_errors():
    bench = Bench(Script(lambda turn, seed: f"say {seed}"), max_length=200)

    def use(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            many = client.chat.completions.create(model="tiny", messages=HELLO, n=3, seed=7, user="s")
            assert [choice.index for choice in many.choices] == [0, 1, 2]
            assert len({choice.message.content for choice in many.choices}) == 3
            again = client.chat.completions.create(model="tiny", messages=HELLO, n=3, seed=7)
            assert [c.message for c in again.choices] == [c.message for c in many.choices]
            prompt = bench.script.chat.prompt(HELLO)
            done = client.completions.create(model="tiny", prompt=prompt, logprobs=0)
            assert len(done.choices[0].logprobs.token_logprobs) == done.usage.completion_tokens
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "go on " * 400}])
            assert refused.value.code == "context_length_exceeded"
            assert "maximum context length is 200 tokens" in str(refused.value)
            with pytest.raises(openai.BadRequestError, match="top_p"):
                client.chat.completions.create(model="tiny", messages=HELLO, top_p=0.5)
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve("other")

    async with served(bench) as url:
        await asyncio.to_thread(use, url)
    segments = await bench.segments()
    assert len(segments) == 3 and len({tuple(s["tokens"]) for s in segments}) == 3


async def test_a_sample_is_gone_on_from_by_the_history_that_has_it():
    bench = Bench(Script(lambda turn, seed: f"say {turn} {seed % 10}"))
    first = await bench.chat(HELLO, n=2, seed=3)
    chosen = first["choices"][1]["message"]
    before = await bench.segments()
    second = await bench.chat([*HELLO, chosen, {"role": "user", "content": "wait"}], n=2, seed=4)
    segments = await bench.segments()
    assert len(segments) == 3 and segments[0] == before[0]
    known = len(before[1]["tokens"])
    assert all(s["tokens"][:known] == before[1]["tokens"] for s in segments[1:])
    assert [s["messages"][-1] for s in segments[1:]] == [c["message"] for c in second["choices"]]


async def test_the_key_is_asked_for_and_known_to_openai():
    bench = Bench()
    async with served(bench, KEY) as url:
        async with client_of(url, KEY) as client:
            assert (await client.chat.completions.create(model="tiny", messages=HELLO)).choices
        for wrong in ("k" * 31, "", "K" * 32):
            async with client_of(url, wrong or "none") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.chat.completions.create(model="tiny", messages=HELLO)
    assert len(bench.worker.requests) == 1


async def test_calls_beyond_the_queue_are_told_to_come_again():
    bench = Bench(slots=2)
    bench.gateway._queue = 1
    bench.worker.gate.clear()
    async with served(bench) as url, client_of(url) as client:
        first = [
            asyncio.create_task(client.chat.completions.create(model="tiny", messages=HELLO, user=f"{i}"))
            for i in range(3)
        ]
        while bench.gateway._under_way < 3:
            await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="tiny", messages=HELLO)
        assert int(refused.value.response.headers["retry-after"]) >= 1 and refused.value.code == "queue_full"
        bench.worker.gate.set()
        assert len(await asyncio.gather(*first)) == 3
        assert (await client.chat.completions.create(model="tiny", messages=HELLO)).choices


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_hangs_up_frees_its_slot_and_its_session(stream):
    bench = Bench(Script(lambda turn, seed: "go on " * 2000), max_length=100_000)
    async with served(bench) as url:
        for waits in (False, True):  # while it generates, and while it waits for its first token
            (bench.worker.gate.clear if waits else bench.worker.gate.set)()
            async with client_of(url) as client:
                call = client.chat.completions.create(
                    model="tiny", messages=HELLO, stream=stream, max_tokens=50_000, user="s"
                )
                task = asyncio.create_task(call)
                while not bench.worker.running:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if stream and not waits and not task.cancelled():
                    await task.result().close()
            bench.worker.gate.set()
            for _ in range(100):
                if not bench.worker.running and not bench.gateway._under_way:
                    break
                await asyncio.sleep(0.01)
            assert not bench.worker.running and bench.gateway._under_way == 0
        async with client_of(url) as client:
            answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2, user="s")
        assert answer.usage.completion_tokens == 2
    (segment,) = await bench.segments()
    assert sum(segment["loss_mask"]) == 2  # nothing of what nobody heard


async def test_litellm_whole_streamed_and_its_errors():
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    bench = Bench(Script(lambda turn, seed: f"wait {CALL}"), max_length=2000)
    async with served(bench) as url:
        fields = {"model": "openai/tiny", "api_base": url, "api_key": "none", "messages": HELLO, "max_retries": 0}
        answer = await litellm.acompletion(**fields, tools=TOOLS)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("run", '{"command": "ls"}')
        chunks = [c async for c in await litellm.acompletion(**fields, tools=TOOLS, stream=True)]
        built = litellm.stream_chunk_builder(chunks, messages=HELLO)
        assert built.choices[0].message.tool_calls[0].function.arguments == '{"command": "ls"}'
        assert built.choices[0].message.content == "wait"
        with pytest.raises(litellm.ContextWindowExceededError):
            long = [{"role": "user", "content": "go on " * 1000}]
            await litellm.acompletion(**{**fields, "messages": long})


async def test_a_large_body_holds_up_nobody_and_one_that_is_too_large_is_refused():
    bench = Bench(max_length=100_000)
    async with served(bench) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        waits: list[float] = []
        done = asyncio.Event()

        async def ping():
            while not done.is_set():
                began = time.monotonic()
                assert (await http.get("/models")).is_success
                waits.append(time.monotonic() - began)
                await asyncio.sleep(0.01)

        pinging = asyncio.create_task(ping())
        began = time.monotonic()
        body = json.dumps({"messages": [{"role": "user", "content": "some words of text " * 100_000}]}).encode()
        long = await http.post("/chat/completions", content=body)
        took = time.monotonic() - began
        done.set()
        await pinging
        assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
        assert max(waits) < max(0.25, took / 4), (max(waits), took)
        many = await http.post("/chat/completions", content=b" " * (17 * 2**20))
        assert many.status_code == 400 and "more than" in many.text
        huge = {"messages": [{"role": "user", "content": "x" * 15_000_000}]}  # no token is that long: not made tokens
        assert (await http.post("/chat/completions", json=huge)).json()["error"]["code"] == "context_length_exceeded"

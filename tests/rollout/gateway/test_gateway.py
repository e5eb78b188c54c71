"""The OpenAI API over a scripted worker: what it answers, what it captures, what it refuses."""

import asyncio
import json

import httpx
import pytest

from tests.rollout.scripted import Script, ScriptedWorker
from venusrl.core.clock import VirtualClock
from venusrl.rollout.gateway.app import Gateway

HELLO = [{"role": "user", "content": "go on"}]
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {}}}]


class Bench:
    def __init__(self, script: Script | None = None, idle_s: float = 3600.0, **options):
        self.script = script or Script()
        self.clock = VirtualClock()
        self.worker = ScriptedWorker(self.script, max_length=options.pop("max_length", 4096), **options)
        self.gateway = Gateway(
            self.worker, self.script.tokenizer, self.script.chat, "tiny", idle_s=idle_s, clock=self.clock
        )
        transport = httpx.ASGITransport(self.gateway.app())
        self.http = httpx.AsyncClient(transport=transport, base_url="http://gateway")

    async def chat(self, messages, session="s", **fields):
        answer = await self.http.post(
            "/v1/chat/completions", json={"messages": messages, **fields}, headers={"x-session-id": session}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def segments(self, session="s"):
        return (await self.http.get(f"/sessions/{session}")).json()["segments"]


async def test_a_conversation_is_captured_as_it_was_generated():
    """Every call goes on from the tokens of the one before: no text is made tokens again."""
    bench = Bench(Script(lambda turn, seed: f"  say {turn} \n"))  # white space that a template would strip
    messages, replies = list(HELLO), []
    for turn in range(3):
        answer = await bench.chat(messages, return_token_ids=True, logprobs=True, seed=7)
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": f"  say {turn} \n"}
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        replies.append(choice["token_ids"])
        messages += [choice["message"], {"role": "user", "content": f"reply {turn}"}]
    (segment,) = await bench.segments()
    generated = [t for t, mask in zip(segment["tokens"], segment["loss_mask"], strict=True) if mask]
    assert generated == [t for reply in replies for t in reply]
    second = bench.worker.requests[1].tokens
    assert second == segment["tokens"][: len(second)]
    assert {r.trajectory for r in bench.worker.requests} == {"s/0"}


async def test_a_history_that_diverges_opens_a_segment():
    bench = Bench()
    first = await bench.chat(HELLO)
    reply = first["choices"][0]["message"]
    before = (await bench.segments())[0]
    edited = [*HELLO, {**reply, "content": "I never said that"}, {"role": "user", "content": "wait"}]
    await bench.chat(edited)
    await bench.chat([*HELLO, reply, {"role": "user", "content": "done"}])  # and back to the first
    segments = await bench.segments()
    assert [len(segments), segments[1]["id"]] == [2, "s/1"]
    assert segments[0]["tokens"][: len(before["tokens"])] == before["tokens"]
    await bench.chat(HELLO)  # the same opening again
    assert len(await bench.segments()) == 3
    await bench.chat(HELLO, session="other")
    assert len(await bench.segments("other")) == 1


async def test_tools_are_offered_called_and_answered():
    bench = Bench(Script(lambda turn, seed: f"wait {CALL}" if turn == 0 else "done"))
    answer = await bench.chat(HELLO, tools=TOOLS)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "wait"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "run", "arguments": '{"command": "ls"}'}
    text = bench.script.tokenizer.decode(bench.worker.requests[0].tokens)
    assert '"name": "run"' in text and text.index("system") < text.index("<tools>")
    results = [{"role": "tool", "tool_call_id": call["id"], "content": c} for c in ("answer 1", "answer 2")]
    await bench.chat([*HELLO, choice["message"], *results], tools=TOOLS)
    assert len(await bench.segments()) == 1
    text = bench.script.tokenizer.decode(bench.worker.requests[1].tokens)
    assert text.count("<tool_response>") == 2 and text.rindex("user") < text.index("<tool_response>")


async def test_a_call_that_cannot_be_read_is_given_as_text():
    said = '<tool_call>\n{"name": run}\n</tool_call>'
    bench = Bench(Script(lambda turn, seed: said))
    choice = (await bench.chat(HELLO, tools=TOOLS))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": said} and choice["finish_reason"] == "stop"


async def test_streaming_gives_the_same_in_pieces():
    bench = Bench(Script(lambda turn, seed: "naïve café — 日本語 🙂 done"))
    whole = (await bench.chat(HELLO, session="a"))["choices"][0]["message"]["content"]
    pieces, last = [], None
    body = {"messages": HELLO, "stream": True, "return_token_ids": True}
    async with bench.http.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": "b"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                last = json.loads(line[6:])["choices"][0]
                pieces.append(last["delta"].get("content", ""))
                assert "\ufffd" not in pieces[-1]
            elif line:
                assert line == "data: [DONE]"
    assert "".join(pieces) == whole == "naïve café — 日本語 🙂 done"
    assert len(pieces) > 3 and last["finish_reason"] == "stop"
    assert (await bench.segments("a"))[0]["tokens"] == (await bench.segments("b"))[0]["tokens"]


@pytest.mark.parametrize("stop, text", [("re ", "say p"), (["zzz", "mpt"], "say pre pro"), ("say", "")])
async def test_stop_texts_end_a_reply(stop, text):
    bench = Bench(Script(lambda turn, seed: "say pre prompt done"))
    choice = (await bench.chat(HELLO, stop=stop))["choices"][0]
    assert choice["message"]["content"] == text and choice["finish_reason"] == "stop"
    assert not bench.worker.running
    pieces = []
    body = {"messages": HELLO, "stream": True, "stop": stop}
    async with bench.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["delta"].get("content", ""))
    assert "".join(pieces) == text


async def test_completions_of_text_and_of_ids():
    bench = Bench()
    prompt = bench.script.chat.prompt(HELLO)
    body = {"prompt": prompt, "user": "ids", "return_token_ids": True, "max_tokens": 2, "temperature": 0}
    choice = (await bench.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["prompt_token_ids"] == prompt and len(choice["token_ids"]) == 2
    assert choice["finish_reason"] == "length"
    longer = [*prompt, *choice["token_ids"]]
    await bench.http.post("/v1/completions", json={**body, "prompt": [*longer, 1]})
    (segment,) = await bench.segments("ids")
    assert segment["tokens"][: len(longer)] == longer and sum(segment["loss_mask"]) == 4
    assert (await bench.http.get("/v1/models")).json()["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    "body, says",
    [
        ({}, "messages: it is missing"),
        ({"messages": []}, "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content: must be text"),
        ({"messages": HELLO, "n": 0}, "n: "),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens: "),
        ({"messages": HELLO, "temperature": "hot"}, 'not "hot"'),
        ({"messages": HELLO, "top_p": 0.5}, "top_p=0.5"),
        ({"messages": HELLO, "stop": [""]}, "stop="),
        ({"messages": HELLO, "stop": 3}, "stop: "),
        ({"messages": HELLO, "seed": -1}, "not -1"),
        ({"messages": HELLO, "tools": "all"}, "tools: "),
        ({"messages": [{"role": "user", "content": "go on " * 400}]}, "maximum context length is 64 tokens"),
    ],
)
async def test_bad_calls_are_answered_with_what_is_wrong(body, says):
    bench = Bench(max_length=64)
    answer = await bench.http.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    assert (await bench.http.post("/v1/chat/completions", content=b"{")).status_code == 400
    assert (await bench.http.post("/v1/completions", json={"prompt": ""})).status_code == 400
    assert (await bench.http.post("/v1/completions", json={"prompt": ["a", "b"]})).status_code == 400
    assert (await bench.chat(HELLO))["choices"]  # the session is not stuck


async def test_sessions_are_forgotten_on_demand():
    bench = Bench()
    await bench.chat(HELLO)
    assert (await bench.http.delete("/sessions/s")).json()["deleted"] and bench.worker.released == ["s/0"]
    assert (await bench.http.get("/sessions/s")).status_code == 404
    assert (await bench.http.delete("/sessions/s")).status_code == 404
    await bench.http.post("/v1/chat/completions", json={"messages": HELLO})  # of no session
    assert not bench.gateway._open and len(bench.worker.released) == 2


async def test_calls_of_a_session_wait_for_one_another():
    bench = Bench()
    answers = await asyncio.gather(*(bench.chat(HELLO) for _ in range(4)))
    assert len({a["id"] for a in answers}) == 4 and bench.worker.most_running == 1
    assert len(await bench.segments()) == 4


async def alive(bench, *names) -> list[str]:
    return [name for name in names if (await bench.http.get(f"/sessions/{name}")).is_success]


async def test_a_session_that_is_idle_for_long_is_forgotten():
    bench = Bench(idle_s=10.0)
    await bench.chat(HELLO, session="old")
    await bench.clock.advance(6)
    await bench.chat(HELLO, session="young")
    await bench.clock.advance(6)
    await bench.chat(HELLO, session="new")
    assert await alive(bench, "old", "young", "new") == ["young", "new"]
    assert bench.worker.released == ["old/0"]


async def test_a_long_call_is_not_idle():
    bench = Bench(idle_s=10.0)
    bench.worker.gate.clear()
    slow = asyncio.create_task(bench.chat(HELLO, session="slow"))
    while not bench.worker.requests:
        await asyncio.sleep(0.01)
    await bench.clock.advance(60)
    other = asyncio.create_task(bench.chat(HELLO, session="other"))
    await asyncio.sleep(0.05)
    bench.worker.gate.set()
    await asyncio.gather(slow, other)
    await bench.chat(HELLO, session="third")
    assert await alive(bench, "slow", "other", "third") == ["slow", "other", "third"]


async def test_a_session_may_be_forgotten_while_calls_of_it_run_and_wait():
    bench = Bench(idle_s=10.0)
    bench.worker.gate.clear()
    calls = [asyncio.create_task(bench.chat(HELLO, session="s")) for _ in range(3)]
    while not bench.worker.requests:
        await asyncio.sleep(0.01)
    assert (await bench.http.delete("/sessions/s")).is_success
    bench.worker.gate.set()
    await asyncio.gather(*calls)
    assert len(await bench.segments("s")) == 2  # the two that came after
    await bench.clock.advance(60)
    await bench.chat(HELLO, session="other")
    assert await alive(bench, "s") == []


async def test_a_call_that_fails_leaves_the_turn_of_the_next_one_alone():
    bench = Bench(max_length=60)
    fits = asyncio.gather(*(bench.chat(HELLO, session="s") for _ in range(2)))
    long = [{"role": "user", "content": "go on please, turn 0123456789 " * 9}]
    failed = [
        bench.http.post("/v1/chat/completions", json={"messages": long}, headers={"x-session-id": "s"})
        for _ in range(3)
    ]
    answers = await asyncio.gather(*failed)
    assert [a.status_code for a in answers] == [400] * 3
    await fits
    await bench.chat(HELLO, session="s")

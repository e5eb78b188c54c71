"""What a call may ask for: every field null, refused, or out of range; hostile bodies between good calls."""

import dataclasses
import json
import random

import pytest

from tests.rollout.gateway.test_gateway import CALL, HELLO, TOOLS, Bench
from tests.rollout.scripted import Script
from venusrl.rollout.gateway.api import ACCEPTED, ONLY, ChatCall, CompletionCall

OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}


async def post(bench: Bench, path: str = "/v1/chat/completions", **fields):
    return await bench.http.post(path, json=fields)


@pytest.mark.parametrize("name", sorted({*ChatCall.model_fields, *ACCEPTED, *ONLY} - {"messages"}))
async def test_null_is_the_default_of_every_field_of_a_chat_call(name):
    answer = await post(Bench(), messages=HELLO, **{name: None})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", sorted({*CompletionCall.model_fields, *ACCEPTED, *ONLY} - {"prompt"}))
async def test_null_is_the_default_of_every_field_of_a_completion(name):
    bench = Bench()
    answer = await post(bench, "/v1/completions", prompt=bench.script.chat.prompt(HELLO), **{name: None})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", sorted(ONLY))
async def test_what_is_not_supported_is_refused_by_name_and_its_neutral_value_is_not(name):
    for value in (0.73, "odd", {"type": "json_object"}, [5]):
        answer = await post(Bench(), messages=HELLO, **{name: value})
        error = answer.json()["error"]
        assert answer.status_code == 400 and name in error["message"] and error["type"] == "invalid_request_error"
    for value in ONLY[name]:
        assert (await post(Bench(), messages=HELLO, **{name: value})).status_code == 200


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": "0.5"}, "temperature"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 129}, "n:"),
        ({"seed": 2**31}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options is only allowed"),
        ({"stream": True, "stream_options": {"more": 1}}, "stream_options"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x'"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "tool", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0]"),
        ({"user": "u" * 201}, "user"),
    ],
)
async def test_a_field_out_of_range_is_refused_by_name(fields, says):
    answer = await Bench().http.post(
        "/v1/chat/completions", content=json.dumps({"messages": HELLO, **fields}), headers={"x-session-id": "s"}
    )
    assert answer.status_code == 400 and says in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "cut \\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "x", "name": "\\udc00"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop": ["\\ud83d"]}',
        b'{"messages": [{"role": "user", "content": "x"}], "user": "\\ud83d"}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
        b'{"name": "r", "parameters": {"\\ud83d": 1}}}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": '
        b'{"name": "r", "parameters": {"x": NaN}}}]}',
        b'{"messages": ' + b"[" * 10**5,
        b'{"messages": [], "seed": ' + b"9" * 10**5 + b"}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"",
    ],
)
async def test_text_and_json_that_nobody_can_read_is_400_and_the_session_goes_on(body):
    bench = Bench()
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = await bench.http.post(path, content=body, headers={"x-session-id": "s"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert (await bench.chat(HELLO))["choices"]


async def test_text_of_a_completion_with_half_a_pair_is_400():
    answer = await Bench().http.post("/v1/completions", content=b'{"prompt": "x \\ude00"}')
    assert answer.status_code == 400


async def test_other_addresses_and_methods_are_answered_in_json():
    bench = Bench()
    for method, path, status in (
        ("GET", "/v2", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/other", 404),
    ):
        answer = await bench.http.request(method, path)
        assert answer.status_code == status and answer.json()["error"]["message"]
    model = (await bench.http.get("/v1/models/tiny")).json()
    assert model == (await bench.http.get("/v1/models")).json()["data"][0] and model["created"] > 10**9


JUNK = [None, True, -1, 0, 2**63, 1e308, "", "text", "\ud800", [], [[]], {}, {"role": "user"}, [1, "a"], "9" * 5000]


async def test_random_calls_between_good_ones_are_answered_and_the_good_ones_all_succeed():
    rng = random.Random(0)
    bench = Bench()
    names = [*ChatCall.model_fields, *CompletionCall.model_fields, *ONLY, *ACCEPTED, "zzz"]
    good = (await bench.chat(HELLO, seed=5))["choices"][0]["message"]
    for i in range(400):
        fields = {rng.choice(names): rng.choice(JUNK) for _ in range(rng.randint(0, 4))}
        base = {"messages": HELLO} if rng.random() < 0.7 else {"prompt": [1, 2]}
        body = json.dumps({**base, **fields, **({"stream": True} if rng.random() < 0.2 else {})})
        path = rng.choice(["/v1/chat/completions", "/v1/completions"])
        headers = {"x-session-id": "s"} if rng.random() < 0.3 else {}
        answer = await bench.http.post(path, content=body.encode(), headers=headers)
        assert answer.status_code in (200, 400), (body, answer.text)
        if i % 20 == 0:
            assert (await bench.chat(HELLO, session=f"good-{i}", seed=5))["choices"][0]["message"] == good
    assert not bench.worker.running and bench.gateway._under_way == 0


async def test_tool_choice_none_offers_no_tools_and_reads_no_calls():
    bench = Bench(Script(lambda turn, seed: CALL))
    choice = (await bench.chat(HELLO, tools=TOOLS, tool_choice="none"))["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL} and choice["finish_reason"] == "stop"
    assert "<tools>" not in bench.script.tokenizer.decode(bench.worker.requests[0].tokens)


NAMED = {"type": "function", "function": {"name": "other"}}


@pytest.mark.parametrize(
    "choice, said, called",
    [
        ("required", '{"name": "run", "arguments": {}}\n</tool_call>', "run"),
        ("required", "no call here", None),
        (NAMED, ' {"a": 1}}\n</tool_call>', "other"),
        (NAMED, " nothing", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_asked_for_is_made_or_the_answer_is_an_error(choice, said, called, stream):
    bench = Bench(Forced(said))
    body = {"messages": HELLO, "tools": [*TOOLS, OTHER], "tool_choice": choice, "stream": stream}
    answer = await bench.http.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"})
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [e["choices"][0]["delta"] for e in events if e.get("choices")]
        calls = [c for d in deltas for c in d.get("tool_calls", ())]
        names = [c["function"]["name"] for c in calls if "name" in c["function"]]
        error = events[-1].get("error")
    else:
        reply = answer.json()
        error = reply.get("error")
        names = [] if error else [c["function"]["name"] for c in reply["choices"][0]["message"]["tool_calls"]]
        assert answer.status_code == (200 if called else 400)
    if called is None:
        assert error["code"] == "tool_choice_not_met" and not await bench.segments()  # as before the call
    else:
        assert names == [called] and error is None
        (segment,) = await bench.segments()
        assert 0 < sum(segment["loss_mask"]) < len(segment["loss_mask"])


class Forced(Script):
    """Says a text after whatever its one reply was made to begin with."""

    def __init__(self, said: str):
        super().__init__(lambda turn, seed: said)
        self._begin: int | None = None

    def next_token(self, tokens, seed):
        self._begin = len(tokens) if self._begin is None else self._begin
        return [*self.tokenizer.encode(self._reply(0, seed)), self.tokenizer.im_end][len(tokens) - self._begin]


async def test_one_call_at_a_time_ends_after_the_first():
    bench = Bench(Script(lambda turn, seed: f"{CALL}\n{CALL}"))
    both = (await bench.chat(HELLO, session="a", tools=TOOLS))["choices"][0]["message"]["tool_calls"]
    one = (await bench.chat(HELLO, session="b", tools=TOOLS, parallel_tool_calls=False))["choices"][0]
    assert len(both) == 2 and len(one["message"]["tool_calls"]) == 1 and one["finish_reason"] == "tool_calls"


async def test_the_most_likely_tokens_are_told_in_both_shapes():
    bench = Bench(Script(lambda turn, seed: "say"))
    generate = bench.worker.generate

    async def ranked(request):
        async for chunk in generate(request):
            top = [[(token, -0.5), (9, -1.5)][: request.top_logprobs] for token in chunk.tokens]
            yield dataclasses.replace(chunk, top=top)

    bench.worker.generate = ranked
    entries = (await bench.chat(HELLO, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    for entry in entries:
        first, second = entry["top_logprobs"]
        assert (first["token"], first["logprob"], second["logprob"]) == (entry["token"], -0.5, -1.5)
    body = {"prompt": bench.script.chat.prompt(HELLO), "logprobs": 1}
    told = (await bench.http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [{token: -0.5} for token in told["tokens"]]

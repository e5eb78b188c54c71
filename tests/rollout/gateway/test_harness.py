"""Programs that call the OpenAI API, as the agent loops of real rollouts: the service, its queue and its capture."""

import asyncio
import contextlib
import json
import sys

import httpx
import pytest

from tests.rollout.scripted import Script, ScriptedWorker
from venusrl.core.clock import WallClock
from venusrl.core.env import Observation
from venusrl.core.group import Group
from venusrl.core.trajectory import Trajectory
from venusrl.rollout.gateway.harness import HarnessEnv, HarnessHub
from venusrl.rollout.service import RolloutOptions, RolloutService
from venusrl.scheduling import SchedulerOptions, make_policy

HELLO = [{"role": "user", "content": "go on"}]
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
# A whole program: three turns of a chat, with nothing but the standard library.
PROGRAM = """
import json, sys, urllib.request
messages = [{"role": "user", "content": "go on"}]
for turn in range(3):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(sys.argv[1] + "/chat/completions", body, {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(request))
    messages.append(answer["choices"][0]["message"])
    messages.append({"role": "user", "content": f"answer {turn}"})
"""


class Bench:
    """A service over a scripted worker, and a hub."""

    def __init__(self, script: Script | None = None, max_length: int = 4096):
        self.script = script or Script()
        self.worker = ScriptedWorker(self.script, max_length=max_length)
        policy = make_policy("venus", SchedulerOptions(1, eta=0))
        options = RolloutOptions(1.0, 256, 20.0)
        self.service = RolloutService({"w": self.worker}, policy, self.script.chat, WallClock(), options)
        self.hub = HarnessHub()
        self.groups = 0

    async def outcome(self, env):
        """(outcome, trajectory) of one episode."""
        name = f"g{self.groups}"
        self.groups += 1
        trajectory = Trajectory(f"{name}/0", name, 0, seed=3)
        self.service.open_group(Group(name, 0, 0, 0, [trajectory]))
        self.service.start(trajectory, env)
        outcome = await asyncio.wait_for(self.service.outcomes.get(), 20)
        return outcome, trajectory

    def env(self, run, grade=None):
        async def one() -> float:
            return 1.0

        return HarnessEnv(self.hub, run, grade or one)


@contextlib.asynccontextmanager
async def running(bench: Bench):
    await bench.hub.start()
    try:
        yield bench
    finally:
        await bench.service.close()
        await bench.hub.close()


async def chat(url: str, messages: list, **fields) -> dict:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{url}/chat/completions", json={"messages": messages, **fields}, timeout=20)
        answer.raise_for_status()
        return answer.json()["choices"][0]


class PlainEnv:
    """The same episode as PROGRAM's, as an environment."""

    def __init__(self):
        self.turn = 0

    async def reset(self):
        return HELLO

    async def step(self, reply):
        self.turn += 1
        return Observation(f"answer {self.turn - 1}", done=self.turn == 3)

    async def grade(self):
        return 1.0

    async def close(self): ...


async def test_a_program_is_captured_as_the_same_episode_would_be():
    async with running(Bench(Script(lambda turn, seed: f"  say {turn} \n"))) as bench:

        async def run(url):
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, url)
            assert await process.wait() == 0

        outcome, captured = await bench.outcome(bench.env(run))
        assert outcome.lost is None and captured.reward == 1.0
        _, plain = await bench.outcome(PlainEnv())
        assert captured.tokens == plain.tokens
        assert captured.loss_mask == plain.loss_mask and captured.logprobs == plain.logprobs
        assert len(captured.turns) == 3


async def test_tools_are_offered_called_and_answered():
    script = Script(lambda turn, seed: f"wait {CALL}" if turn == 0 else "done")
    async with running(Bench(script)) as bench:

        async def run(url):
            messages = list(HELLO)
            choice = await chat(url, messages, tools=TOOLS)
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            messages += [{**choice["message"], "refusal": None}]  # as clients give it back
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a.txt"}]
            assert (await chat(url, messages, tools=TOOLS))["message"]["content"] == "done"

        outcome, trajectory = await bench.outcome(bench.env(run))
        assert outcome.lost is None, outcome.lost
        text = script.tokenizer.decode(trajectory.tokens)
        assert "<tools>" in text and "<tool_response>\na.txt\n</tool_response>" in text
        assert len(trajectory.turns) == 2


async def test_a_call_that_is_repeated_is_one_turn():
    async with running(Bench()) as bench:

        async def run(url):
            both = await asyncio.gather(chat(url, HELLO), chat(url, HELLO))
            again = await chat(url, HELLO)
            assert both[0] == both[1] == again

        outcome, trajectory = await bench.outcome(bench.env(run))
        assert outcome.lost is None and len(trajectory.turns) == 1


async def test_calls_at_the_same_moment_are_one_call_when_they_are_equal():
    async with running(Bench()) as bench:
        envs = []

        async def run(url):
            answers = await asyncio.gather(*(envs[0].call(HELLO, []) for _ in range(3)))
            history = [*HELLO, answers[0].message, {"role": "user", "content": "wait"}]
            answers += await asyncio.gather(*(envs[0].call(history, []) for _ in range(3)))
            assert answers[0] == answers[2] != answers[3] == answers[5]

        envs.append(bench.env(run))
        outcome, trajectory = await bench.outcome(envs[0])
        assert outcome.lost is None and len(trajectory.turns) == 2


async def test_a_call_that_says_nothing_new_ends_the_episode():
    async with running(Bench()) as bench:

        async def run(url):
            choice = await chat(url, HELLO)
            with pytest.raises(httpx.HTTPStatusError, match="400"):
                await chat(url, [*HELLO, choice["message"]])

        outcome, trajectory = await bench.outcome(bench.env(run))
        assert outcome.lost is None and len(trajectory.turns) == 1
        assert trajectory.loss_mask[-1] == 1


async def test_a_stop_that_is_cancelled_stays_cancelled(monkeypatch):
    """A deadline that comes while the program is being stopped is not lost in the program's own cancellation."""
    monkeypatch.setattr("venusrl.rollout.gateway.harness.STOP_S", 60)
    async with running(Bench()) as bench:
        graded, stopped = [], asyncio.Event()

        async def run(url):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                stopped.set()
                await asyncio.sleep(0.2)
                raise

        async def grade():
            graded.append(1)
            return 1.0

        env = bench.env(run, grade)
        env._program = asyncio.create_task(run(""))
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await env.grade()
        await asyncio.wait_for(stopped.wait(), 5)
        assert not graded


async def test_a_stream_brings_the_whole_reply():
    async with running(Bench()) as bench:
        lines = []

        async def run(url):
            async with httpx.AsyncClient() as http:
                body = {"messages": HELLO, "stream": True}
                async with http.stream("POST", f"{url}/chat/completions", json=body) as answer:
                    lines.extend([line async for line in answer.aiter_lines() if line])

        outcome, _ = await bench.outcome(bench.env(run))
        assert outcome.lost is None
        assert "say 0 3" in lines[0] and lines[-1] == "data: [DONE]"


async def test_an_edited_history_ends_the_episode_and_keeps_what_was_captured():
    async with running(Bench()) as bench:
        refused = []

        async def run(url):
            choice = await chat(url, HELLO)
            edited = [
                *HELLO,
                {**choice["message"], "content": "I never said that"},
                {"role": "user", "content": "wait"},
            ]
            try:
                await chat(url, edited)
            except httpx.HTTPStatusError as error:
                refused.append(error.response.json()["error"]["message"])

        outcome, trajectory = await bench.outcome(bench.env(run))
        assert outcome.lost is None and trajectory.reward == 1.0
        assert len(trajectory.turns) == 1 and "I never" not in bench.script.tokenizer.decode(trajectory.tokens)
        assert refused == ["the history was changed; the episode ends here"]


async def test_where_there_is_no_room_the_program_is_told_and_stopped(monkeypatch):
    monkeypatch.setattr("venusrl.rollout.gateway.harness.STOP_S", 0.2)
    async with running(Bench(max_length=80)) as bench:
        ended = []

        async def run(url):
            messages = list(HELLO)
            try:
                while True:
                    try:
                        messages.append((await chat(url, messages))["message"])
                    except httpx.HTTPStatusError:
                        ended.append("refused")
                        await asyncio.sleep(60)
                    messages.append({"role": "user", "content": "go on please, turn 0123456789"})
            except asyncio.CancelledError:
                ended.append("stopped")
                raise

        outcome, trajectory = await bench.outcome(bench.env(run))
        assert outcome.lost is None and trajectory.info["truncated"]
        assert ended == ["refused", "stopped"]


@pytest.mark.parametrize("when", ["before a call", "after one"])
async def test_a_program_that_fails_loses_its_trajectory(when):
    async with running(Bench()) as bench:

        async def run(url):
            if when == "after one":
                await chat(url, HELLO)
            raise RuntimeError("out of memory")

        outcome, _ = await bench.outcome(bench.env(run))
        assert "the harness failed: RuntimeError('out of memory')" in outcome.lost


async def test_a_stream_names_the_places_of_its_tool_calls():
    async with running(Bench(Script(lambda turn, seed: f"wait {CALL}"))) as bench:
        pieces = []

        async def run(url):
            async with httpx.AsyncClient() as http:
                body = {"messages": HELLO, "stream": True, "tools": TOOLS}
                answer = await http.post(f"{url}/chat/completions", json=body)
                pieces.append(json.loads(answer.text.split("\n")[0].removeprefix("data: ")))

        outcome, _ = await bench.outcome(bench.env(run))
        assert outcome.lost is None, outcome.lost
        (call,) = pieces[0]["choices"][0]["delta"]["tool_calls"]
        assert call["index"] == 0 and call["function"]["name"] == "run"


async def test_a_program_that_never_calls_is_no_episode():
    async with running(Bench()) as bench:

        async def run(url): ...

        outcome, _ = await bench.outcome(bench.env(run))
        assert "the harness ended without a chat call" in outcome.lost


async def test_an_episode_that_is_over_answers_no_more():
    async with running(Bench()) as bench:
        urls = []

        async def run(url):
            urls.append(url)
            await chat(url, HELLO)

        await bench.outcome(bench.env(run))
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            await chat(urls[0], HELLO)


async def test_malformed_calls_are_refused_and_cost_nothing():
    async with running(Bench()) as bench:

        async def run(url):
            async with httpx.AsyncClient() as http:
                calls = '{"messages": [{"role": "assistant", "tool_calls": ["x"]}]}'
                content = '{"messages": [{"role": "user", "content": 3}]}'
                for body in ("{", "[]", '{"messages": []}', content, calls):
                    assert (await http.post(f"{url}/chat/completions", content=body)).status_code == 400
                assert (await http.get(f"{url}/models")).status_code == 200
            await chat(url, HELLO)

        outcome, trajectory = await bench.outcome(bench.env(run))
        assert outcome.lost is None and len(trajectory.turns) == 1


async def test_a_cancelled_trajectory_stops_its_program(monkeypatch):
    monkeypatch.setattr("venusrl.rollout.gateway.harness.STOP_S", 0.1)
    async with running(Bench()) as bench:
        stopped = asyncio.Event()

        async def run(url):
            try:
                await chat(url, HELLO)
                await asyncio.sleep(60)
            finally:
                stopped.set()

        trajectory = Trajectory("g/0", "g", 0)
        bench.service.open_group(Group("g", 0, 0, 0, [trajectory]))
        bench.service.start(trajectory, bench.env(run))
        while not trajectory.turns:
            await asyncio.sleep(0.01)
        bench.service.cancel("g/0")
        await asyncio.wait_for(stopped.wait(), 10)


async def test_answers_of_an_episode_have_their_usage_and_say_why_they_ended():
    async with running(Bench(Script(lambda turn, seed: "go on " * 300 if turn else CALL))) as bench:
        answers, chunks = [], []

        async def run(url):
            async with httpx.AsyncClient(timeout=20) as http:
                fields = {"messages": HELLO, "tools": TOOLS, "temperature": 0.1, "top_p": 0.5, "max_tokens": 1}
                body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
                answer = await http.post(f"{url}/chat/completions", json=body)
                chunks.extend(json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {"))
                (call,) = chunks[0]["choices"][0]["delta"]["tool_calls"]
                said = {"role": "assistant", "content": None, "tool_calls": [call]}
                result = {"role": "tool", "tool_call_id": call["id"], "content": "answer"}
                body = {**fields, "messages": [*HELLO, said, result]}
                answers.append((await http.post(f"{url}/chat/completions", json=body)).json())

        outcome, trajectory = await bench.outcome(bench.env(run))
        assert outcome.lost is None
        first, second = trajectory.turns
        assert chunks[-1]["usage"]["completion_tokens"] == first.end - first.begin
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert answers[0]["choices"][0]["finish_reason"] == "length"  # at the run's 256 tokens
        assert answers[0]["usage"] == {
            "prompt_tokens": second.begin,
            "completion_tokens": 256,
            "total_tokens": second.begin + 256,
        }
        text = bench.script.tokenizer.decode(trajectory.tokens, keep_control=True)
        assert "<tools>" in text and "<tool_response>\nanswer\n</tool_response>" in text


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"zzz": 1},
        {"logprobs": True},
    ],
)
async def test_what_an_episode_cannot_do_is_refused(fields):
    async with running(Bench()) as bench:
        seen = []

        async def run(url):
            async with httpx.AsyncClient(timeout=20) as http:
                body = {"messages": HELLO, "tools": TOOLS, **fields}
                seen.append((await http.post(f"{url}/chat/completions", json=body)).status_code)
                cut = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
                seen.append((await http.post(f"{url}/chat/completions", content=cut)).status_code)
                page = {"Origin": "http://evil.example"}
                seen.append((await http.post(f"{url}/chat/completions", json={}, headers=page)).status_code)
                await http.post(f"{url}/chat/completions", json={"messages": HELLO})

        outcome, _ = await bench.outcome(bench.env(run))
        assert outcome.lost is None and seen == [400, 400, 403]

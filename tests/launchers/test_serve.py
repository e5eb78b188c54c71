"""`python -m launchers.serve` as a process, with a client that hangs up."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import httpx
import openai
import pytest

from venusrl.models.tokenizer import Tokenizer

from . import programs

pytestmark = pytest.mark.timeout(170)


@contextlib.contextmanager
def serving(command: list[str]):
    """The address of a server, which is told to end afterwards."""
    process = subprocess.Popen(
        [*command, "--port=0"], cwd=programs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("serving at "):
            yield line.split()[-1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            return
    raise AssertionError("".join(lines))


@pytest.fixture
def address(checkpoint):
    command = [c for c in programs.command("unused", checkpoint) if not c.startswith("--workdir")]
    command[command.index("launchers.train")] = "launchers.serve"
    with serving(command) as address:
        yield address


def post(address: str, body: dict, session: str = "s"):
    headers = {"Content-Type": "application/json", "x-session-id": session}
    request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=60)


def test_it_serves_and_survives_a_client_that_hangs_up(address):
    messages = [{"role": "user", "content": "Fix it."}]
    for i in range(20):  # more than there are slots
        stream = post(address, {"messages": messages, "stream": True, "max_tokens": 100}, f"gone-{i}")
        stream.read(10)
        stream.close()
    with post(address, {"messages": messages, "max_tokens": 5, "temperature": 0}) as answer:
        first = json.load(answer)["choices"][0]
    assert first["finish_reason"] in ("stop", "length")
    with urllib.request.urlopen(address.replace("/v1", "/sessions/s"), timeout=30) as answer:
        (segment,) = json.load(answer)["segments"]
    assert 0 < sum(segment["loss_mask"]) <= 5 and len(segment["tokens"]) == len(segment["logprobs"])
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(address, {"messages": [{"role": "user", "content": "x" * 2000}]})


def test_the_openai_client_talks_to_a_served_run_and_bad_calls_end_nothing(address):
    """Ids outside the vocabulary ended the engine for every later caller."""
    with openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60) as client:
        messages = [{"role": "user", "content": "Fix it."}]
        whole = client.chat.completions.create(model="any", messages=messages, max_tokens=6, temperature=0, n=2)
        assert whole.choices[0].message == whole.choices[1].message and whole.usage.completion_tokens >= 2
        stream = client.chat.completions.create(
            model="any", messages=messages, max_tokens=6, temperature=0, stream=True, logprobs=True
        )
        chunks = [choice for chunk in stream for choice in chunk.choices]
        assert "".join(c.delta.content or "" for c in chunks) == whole.choices[0].message.content
        told = [entry.logprob for c in chunks if c.logprobs for entry in c.logprobs.content]
        assert told and all(p <= 0 for p in told)
        for token in (-1, 768, 151645, 2**31 - 1, 2**63 - 1, 2**64, 10**30):
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="any", prompt=[5, token, 7], max_tokens=2)
        for path, body in (("/chat/completions", b"{"), ("/completions", b'{"prompt": "\\ud83d"}'), ("/x", b"")):
            assert httpx.post(address + path, content=body).status_code in (400, 404)
        assert client.completions.create(model="any", prompt=[5, 6, 7], max_tokens=2, temperature=1e-9).choices
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
        assert httpx.get(f"{address}/models", headers=headers).status_code in (403, 421)


def test_a_run_is_served_with_its_own_model(finished, checkpoint, tmp_path):
    """It was served with the tokenizer, template and rope of --config: other tokens, without a word."""
    run, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(finished[0], run)
    shutil.copytree(checkpoint, model)
    template = "MARK{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    config = json.loads((run / "config.json").read_text())
    config["model"]["checkpoint"] = str(model)
    (run / "config.json").write_text(json.dumps(config))
    with serving([sys.executable, "-m", "launchers.serve", f"--workdir={run}"]) as address:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "return_token_ids": True}
        ids = httpx.post(f"{address}/chat/completions", json=body, timeout=60).json()["prompt_token_ids"]
    assert Tokenizer.load(model / "tokenizer.json").decode(ids, keep_control=True) == "MARK<|im_start|>a<|im_end|>"

"""`python -m launchers.serve` as a process, with a client that hangs up."""

import json
import signal
import subprocess
import urllib.error
import urllib.request

import pytest

from . import programs

pytestmark = pytest.mark.timeout(170)


@pytest.fixture
def address(checkpoint):
    command = [c for c in programs.command("unused", checkpoint) if not c.startswith("--workdir")]
    command[command.index("launchers.train")] = "launchers.serve"
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

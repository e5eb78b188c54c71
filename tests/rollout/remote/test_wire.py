"""What goes over the wire: bodies, and the errors that they are answered with."""

import json

import jax.numpy as jnp
import pytest

from venusrl.core.errors import ContractError, WorkerError
from venusrl.rollout.engine.transfer import KvShape
from venusrl.rollout.remote.answers import HELD, answer, error_of
from venusrl.rollout.remote.lease import Held
from venusrl.rollout.remote.wire import GenerateBody, parse
from venusrl.rollout.worker import LONGEST_ID


def test_a_name_may_be_as_long_in_a_request_as_in_kv():
    shape = KvShape(1, 1, 8, 4, 8, 48, 64, jnp.dtype("float32").name)
    for length, fits in ((LONGEST_ID, True), (LONGEST_ID + 1, False)):
        body = json.dumps({"trajectory": "t" * length, "tokens": [9], "max_tokens": 4})
        for check in (lambda: parse(GenerateBody, body), lambda: shape.check("t" * length, "", 0, [9])):  # noqa: B023
            if fits:
                check()
            else:
                with pytest.raises(ContractError, match="trajectory"):
                    check()


@pytest.mark.parametrize("status, kind", [(400, ContractError), (HELD, Held), (401, WorkerError), (503, WorkerError)])
def test_an_error_is_told_in_the_form_of_every_service_and_read_back_as_what_it_was(status, kind):
    body = bytes(answer(status, "tokens.1=-1: half of \ud83d, ü").body).decode()
    assert json.loads(body)["error"]["message"] == "tokens.1=-1: half of \\ud83d, ü"
    error = error_of(status, body)
    assert type(error) is kind and str(error) == "tokens.1=-1: half of \\ud83d, ü"


@pytest.mark.parametrize(
    "text", ["", "<html>Bad Gateway", "[]", "5", '{"error": "text"}', '{"error": {}}', '{"error": null}', "[" * 100_000]
)
def test_what_is_no_error_of_a_worker_s_is_shown_as_it_came(text):
    assert str(error_of(502, text)) == f"HTTP 502: {text[:200]}"

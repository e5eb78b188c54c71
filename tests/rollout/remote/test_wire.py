"""What goes over the wire: bodies, and the errors that they are answered with."""

import json

import jax.numpy as jnp
import pytest

from venusrl.core.errors import ContractError
from venusrl.rollout.engine.transfer import KvShape
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

"""The most likely tokens beside each generated one, against the whole distribution computed afresh."""

import dataclasses

import numpy as np
import pytest

from venusrl.core.errors import ContractError

from . import tiny


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_most_likely_tokens_are_those_of_the_distribution_and_only_for_who_asks(weights, temperature):
    engine = tiny.engine(weights)
    asked = {name: tiny.ask(name, tiny.tokens(i, 6), 9, temperature, seed=i) for i, name in enumerate("abc")}
    asked |= {name: dataclasses.replace(asked[name], top_logprobs=k) for name, k in (("a", 5), ("b", 20))}
    told: dict[str, list] = {name: [] for name in asked}
    made: dict[str, list] = {name: [] for name in asked}
    for request in asked.values():
        engine.submit(request)
    while engine.busy:
        for request, chunk in engine.step():
            made[request.trajectory] += chunk.tokens
            if request.trajectory == "c":
                assert chunk.top is None
            else:
                assert len(chunk.top) == len(chunk.tokens)
                told[request.trajectory] += chunk.top
    for name, k in (("a", 5), ("b", 20)):
        context = asked[name].tokens
        whole = tiny.distributions(weights, [*context, *made[name]], temperature or 1.0)
        assert len(told[name]) == 9
        for place, top in enumerate(told[name], start=len(context) - 1):
            tokens, logprobs = zip(*top, strict=True)
            order = np.argsort(-whole[place], kind="stable")[:k]
            np.testing.assert_allclose(logprobs, whole[place][order], atol=2e-4)
            assert list(tokens) == order.tolist()


def test_who_asks_for_them_is_given_the_same_tokens(weights):
    plain = tiny.run(tiny.engine(weights), [tiny.ask("a", tiny.tokens(0, 6), 9, 1.0, 3)])["a"]
    ranked = dataclasses.replace(tiny.ask("a", tiny.tokens(0, 6), 9, 1.0, 3), top_logprobs=3)
    again = tiny.run(tiny.engine(weights), [ranked])["a"]
    assert (plain.tokens, plain.logprobs) == (again.tokens, again.logprobs)


@pytest.mark.parametrize("wanted", [-1, 21, 2**63, 1.0, True, None])
def test_more_than_the_api_has_is_refused(weights, wanted):
    with pytest.raises(ContractError, match="top_logprobs"):
        tiny.engine(weights).submit(dataclasses.replace(tiny.ask("a", [9, 10]), top_logprobs=wanted))

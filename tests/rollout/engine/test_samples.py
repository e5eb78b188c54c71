"""Several samples of one prompt at once: the prompt is computed once, and its pages are shared."""

import dataclasses

import pytest

from . import tiny
from .tiny import ask


@pytest.mark.parametrize("samples", [2, 3, 7])
def test_samples_of_a_prompt_share_its_pages_and_compute_it_once(weights, samples):
    prompt = tiny.tokens(0, 21)  # five whole pages of four and one token
    engine = tiny.engine(weights)
    done = tiny.run(engine, [ask(f"s/{i}", prompt, 5, temperature=1.0, seed=i) for i in range(samples)])
    load = engine.load()
    assert load.prompt_tokens == 20 * samples
    assert load.hit_tokens == 20 * (samples - 1)  # all but the first found every page
    assert load.prefilled_tokens == 20
    alone = [
        tiny.run(tiny.engine(weights), [ask("a", prompt, 5, temperature=1.0, seed=i)])["a"] for i in range(samples)
    ]
    assert [done[f"s/{i}"].tokens for i in range(samples)] == [one.tokens for one in alone]
    used = load.pages - load.free_pages
    assert used <= 5 + 2 * samples  # the prompt's pages once, and what each sample generated


def test_samples_of_different_namespaces_share_nothing(weights):
    prompt = tiny.tokens(0, 21)
    engine = tiny.engine(weights)
    tiny.run(engine, [dataclasses.replace(ask(f"s/{i}", prompt, 5), namespace=f"tenant{i}") for i in range(2)])
    assert engine.load().hit_tokens == 0 and engine.load().prefilled_tokens == 40

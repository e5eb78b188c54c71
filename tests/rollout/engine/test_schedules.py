"""Whatever happens to requests on their way - waiting, preemption, retraction, eviction, moving with their KV, weight
updates - their tokens and logprobs are those of an undisturbed run."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.core.errors import ContractError
from venusrl.rollout.engine.transfer import from_bytes, to_bytes

from . import tiny
from .tiny import ask, run

GOAL = 9
SHORT = dict(kv_tokens=40)  # ten pages for three slots: less than what runs, much less than what waits


def contexts() -> dict[str, list[int]]:
    """Two groups of three that share a prompt, and one that is long."""
    prompts = {"g": tiny.tokens(60, 9), "h": tiny.tokens(61, 14)}
    names = {f"{g}{i}": [*prompt, *tiny.tokens(70 + i, i)] for g, prompt in prompts.items() for i in range(3)}
    return names | {"long": tiny.tokens(66, 27)}


@pytest.fixture(scope="module")
def undisturbed(weights):
    """Tokens and logprobs by (trajectory, temperature), each alone on a fresh engine."""
    alone = {}
    for i, (name, context) in enumerate(contexts().items()):
        for temperature in (0.0, 1.0):
            alone[name, temperature] = run(tiny.engine(weights), [ask(name, context, GOAL, temperature, seed=i)])[name]
        assert alone[name, 0.0].tokens == tiny.greedy(weights, context, GOAL)
    return alone


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_schedule_gives_the_same(weights, undisturbed, seed):
    """Two engines short of pages; requests are cancelled, go on at either, and may take their KV along."""
    rng = np.random.default_rng(seed)
    temperature = float(rng.integers(2))
    shape = dict(
        residency=str(rng.choice(["references", "lru", "lfu"])),
        stall_s=float(rng.choice([1e-9, 1.0])),
        host_tokens=int(rng.choice([0, 12, 80])),
        lanes=int(rng.integers(1, 3)),
    )
    engines = [tiny.engine(weights, **SHORT, **shape) for _ in range(2)]
    todo = contexts()
    seeds = {name: i for i, name in enumerate(todo)}
    got = {name: tiny.Collected() for name in todo}
    home: dict[str, int] = {}
    version = 0
    while any(len(g.tokens) < GOAL for g in got.values()):
        for name in rng.permutation(list(todo)):
            left = GOAL - len(got[name].tokens)
            at = int(rng.integers(2))
            if name in home:
                if rng.random() < 0.15:
                    assert engines[home[name]].cancel(name) and not engines[home[name]].cancel(name)
                    del home[name]
                    if rng.random() < 0.2:
                        engines[at].release(name)
            elif left and rng.random() < 0.6:
                prefix = engines[1 - at].export(name) if rng.random() < 0.7 else None
                if prefix is not None:
                    assert (
                        0 <= engines[at].bring(from_bytes(to_bytes(prefix), engines[at].kv_shape)) <= len(prefix.tokens)
                    )
                engines[at].submit(ask(name, todo[name] + got[name].tokens, left, temperature, seeds[name]))
                home[name] = at
            if rng.random() < 0.3:
                engines[at].prioritise(name, int(rng.integers(3)), bool(rng.integers(2)))
        if rng.random() < 0.05:
            version += 1
            for engine in engines:
                engine.set_weights(jax.tree.map(lambda x: x + 0, weights), version)  # the same, as a new version
        for engine in engines:
            for request, chunk in engine.step():
                assert chunk.version == engine.version
                stop, name = chunk.stop, request.trajectory
                got[name].tokens += chunk.tokens
                got[name].logprobs += chunk.logprobs
                if stop:
                    del home[name]
    for name, done in got.items():
        expected = undisturbed[name, temperature]
        assert done.tokens == expected.tokens
        np.testing.assert_allclose(done.logprobs, expected.logprobs, atol=1e-4)
    for engine in engines:
        assert not engine.busy
        for name in todo:
            engine.release(name)
        assert engine.load().free_pages + engine.load().evictable_pages == engine.load().pages


def test_samples_of_a_prompt_share_its_pages(weights):
    """Eight samples at once: the prompt is computed once, and held once."""
    engine = tiny.engine(weights, slots=8)
    prompt = tiny.tokens(1, 17)
    done = run(engine, [ask(f"g/{i}", prompt, 5, 1.0, seed=i) for i in range(8)])
    assert engine.load().prefilled_tokens == 16
    assert engine.load().hit_tokens == 7 * 16
    used = engine.load().evictable_pages
    assert used == 4 + 8 * 2  # 16 tokens in four pages, then 5 of each: a page and a tail of one
    assert len({tuple(d.tokens) for d in done.values()}) > 1


def test_turns_prefill_only_what_is_new(weights):
    engine = tiny.engine(weights, kv_tokens=256)
    new = 0
    sequences = {name: tiny.tokens(i, 7) for i, name in enumerate("abcde")}  # more than rows
    for turn in range(4):
        for name in sequences:
            seen = len(sequences[name]) - 1 if turn else 0
            if turn:
                sequences[name] += tiny.tokens(30 + turn, 3)
            new += len(sequences[name]) - 1 - seen
            sequences[name] += run(engine, [ask(name, sequences[name], 4)])[name].tokens
    assert engine.load().prefilled_tokens <= new


def test_when_pages_run_out_the_lowest_priority_waits(weights):
    engine = tiny.engine(weights, kv_tokens=32)
    names = ["low", "mid", "high"]
    for priority, name in enumerate(names):
        engine.prioritise(name, priority, False)
        engine.submit(ask(name, tiny.tokens(priority, 5), 20))
    ended = []
    while engine.busy:
        ended += [request.trajectory for request, chunk in engine.step() if chunk.stop]
    assert ended == ["high", "mid", "low"]
    assert engine.load().retracted >= 1


def test_a_request_that_fills_all_pages_ends_there(weights):
    engine = tiny.engine(weights, kv_tokens=16)
    done = run(engine, [ask("t", tiny.tokens(0, 6), 40)])["t"]
    assert done.stop == "length" and 6 + len(done.tokens) <= 17
    assert done.tokens == tiny.greedy(weights, tiny.tokens(0, 6), len(done.tokens))
    with pytest.raises(ContractError, match=r"4 pages of 4 tokens of rollout.kv_tokens"):
        engine.submit(ask("t", tiny.tokens(0, 16), 4))


def test_a_long_prompt_does_not_stall_those_that_decode(weights):
    """With no time for prefill beside decode, one call of it a step."""
    engine = tiny.engine(weights, stall_s=1e-9)
    engine.submit(ask("t", tiny.tokens(0, 4), 30))
    engine.step()
    engine.submit(ask("long", tiny.tokens(1, 40), 2))
    for steps in range(1, 5):
        assert [request.trajectory for request, _ in engine.step()] == ["t"]
        assert engine.load().prefilled_tokens == 3 + 8 * steps
    assert {request.trajectory for request, _ in engine.step()} == {"t", "long"}


def test_a_drain_lets_what_runs_end_first(weights, newer):
    engine = tiny.engine(weights, on_update="drain")
    done = {"t": tiny.Collected(), "u": tiny.Collected()}
    engine.submit(ask("t", tiny.tokens(0, 4), 10))
    done["t"].add(engine.step()[0][1])
    engine.set_weights(newer, 1)
    assert engine.version == 0
    run(engine, [ask("u", tiny.tokens(0, 4), 10)], done)
    assert done["t"].versions == [0] * 10 and done["t"].tokens == tiny.greedy(weights, tiny.tokens(0, 4), 10)
    assert done["u"].versions == [1] * 10 and done["u"].tokens == tiny.greedy(newer, tiny.tokens(0, 4), 10)
    engine.set_weights(weights, 2)  # nothing runs
    assert engine.version == 2


def test_stale_prefixes_are_counted(weights, newer):
    engine = tiny.engine(weights, on_update="keep")
    first = run(engine, [ask("t", tiny.tokens(0, 9), 4)])["t"]
    engine.set_weights(newer, 1)
    run(engine, [ask("t", tiny.tokens(0, 9) + first.tokens + [9], 4)])
    assert engine.load().stale_tokens == 12 and engine.load().hit_tokens == 12


def test_kv_of_other_weights_or_tenants_is_not_used(weights, newer):
    """AReaL#421, miles#2783: stale prefixes of another version; and prefixes of another tenant."""
    engine, other = tiny.engine(weights), tiny.engine(newer, version=1)
    context = tiny.tokens(0, 13)
    run(engine, [ask("t", context, 4)])
    assert other.bring(engine.export("t")) == 0
    hit = engine.load().hit_tokens
    request = ask("t", context, 4)
    run(engine, [type(request)(**{**request.__dict__, "namespace": "them", "trajectory": "u"})])
    assert engine.load().hit_tokens == hit


def test_logits_that_are_no_numbers_fail_their_request_only(weights):
    """A token whose embedding is NaN: whoever has it in its context fails, the others do not notice."""
    poisoned = jax.tree.map(lambda x: x, weights)
    poisoned["head"] = weights["embedding"].T  # read by head_matrix, so that only the look-up is poisoned
    poisoned["embedding"] = weights["embedding"].at[60].set(np.nan)
    engine = tiny.engine(poisoned)
    good = [t for t in tiny.tokens(0, 12) if t != 60][:9]
    done = run(engine, [ask("bad", [*good, 60], 6), ask("good", good, 6)])
    assert (done["bad"].tokens, done["bad"].stop) == ([], "nan")
    assert done["good"].stop == "length" and np.isfinite(done["good"].logprobs).all()
    assert run(engine, [ask("again", [*good, 9], 6)])["again"].stop == "length"


def test_a_damaged_transfer_is_noticed(weights):
    engine = tiny.engine(weights)
    run(engine, [ask("t", tiny.tokens(0, 13), 4)])
    data = bytearray(to_bytes(engine.export("t")))
    data[len(data) // 2] ^= 1
    with pytest.raises(ContractError, match="damaged"):
        from_bytes(bytes(data), engine.kv_shape)
    with pytest.raises(ContractError, match="damaged"):
        from_bytes(bytes(data[: len(data) // 2]), engine.kv_shape)
    assert engine.export("nobody") is None

"""The engine against full recomputation: whatever it caches, batches or drops, the numbers stay the same."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.core.errors import ConfigError, ContractError
from venusrl.core.trajectory import Trajectory
from venusrl.learner.learner import Learner, LearnerOptions
from venusrl.learner.objectives.sft import Sft
from venusrl.learner.sharding import make_mesh
from venusrl.learner.state import make_optimizer
from venusrl.learner.step import StepOptions
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.kv import COPIES
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.engine.programs import BLOCK, RowState, sample

from . import tiny
from .tiny import STOP, ask, run


def test_logprobs_equal_the_learners_score(weights):
    """Sampled over several turns, three at once: what GRPO's importance ratio starts from."""
    engine = tiny.engine(weights)
    trajectories = [Trajectory(f"t{i}", "g", i, seed=100 + i) for i in range(3)]
    for i, t in enumerate(trajectories):
        t.append_observation(tiny.tokens(i, 3 + 4 * i))
    for turn in range(3):
        done = run(engine, [ask(t.id, t.tokens, 5 + i, 0.8, t.seed) for i, t in enumerate(trajectories)])
        for t in trajectories:
            t.append_generated(done[t.id].tokens, done[t.id].logprobs, version=0)
            t.append_observation(tiny.tokens(50 + turn, 2))
    learner = Learner(
        tiny.CONFIG, Sft(), make_optimizer(1e-3), make_mesh((1, 1, 1)), StepOptions(0.8), LearnerOptions(tiny.LENGTH, 3)
    )
    learner.start_from(weights)
    for t, scored in zip(trajectories, learner.score(trajectories), strict=True):
        mask = np.array(t.loss_mask) > 0
        assert mask.sum() == 3 * (5 + t.index)
        np.testing.assert_allclose(np.array(t.logprobs)[mask], scored[mask], atol=1e-4)
    assert engine.load().prefilled_tokens < sum(len(t) for t in trajectories)  # earlier turns were not done again


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_greedy_turns_equal_the_naive_loop(weights, lanes):
    engine = tiny.engine(weights, lanes=lanes)
    contexts = {name: tiny.tokens(i, 1 + 6 * i) for i, name in enumerate("abcd")}  # one more than there are rows
    for turn in range(3):
        done = run(engine, [ask(name, context, 6) for name, context in contexts.items()])
        for name, context in contexts.items():
            assert done[name].tokens == tiny.greedy(weights, context, 6)
            logprobs = tiny.score(weights, context + done[name].tokens)[len(context) :]
            np.testing.assert_allclose(done[name].logprobs, logprobs, atol=1e-4)
            contexts[name] = context + done[name].tokens + tiny.tokens(20 + turn, 2)


@pytest.fixture(scope="module")
def alone(weights):
    return run(tiny.engine(weights), [ask("t", tiny.tokens(3, 9), 14, 1.0, seed=5)])["t"]


@pytest.mark.parametrize("others", [0, 1, 2, 4])
def test_a_sample_does_not_depend_on_its_batch_or_row(weights, alone, others):
    requests = [ask(f"o{i}", tiny.tokens(30 + i, 2 + 3 * i), 4 + 5 * i, 1.0, seed=60 + i) for i in range(others)]
    again = run(tiny.engine(weights), [*requests, ask("t", tiny.tokens(3, 9), 14, 1.0, seed=5)])["t"]
    assert again.tokens == alone.tokens
    np.testing.assert_allclose(again.logprobs, alone.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [dict(decode_steps=1), dict(decode_steps=7), dict(slots=1), dict(decode_rows=()), dict(lanes=2)],
    ids=str,
)
def test_a_sample_does_not_depend_on_the_engines_shape(weights, alone, overrides):
    again = run(tiny.engine(weights, **overrides), [ask("t", tiny.tokens(3, 9), 14, 1.0, seed=5)])["t"]
    assert again.tokens == alone.tokens
    np.testing.assert_allclose(again.logprobs, alone.logprobs, atol=1e-5)


def test_seeds_differ(weights, alone):
    other = run(tiny.engine(weights), [ask("t", tiny.tokens(3, 9), 14, 1.0, seed=6)])["t"]
    assert other.tokens != alone.tokens


@pytest.mark.parametrize("vocab", [4, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_samples_follow_the_tempered_distribution(vocab):
    """4096 seeds at one position, then 4096 positions of one seed; some tokens cannot come."""
    rows, temperature = 4096, 0.5
    logits = np.tile(np.random.default_rng(vocab).normal(size=vocab).astype(np.float32), (rows, 1))
    logits[:, 1::7] = -np.inf
    p = np.exp(logits[0] / temperature)
    p /= p.sum()
    logp = np.log(p, out=np.full(vocab, -np.inf), where=p > 0)
    many, same = np.arange(rows, dtype=np.int32), np.full(rows, 3, np.int32)
    for position, seed in ((same, many), (many, same)):
        state = RowState(same, position, same, np.full(rows, temperature, np.float32), seed)
        token, logprob = (np.asarray(x) for x in sample(logits, state))
        np.testing.assert_allclose(logprob, logp[token], rtol=1e-5)
        error = np.bincount(token, minlength=vocab) / rows - p
        assert (np.abs(error) <= 4.5 * np.sqrt(p * (1 - p) / rows) + 1 / rows * (p > 0)).all()


BUCKETS = dict(prefill_rows=(2,), prefill_tokens=(4, 16), read_lengths=(24,), slots=2, decode_rows=(1,))


def test_compiles_are_bounded_and_done_once(weights):
    """Every length from 1 to 40; the product of the buckets is the bound."""
    engine = tiny.engine(weights, **BUCKETS)
    before = engine.compiled

    def everything():
        for length in range(1, 41, 3):
            run(engine, [ask(f"{length}a", tiny.tokens(1, length), 5), ask(f"{length}b", tiny.tokens(2, length), 6)])
            run(engine, [ask(f"{length}c", tiny.tokens(3, length), 5)])

    everything()
    first = engine.compiled
    # prefill: rows x tokens x reads; decode: rows x reads; copies to pages and back: sizes
    assert 3 < first - before <= 1 * 2 * 2 + 2 * 2 + 2 * len(COPIES)
    everything()
    assert engine.compiled == first


def test_buckets_give_the_same_tokens(weights):
    """Reads of fewer positions, prompts in several calls: shapes that the test above has compiled."""
    engine = tiny.engine(weights, **BUCKETS)
    for length in (1, 4, 5, 17, 23, 37):
        context = tiny.tokens(4, length)
        assert run(engine, [ask(str(length), context, 6)])[str(length)].tokens == tiny.greedy(weights, context, 6)


def updated_midway(weights, newer, **overrides):
    """A request whose weights change after its first chunk; an idle row whose turn comes after."""
    engine = tiny.engine(weights, version=3, **overrides)
    idle = run(engine, [ask("idle", tiny.tokens(8, 5), 4)])["idle"]
    done = {"t": tiny.Collected()}
    engine.submit(ask("t", tiny.tokens(9, 6), 12, 1.0, seed=2))
    done["t"].add(engine.step()[0][1])
    prefilled = engine.load().prefilled_tokens
    engine.set_weights(newer, 4)
    later = [*tiny.tokens(8, 5), *idle.tokens, *tiny.tokens(10, 2)]
    run(engine, [ask("idle", later, 4)], done)
    return done, later, engine.load().prefilled_tokens - prefilled


def test_an_update_takes_effect_between_chunks_and_drops_the_kv(weights, newer):
    done, later, prefilled = updated_midway(weights, newer)
    t, context = done["t"], tiny.tokens(9, 6)
    assert t.versions == [3] * 4 + [4] * 8
    whole = context + t.tokens
    np.testing.assert_allclose(t.logprobs[:4], tiny.score(weights, whole)[6:10], atol=1e-4)
    np.testing.assert_allclose(t.logprobs[4:], tiny.score(newer, whole)[10:], atol=1e-4)
    assert np.abs(tiny.score(newer, whole)[6:10] - t.logprobs[:4]).max() > 0.01
    assert done["idle"].tokens == tiny.greedy(newer, later, 4) and done["idle"].versions == [4] * 4
    assert prefilled == (6 + 4 - 1) + (len(later) - 1)


def test_keep_kv_uses_the_old_kv(weights, newer):
    done, later, prefilled = updated_midway(weights, newer, on_update="keep")
    t = done["t"]
    assert t.versions == [3] * 4 + [4] * 8
    assert prefilled == len(later) - 1 - (5 + 4 - 1)  # only what the idle row did not have
    whole = tiny.tokens(9, 6) + t.tokens
    assert np.abs(tiny.score(newer, whole)[10:] - t.logprobs[4:]).max() > 0.01


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_cancelled_anywhere_and_resumed_gives_the_same_tokens(weights, seed):
    """Random arrivals, cancels, releases and resubmissions of five trajectories on three rows."""
    rng = np.random.default_rng(seed)
    engine = tiny.engine(weights)
    contexts = {str(i): tiny.tokens(70 + i, 1 + 4 * i) for i in range(5)}
    got: dict[str, list[int]] = {name: [] for name in contexts}
    goal, running = 9, set()
    while any(len(tokens) < goal for tokens in got.values()):
        for name in rng.permutation(list(contexts)):
            left = goal - len(got[name])
            if name in running:
                if rng.random() < 0.25:
                    assert engine.cancel(name) and not engine.cancel(name)
                    running.discard(name)
                    if rng.random() < 0.5:
                        engine.release(name)
            elif left and rng.random() < 0.7:
                engine.submit(ask(name, contexts[name] + got[name], left))
                running.add(name)
        for request, chunk in engine.step():
            got[request.trajectory] += chunk.tokens
            if chunk.stop:
                running.discard(request.trajectory)
    for name, context in contexts.items():
        assert got[name] == naive_goal(weights, tuple(context), goal)


_goals: dict = {}


def naive_goal(weights, context, count):
    """The naive loop, once for each context."""
    if context not in _goals:
        _goals[context] = tiny.greedy(weights, list(context), count)
    return _goals[context]


def test_idle_rows_are_evicted_when_rows_are_short(weights):
    """Five trajectories take turns on three rows; their pages are there when they come back."""
    engine = tiny.engine(weights)
    contexts = {str(i): tiny.tokens(80 + i, 4) for i in range(5)}
    for _ in range(2):
        for name, context in contexts.items():
            done = run(engine, [ask(name, context, 3)])[name]
            assert done.tokens == tiny.greedy(weights, context, 3)
            contexts[name] = context + done.tokens + tiny.tokens(90, 1)
    assert engine.load().evicted_pages == 0  # their rows went, their pages did not
    assert engine.load().prefilled_tokens == 5 * (4 - 1) + 5 * 1  # of the second turn, only the last token generated


def test_release_frees_the_row_before_others_are_evicted(weights):
    engine = tiny.engine(weights)
    first = run(engine, [ask(name, tiny.tokens(1, 4), 3) for name in "abc"])
    engine.release("b")
    engine.release("b")
    engine.release("unknown")
    run(engine, [ask("d", tiny.tokens(2, 4), 3)])
    before = engine.load().prefilled_tokens
    run(engine, [ask("a", tiny.tokens(1, 4) + first["a"].tokens, 1)])
    assert engine.load().prefilled_tokens == before  # its KV was still there


def stopping(weights):
    """A context after which the greedy reply has a token that was not there before, and where it comes."""
    for seed in range(50):
        reply = tiny.greedy(weights, tiny.tokens(seed, 5), 10)
        for at in (2, 3, 5):  # inside a host turn, at its end, in the next one
            if reply[at] not in reply[:at]:
                yield seed, reply, at


@pytest.mark.parametrize("which", range(3))
def test_stop_tokens(weights, which):
    seed, reply, at = list(stopping(weights))[which]
    engine = tiny.engine(weights, stop_tokens=(STOP, reply[at]) if STOP not in reply[:at] else (reply[at],))
    done = run(engine, [ask("t", tiny.tokens(seed, 5), 10)])["t"]
    assert (done.tokens, done.stop) == (reply[: at + 1], "stop")
    exact = run(engine, [ask("u", tiny.tokens(seed, 5), at + 1)])["u"]
    assert (exact.tokens, exact.stop) == (reply[: at + 1], "stop")  # both ends at once: it did stop
    short = run(engine, [ask("v", tiny.tokens(seed, 5), at)])["v"]
    assert (short.tokens, short.stop) == (reply[:at], "length")


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_max_tokens(weights, count):
    done = run(tiny.engine(weights), [ask("t", tiny.tokens(1, 5), count)])["t"]
    assert len(done.tokens) == count and done.stop == "length"


def test_the_longest_sequence_ends_a_turn(weights):
    engine = tiny.engine(weights)
    context = tiny.tokens(1, tiny.LENGTH - 6)
    done = run(engine, [ask("t", context, 100)])["t"]
    assert (len(done.tokens), done.stop) == (6, "length")
    assert done.tokens == tiny.greedy(weights, context, 100)
    last = run(engine, [ask("u", tiny.tokens(2, tiny.LENGTH - 1), 5)])["u"]
    assert (len(last.tokens), last.stop) == (1, "length")


@pytest.mark.parametrize(
    "context, count, says", [(tiny.LENGTH, 1, "max_length=48"), (0, 1, "0 context tokens"), (3, 0, "max_tokens=0")]
)
def test_requests_that_cannot_run_are_refused(weights, context, count, says):
    engine = tiny.engine(weights)
    with pytest.raises(ContractError, match=says):
        engine.submit(ask("t", tiny.tokens(1, context), count))
    assert not engine.busy


def test_load_counts(weights):
    engine = tiny.engine(weights)
    for i in range(5):
        engine.submit(ask(str(i), tiny.tokens(i, 6), 6))
    assert (engine.load().running, engine.load().waiting) == (0, 5)
    engine.step()
    load = engine.load()
    assert (load.slots, load.running, load.waiting) == (3, 3, 2)
    assert (load.generated_tokens, load.prefilled_tokens) == (12, 15)
    run(engine, [], {str(i): tiny.Collected() for i in range(5)})
    assert engine.load().generated_tokens == 30 and engine.load().running == 0


@pytest.mark.parametrize(
    "bad, says",
    [
        (dict(prefill_rows=()), "prefill_rows"),
        (dict(prefill_tokens=(8, 4)), "prefill_tokens"),
        (dict(prefill_rows=(0, 4)), "prefill_rows"),
        (dict(slots=0), "slots=0"),
        (dict(lanes=-1), "lanes=-1"),
        (dict(slots=4, lanes=5), "above the 4 rollout.slots"),
        (dict(max_length=1), "max_length=1"),
        (dict(decode_steps=0), "rollout"),
    ],
)
def test_impossible_options_are_refused(bad, says):
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(EngineOptions(), **bad)


def test_rows_longer_than_the_model_are_refused(weights):
    with pytest.raises(ConfigError, match=r"above the 128 tokens of the model"):
        Engine(tiny.CONFIG, weights, 0, (), EngineOptions(max_length=129))

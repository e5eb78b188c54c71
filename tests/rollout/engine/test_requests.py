"""Requests that others send: what can never run is refused by name, and no request ends a worker for the others."""

import asyncio
import math
import random
from types import SimpleNamespace

import pytest

from venusrl.core.errors import ContractError, WorkerError
from venusrl.rollout.engine.jax_worker import JaxWorker

from . import tiny
from .tiny import ask

SECONDS = 60
CUT = "cut emoji \ud83d"


@pytest.fixture(scope="module")
def engine(weights):
    return tiny.engine(weights)


def request(**fields):
    """Like a Request, with fields of any type."""
    good = {"trajectory": "t", "tokens": [9, 10], "max_tokens": 4, "temperature": 1.0, "seed": 0}
    return SimpleNamespace(**{**good, "namespace": "", "top_logprobs": 0, **fields})


@pytest.mark.parametrize(
    "token",
    [64, 767, 151645, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**5000, -1, -(2**63), True, 1.0, "9", None, [9]],
    ids=lambda x: type(x).__name__,
)
def test_a_token_that_the_model_does_not_have_is_refused_with_its_position_and_the_size_of_the_vocabulary(
    engine, token
):
    with pytest.raises(ContractError, match=r"request of t: token 2 of the context is .*vocabulary has 64 tokens"):
        engine.check_request(request(tokens=[9, 10, token, 11]))


BAD_FIELDS = [
    ("tokens", [], "0 context tokens"),
    ("tokens", None, "give at least one id"),
    ("tokens", "9 10", "give at least one id"),
    ("tokens", {9: 10}, "give at least one id"),
    ("max_tokens", 0, "max_tokens=0"),
    ("max_tokens", -5, "max_tokens=-5"),
    ("max_tokens", 2.0, r"max_tokens=2\.0"),
    ("max_tokens", None, "max_tokens=None"),
    ("max_tokens", True, "max_tokens=a bool|max_tokens=True"),
    ("seed", -1, "seed=-1"),
    ("seed", 2**31, "seed=2147483648"),
    ("seed", 10**5000, r"seed=an int of \d+ bits"),
    ("seed", 1.5, r"seed=1\.5"),
    ("seed", None, "seed=None"),
    ("temperature", math.nan, "temperature=nan"),
    ("temperature", math.inf, "temperature=inf"),
    ("temperature", -0.1, r"temperature=-0\.1"),
    ("temperature", 1e39, r"temperature=1e\+39"),
    ("temperature", 10**400, "temperature=an int"),
    ("temperature", "1", "temperature='1'"),
    ("temperature", None, "temperature=None"),
    ("temperature", False, "temperature=False"),
    ("namespace", CUT, "namespace: character 10 .* surrogate"),
    ("namespace", None, "namespace is None"),
    ("namespace", ["a"], "namespace is a list"),
    ("trajectory", CUT, "trajectory: character 10 .* surrogate"),
    ("trajectory", 7, "trajectory is 7"),
    ("trajectory", ["a"], "trajectory is a list"),
]


@pytest.mark.parametrize(
    "field, value, says", BAD_FIELDS, ids=lambda x: type(x).__name__ if not isinstance(x, str) else ascii(x)[:16]
)
def test_every_field_of_a_request_is_refused_by_name_where_it_is_out_of_range(engine, field, value, says):
    with pytest.raises(ContractError, match=says) as refusal:
        engine.check_request(request(**{field: value}))
    str(refusal.value).encode()  # a message of a bad text is itself good text


def test_max_tokens_may_be_any_number_and_ends_where_the_sequence_does(weights):
    done = tiny.run(tiny.engine(weights), [ask("t", tiny.tokens(0, 4), 10**30)])["t"]
    assert (len(done.tokens), done.stop) == (tiny.LENGTH - 4, "length")


def random_bad(rng: random.Random, number: int):
    """A request with one or more fields of any kind; some pass by chance."""
    anything = [None, True, -1, 0, 2**31, 2**63 - 1, 10**400, 0.5, math.nan, math.inf, "", CUT, "x", [], [1], {}, b"x"]
    fields = {"trajectory": f"bad{number}"}
    for name in rng.sample(
        ["trajectory", "tokens", "max_tokens", "temperature", "seed", "namespace"], rng.randint(1, 3)
    ):
        fields[name] = rng.choice(anything)
    if rng.random() < 0.5:
        fields["tokens"] = [rng.choice([9, 10, *anything]) for _ in range(rng.randint(1, 60))]
    return request(**fields)


async def collect(worker, request):
    done = tiny.Collected()
    async for chunk in worker.generate(request):
        done.add(chunk)
    return done


@pytest.mark.parametrize("seed", range(3))
async def test_random_bad_requests_between_good_ones_change_nothing_for_the_good_ones(weights, seed):
    rng = random.Random(seed)
    good = [ask(f"g{i}", tiny.tokens(i, 3 + i % 5), 6, temperature=i % 2 * 0.8, seed=i) for i in range(12)]
    alone = tiny.run(tiny.engine(weights), good)
    worker = JaxWorker("w", tiny.engine(weights))
    await worker.start()
    all_of_them = good + [random_bad(rng, i) for i in range(150)]
    rng.shuffle(all_of_them)
    async with asyncio.timeout(SECONDS):
        ends = await asyncio.gather(*(collect(worker, r) for r in all_of_them), return_exceptions=True)
    refused = 0
    for asked, end in zip(all_of_them, ends, strict=True):
        if asked in good:
            assert (end.tokens, end.stop) == (alone[asked.trajectory].tokens, alone[asked.trajectory].stop)
        else:
            assert isinstance(end, ContractError | tiny.Collected), end
            refused += isinstance(end, ContractError)
    assert refused > 100
    assert worker.failure is None
    await worker.close()


async def test_what_raises_while_a_request_is_queued_fails_that_request_only(weights):
    engine = tiny.engine(weights)
    inner = engine.submit

    def submit(request):
        if request.trajectory == "cursed":
            raise OverflowError("Python int too large to convert to C long")
        inner(request)

    engine.submit = submit
    worker = JaxWorker("w", engine)
    await worker.start()
    async with asyncio.timeout(SECONDS):
        ends = await asyncio.gather(
            *(collect(worker, ask(name, tiny.tokens(0, 4), 5)) for name in ("a", "cursed", "b")), return_exceptions=True
        )
        again = await collect(worker, ask("a", tiny.tokens(0, 4), 5))
    assert isinstance(ends[1], WorkerError) and "cursed" in str(ends[1]) and "C long" in str(ends[1])
    assert ends[0].tokens == ends[2].tokens == again.tokens == tiny.greedy(weights, tiny.tokens(0, 4), 5)
    assert worker.failure is None and not worker._streams
    await worker.close()


@pytest.mark.parametrize(
    "standing", [(7, 1, True), (CUT, 1, True), ("t", "1", True), ("t", 1.5, True), ("t", 1, "yes")]
)
async def test_a_priority_that_is_none_is_refused_and_the_worker_goes_on(weights, standing):
    worker = JaxWorker("w", tiny.engine(weights))
    await worker.start()
    with pytest.raises(ContractError):
        worker.prioritise(*standing)
    for call in (worker.release, worker.preempt, worker.export_kv):
        with pytest.raises(ContractError, match="trajectory"):
            await call([1])
    async with asyncio.timeout(SECONDS):
        assert (await collect(worker, ask("t", tiny.tokens(0, 4), 3))).stop == "length"
    await worker.close()


async def test_a_request_is_looked_at_once_on_its_way_in_as_it_reaches_the_engine(weights, monkeypatch):
    """7 ms of the loop that serves everybody for 131,072 tokens, and it was twice."""
    worker, looked = JaxWorker("w", tiny.engine(weights)), []
    check = worker._engine.check_request
    monkeypatch.setattr(worker._engine, "check_request", lambda asked: (looked.append(asked.trajectory), check(asked)))
    await worker.start()
    asked = ask("t", tiny.tokens(0, 4), 3)
    turn = asyncio.create_task(collect(worker, asked))
    await asyncio.sleep(0)  # it is asked for, and not yet with the engine
    asked.tokens.append(2**63 - 1)
    with pytest.raises(ContractError, match="token 4 of the context"):
        await asyncio.wait_for(turn, SECONDS)
    assert looked == ["t"] and worker.failure is None and not worker._streams
    await worker.close()

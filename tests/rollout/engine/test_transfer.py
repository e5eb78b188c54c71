"""KV from elsewhere: taken where it fits, else refused, whatever the message says; the engine goes on."""

import copy
import json
import random
import struct
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from venusrl.core.errors import ContractError
from venusrl.rollout.engine import transfer
from venusrl.rollout.engine.transfer import HASH_BYTES, MAGIC, from_bytes, to_bytes

from . import tiny
from .tiny import ask, run

CONTEXT = tiny.tokens(3, 21)


@pytest.fixture(scope="module")
def engine(weights):
    made = tiny.engine(weights)
    run(made, [ask("t", CONTEXT, 5)])
    return made


@pytest.fixture(scope="module")
def message(engine):
    return to_bytes(engine.export("t"))


def parts(message: bytes) -> tuple[dict, bytes]:
    body = message[len(MAGIC) + HASH_BYTES :]
    (length,) = struct.unpack_from("<I", body)
    return json.loads(body[4 : 4 + length]), body[4 + length :]


def sealed(body: bytes) -> bytes:
    """With the right checksum."""
    return MAGIC + transfer._hash(body) + body


def joined(header, arrays: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return sealed(struct.pack("<I", len(text)) + text + arrays)


def changed(message: bytes, **fields) -> bytes:
    header, arrays = parts(message)
    return joined({**header, **fields}, arrays)


def with_value(message: bytes, value: float) -> bytes:
    header, arrays = parts(message)
    values = np.frombuffer(arrays, np.float32).copy()
    values[0] = value
    return joined(header, values.tobytes())


def cases(message: bytes) -> dict[str, bytes]:
    header, arrays = parts(message)
    shapes, tokens = header["arrays"], header["tokens"]
    few = len(arrays) // len(shapes)
    return {
        "empty": b"",
        "magic only": MAGIC,
        "garbage": bytes(range(256)) * 4,
        "no header": sealed(b""),
        "half a length": sealed(b"\x01\x00"),
        "a header longer than the message": sealed(struct.pack("<I", 2**32 - 1) + b"{}"),
        "a header that is no JSON": joined(b"{", b""),
        "a header that is no text": joined(b"\xff\xfe\x00", b""),
        "a header too deep": joined(b"[" * 100_000, b""),
        "a list": joined([], b""),
        "an empty header": joined({}, arrays),
        "a field more": changed(message, more=1),
        "a layer fewer": joined({**header, "arrays": shapes[:-2]}, arrays[: -2 * few]),
        "an array fewer": joined({**header, "arrays": shapes[:-1]}, arrays[:-few]),
        "no arrays": joined({**header, "arrays": []}, b""),
        "a layer more": joined({**header, "arrays": shapes + shapes[:2]}, arrays + arrays[: 2 * few]),
        "arrays of nothing": changed(message, arrays=[[]] * len(shapes)),
        "keys for values": changed(message, arrays=[[s[:2] + s[:1:-1], d] for s, d in shapes]),
        "a shape of the same size": changed(message, arrays=[[[1, s[0] * s[1], *s[2:]], d] for s, d in shapes]),
        "a huge shape": changed(message, arrays=[[[2**40, 2**20], "float32"]] * len(shapes)),
        "a shape that overflows": changed(message, arrays=[[[2**33, 2**33], "float32"]] * len(shapes)),
        "a negative shape": changed(message, arrays=[[[-1, *s[1:]], d] for s, d in shapes]),
        "a shape of fractions": changed(message, arrays=[[[float(n) for n in s], d] for s, d in shapes]),
        "integers": changed(message, arrays=[[s, "int32"] for s, d in shapes]),
        "objects": changed(message, arrays=[[s, "O"] for s, d in shapes]),
        "another float": joined({**header, "arrays": [[s, "float16"] for s, d in shapes]}, arrays[: len(arrays) // 2]),
        "an array cut short": joined(header, arrays[:-4]),
        "an array too long": joined(header, arrays + b"\0" * 4),
        "too many tokens": changed(message, tokens=tokens * 10),
        "more tokens than pages": changed(message, tokens=tokens + [9] * (8 * 4)),
        "no tokens": changed(message, tokens=[]),
        "text for tokens": changed(message, tokens="abc"),
        "a token outside the vocabulary": changed(message, tokens=[*tokens[:-1], 64]),
        "a negative token": changed(message, tokens=[-1, *tokens[1:]]),
        "a huge token": changed(message, tokens=[2**70, *tokens[1:]]),
        "a fraction of a token": changed(message, tokens=[1.5, *tokens[1:]]),
        "tokens that are true": changed(message, tokens=[True, *tokens[1:]]),
        "tokens that are objects": changed(message, tokens=[{} for _ in tokens]),
        "a trajectory that is a number": changed(message, trajectory=5),
        "a trajectory that is an object": changed(message, trajectory={}),
        "a trajectory without end": changed(message, trajectory="t" * 10_000),
        "half a surrogate pair": changed(message, trajectory="\ud83d"),
        "no namespace": changed(message, namespace=None),
        "a version that is text": changed(message, version="0"),
        "a negative version": changed(message, version=-1),
        "a huge version": changed(message, version=2**40),
        "a version that is true": changed(message, version=True),
        "NaN": with_value(message, float("nan")),
        "infinity": with_value(message, float("-inf")),
    }


def check_alive(engine, weights) -> None:
    context = tiny.tokens(8, 7)
    assert run(engine, [ask("alive", context, 4)])["alive"].tokens == tiny.greedy(weights, context, 4)
    engine.release("alive")
    engine.check()


def test_kv_with_a_right_checksum_and_wrong_contents_is_refused_and_the_engine_goes_on(engine, message, weights):
    for name, data in cases(message).items():
        with pytest.raises(ContractError, match="KV"):
            engine.bring(from_bytes(data, engine.kv_shape))
            pytest.fail(f"{name} was taken")
    check_alive(engine, weights)


def test_what_fits_is_taken_and_used(engine, message, weights):
    other = tiny.engine(weights)
    tokens = parts(message)[0]["tokens"]
    assert other.bring(from_bytes(message, other.kv_shape)) == len(tokens)
    other.check()
    assert other.bring(from_bytes(message, other.kv_shape)) <= other.options.page  # again: a page that is not full
    wanted = tiny.greedy(weights, tokens, 3)
    assert run(other, [ask("t", tokens, 3)])["t"].tokens == wanted
    assert other.load().hit_tokens == len(tokens) - 1
    other.check()


def test_kv_of_other_weights_is_no_error(engine, message):
    assert engine.bring(from_bytes(changed(message, version=7), engine.kv_shape)) == 0


def test_engines_in_one_process_refuse_kv_of_another_model_too(engine, message, weights):
    prefix = from_bytes(message, engine.kv_shape)
    for wrong in (prefix.blocks[:-1], [type(b)(b.values, b.keys) for b in prefix.blocks]):
        with pytest.raises(ContractError, match="KV"):
            engine.bring(type(prefix)("t", "", 0, prefix.tokens, wrong))
    with pytest.raises(ContractError, match="vocabulary of 64"):
        engine.bring(type(prefix)("t", "", 0, [64] * len(prefix.tokens), prefix.blocks))
    check_alive(engine, weights)


def test_a_huge_shape_is_refused_before_anything_is_allocated(engine, message):
    data = cases(message)["a huge shape"]
    tracemalloc.start()
    try:
        with pytest.raises(ContractError):
            from_bytes(data, engine.kv_shape)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(data) + 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", range(10))
def test_random_changes_are_refused_or_harmless(engine, message, weights, seed):
    """Any value in any place of the header, and any bytes cut or added, with the right checksum."""
    rng = random.Random(seed)
    values = [None, True, -1, 0, 1, 2**31, 2**63, 2**70, 1.5, "", "x", "\udc00", "float32", [], [[]], {}, [0] * 99]
    good, arrays = parts(message)
    for _ in range(150):
        header, body = copy.deepcopy(good), arrays
        for _ in range(rng.choice([1, 1, 2, 3])):
            at, place = header, rng.choice(list(header))
            while isinstance(at[place], list) and at[place] and rng.random() < 0.7:
                at, place = at[place], rng.randrange(len(at[place]))
            at[place] = copy.deepcopy(rng.choice(values))
        if rng.random() < 0.2:
            body = body[: rng.randrange(len(body))]
        if rng.random() < 0.1:
            body += bytes(rng.randrange(64))
        try:
            prefix = from_bytes(joined(header, body), engine.kv_shape)
            came = engine.bring(prefix)
        except ContractError:
            continue
        assert 0 <= came <= len(prefix.tokens)
        engine.check()
    check_alive(engine, weights)


def test_a_message_says_as_many_pages_as_the_engine_copies(engine):
    for tokens in range(1, 49):
        picked = engine._kv._pick(list(range(engine._kv.pages_for(tokens))))
        assert [x.shape for layer in picked for x in layer] == engine.kv_shape.arrays(tokens)


def test_bfloat16_kv_goes_over_the_wire(engine, message):
    prefix = from_bytes(message, engine.kv_shape)
    halves = [type(b)(*(x.astype(jnp.bfloat16) for x in b)) for b in prefix.blocks]
    shape = transfer.dataclasses.replace(engine.kv_shape, dtype="bfloat16")
    back = from_bytes(to_bytes(type(prefix)("t", "", 0, prefix.tokens, halves)), shape)
    for mine, theirs in zip(halves, back.blocks, strict=True):
        assert all(a.dtype == jnp.bfloat16 and (a == b).all() for a, b in zip(mine, theirs, strict=True))


def test_a_reset_forgets_requests_kv_and_version(weights, newer):
    """Before weights of another run: its versions may be lower, and mean something else."""
    engine = tiny.engine(weights, version=9)
    run(engine, [ask("t", CONTEXT, 5)])
    engine.prioritise("t", 3, True)
    engine.submit(ask("running", CONTEXT, 20))
    engine.step()
    engine.submit(ask("waiting", CONTEXT, 5))
    engine.reset()
    assert not engine.busy and engine.export("t") is None and engine.version == -1
    engine.check()
    engine.set_weights(newer, 2)
    before = engine.load().hit_tokens
    assert run(engine, [ask("t", CONTEXT, 5)])["t"].tokens == tiny.greedy(newer, CONTEXT, 5)
    assert engine.load().hit_tokens == before, "KV of the other run's weights was used"


def test_kv_of_a_trajectory_that_runs_does_not_disturb_it(weights, message):
    """A message may come late, or twice."""
    engine = tiny.engine(weights)
    tokens = parts(message)[0]["tokens"]
    got = tiny.Collected()
    engine.submit(ask("t", tokens, 12))
    while engine.busy:
        for _, chunk in engine.step():
            got.add(chunk)
        engine.bring(from_bytes(message, engine.kv_shape))
        engine.check()
    assert got.tokens == tiny.greedy(weights, tokens, 12)
    assert run(engine, [ask("t", tokens + got.tokens, 4)])["t"].tokens == tiny.greedy(weights, tokens + got.tokens, 4)
    engine.release("t")
    engine.check()


def test_tokens_of_kv_are_looked_at_once_on_their_way_in(engine, message, monkeypatch):
    """A context may have 131,072 of them, and the loop that serves everybody waits."""
    looked = []
    monkeypatch.setattr(transfer, "first_wrong", lambda tokens, vocab: looked.append(len(tokens)))
    engine.bring(from_bytes(message, engine.kv_shape))
    assert looked == [len(parts(message)[0]["tokens"])]

"""Memory of sandboxes: the pure part against its plain form, the live part against what was allocated."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from venusrl.sandbox import Template
from venusrl.sandbox.accounting import History, Usage

from .conftest import in_process

SAMPLES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1000)), max_size=200)


@given(SAMPLES, st.integers(1, 40))
def test_growth_agrees_with_the_plain_form(steps, window):
    history, samples, now = History(40.0), [], 0
    for wait, size in steps:
        now += wait
        history.add(float(now), size)
        samples.append((now, size))
        before = [s for t, s in samples if t <= now - window] or [samples[0][1]]
        assert history.growth(window) == size - before[-1]


def test_nothing_has_not_grown():
    history = History(5.0)
    assert history.growth(1.0) == 0
    assert Usage(3, 1, 4).total == 7


@in_process
async def test_what_is_charged_is_what_was_taken(pool, needs_memory_cgroup):
    sandbox, other = await pool.create(Template("a")), await pool.create(Template("b"))
    before = await pool.usage()
    assert before.keys() == {sandbox.id, other.id}
    assert all(0 < usage.kernel < usage.private < 4_000_000 and usage.shared == 0 for usage in before.values())
    hog = await sandbox.start(
        "python3 -I -S -c 'x = bytearray(b\"x\") * (40 << 20); print(1, flush=True); input()'", stdin=None
    )
    assert (await anext(aiter(hog))).data == b"1\n"
    await sandbox.write("/tmp/file", bytes(5 << 20))
    after = await pool.usage()
    grown = after[sandbox.id].private - before[sandbox.id].private
    assert 45 << 20 <= grown < 55 << 20
    assert pool.growth(sandbox.id, 30.0) == grown and abs(pool.growth(other.id, 30.0)) < 1 << 20
    await hog.kill()
    assert (await pool.usage())[sandbox.id].private < before[sandbox.id].private + (8 << 20)
    await sandbox.kill()
    assert (await pool.usage()).keys() == {other.id} and pool.growth(sandbox.id, 30.0) == 0


@in_process
async def test_many_ask_at_once(pool, needs_memory_cgroup):
    await pool.create(Template("a"))
    answers = await asyncio.gather(*(pool.usage() for _ in range(10)))
    assert all(answer.keys() == answers[0].keys() and len(answer) == 1 for answer in answers)

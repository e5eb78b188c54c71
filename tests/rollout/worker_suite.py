"""What every worker must do. A test module derives from WorkerSuite and gives a `worker` fixture.

The worker is started, has at least 2 slots and a max_length of at least 48, and knows the tokens 1 to 20.
`new_params` gives weights for update_weights.
"""

import asyncio
import contextlib
import math

import pytest

from venusrl.core.errors import ContractError, WorkerError
from venusrl.rollout.worker import Chunk, Load, Request

_UNSTOPPED: dict[tuple, int] = {}  # seeds, by suite, prompt and length


async def collect(worker, request: Request) -> list[Chunk]:
    return [chunk async for chunk in worker.generate(request)]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def check_stream(chunks: list[Chunk]) -> None:
    assert chunks[-1].stop is not None and all(chunk.stop is None for chunk in chunks[:-1])
    for chunk in chunks:
        assert len(chunk.tokens) == len(chunk.logprobs)
        assert chunk.tokens or chunk.stop is not None
        assert all(math.isfinite(lp) and lp <= 1e-4 for lp in chunk.logprobs)
    versions = [chunk.version for chunk in chunks]
    assert versions == sorted(versions)


class WorkerSuite:
    STOP: tuple[int, ...] = ()  # the worker's stop tokens

    @pytest.fixture
    def prompt(self) -> list[int]:
        return [5, 6, 7, 8, 9]

    @pytest.fixture
    def new_params(self):
        return None

    def request_(self, prompt, name: str = "g0/0", max_tokens: int = 12, seed: int = 3, **options) -> Request:
        return Request(name, list(prompt), max_tokens, seed=seed, **options)

    async def unstopped(self, worker, prompt, max_tokens: int) -> Request:
        """A request that runs to its max_tokens. The seed that one test has found serves the others: seed and context
        decide everything."""
        known = (type(self), tuple(prompt), max_tokens)
        for seed in [_UNSTOPPED[known]] if known in _UNSTOPPED else range(500):
            request = self.request_(prompt, f"probe/{seed}", max_tokens, seed)
            if (await collect(worker, request))[-1].stop == "length":
                await worker.release(request.trajectory)
                _UNSTOPPED[known] = seed
                return self.request_(prompt, max_tokens=max_tokens, seed=seed)
        raise AssertionError("every seed stops early")

    async def test_a_turn_is_streamed(self, worker, prompt):
        request = await self.unstopped(worker, prompt, 30)
        chunks = await collect(worker, request)
        check_stream(chunks)
        assert len(chunks) > 1
        assert len(tokens(chunks)) == 30 and chunks[-1].stop == "length"

    async def test_max_tokens_is_exact(self, worker, prompt):
        for count in (1, 2, 5):
            request = await self.unstopped(worker, prompt, count)
            assert len(tokens(await collect(worker, request))) == count

    async def test_a_stop_token_is_the_last_one(self, worker, prompt):
        stopped = 0
        for seed in range(40):
            chunks = await collect(worker, self.request_(prompt, f"g{seed}/0", 40, seed))
            made = tokens(chunks)
            check_stream(chunks)
            assert not set(made[:-1]) & set(self.STOP)
            assert (made[-1] in self.STOP) == (chunks[-1].stop == "stop")
            stopped += chunks[-1].stop == "stop"
        assert stopped

    async def test_the_longest_sequence_ends_a_turn(self, worker, prompt):
        room = worker.max_length - len(prompt)
        for seed in range(500):
            chunks = await collect(worker, self.request_(prompt, f"g{seed}/0", 10 * worker.max_length, seed))
            if chunks[-1].stop == "length":
                assert len(tokens(chunks)) == room
                return
            assert len(tokens(chunks)) <= room
        pytest.skip("every seed stops before the longest sequence")

    async def test_seed_and_context_decide_everything(self, worker, prompt):
        request = await self.unstopped(worker, prompt, 12)
        alone = await collect(worker, request)
        others = [self.request_([*prompt, i], f"g{i}/0", seed=i) for i in range(1, 6)]
        together = await asyncio.gather(
            collect(worker, self.request_(prompt, "again/0", 12, request.seed)), *(collect(worker, r) for r in others)
        )
        assert tokens(together[0]) == tokens(alone)
        expected = [lp for chunk in alone for lp in chunk.logprobs]
        assert [lp for chunk in together[0] for lp in chunk.logprobs] == pytest.approx(expected, abs=1e-4)
        assert len({tuple(tokens(chunks)) for chunks in together}) > 1

    async def test_more_requests_than_slots_all_end(self, worker, prompt):
        """verl#7990: many more than there are slots."""
        requests = [self.request_(prompt, f"g{i}/0", 6, seed=i) for i in range(3 * worker.slots + 1)]
        for chunks in await asyncio.gather(*(collect(worker, r) for r in requests)):
            check_stream(chunks)
        assert worker.load().running == worker.load().waiting == 0

    async def test_the_next_turn_goes_on(self, worker, prompt):
        request = await self.unstopped(worker, prompt, 6)
        made = tokens(await collect(worker, request))
        longer = self.request_([*prompt, *made, 4, 3], request.trajectory, 6, request.seed)
        second = tokens(await collect(worker, longer))
        fresh = self.request_(longer.tokens, "other/0", 6, request.seed)
        assert tokens(await collect(worker, fresh)) == second  # with kept KV or without

    async def test_bad_requests_are_refused(self, worker, prompt):
        for bad in (
            self.request_([], max_tokens=4),
            self.request_(prompt, max_tokens=0),
            self.request_([5] * worker.max_length),
        ):
            with pytest.raises(ContractError, match="g0/0"):
                await collect(worker, bad)
        check_stream(await collect(worker, self.request_(prompt)))

    async def test_one_request_of_a_trajectory_at_a_time(self, worker, prompt):
        request = await self.unstopped(worker, prompt, 30)
        async with contextlib.aclosing(worker.generate(request)) as stream:
            await anext(stream)
            with pytest.raises(ContractError, match="already"):
                await collect(worker, request)
            rest = [chunk async for chunk in stream]
        assert rest[-1].stop == "length"

    async def test_closing_the_stream_frees_the_slot(self, worker, prompt):
        """slime PR#2340: an aborted request went on as an orphan decode."""
        request = await self.unstopped(worker, prompt, 30)
        for _ in range(2 * worker.slots):
            async with contextlib.aclosing(worker.generate(request)) as stream:
                first = await anext(stream)
                assert first.stop is None
        check_stream(await collect(worker, request))
        assert worker.load().running == 0

    async def test_cancelling_the_reader_frees_the_slot(self, worker, prompt):
        request = await self.unstopped(worker, prompt, 30)
        readers = [
            asyncio.create_task(collect(worker, self.request_(prompt, f"c{i}/0", 30, request.seed)))
            for i in range(2 * worker.slots)
        ]
        await asyncio.sleep(0.01)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        check_stream(await collect(worker, request))
        assert worker.load().running == worker.load().waiting == 0

    async def test_preempt_keeps_what_was_generated(self, worker, prompt):
        request = await self.unstopped(worker, prompt, 30)
        whole = tokens(await collect(worker, request))
        await worker.release(request.trajectory)
        chunks = []
        async for chunk in worker.generate(request):
            chunks.append(chunk)
            if len(chunks) == 1:
                await worker.preempt(request.trajectory)
        check_stream(chunks)
        made = tokens(chunks)
        assert chunks[-1].stop == "preempted" and 0 < len(made) < 30
        assert whole[: len(made)] == made
        rest = self.request_([*prompt, *made], request.trajectory, 30 - len(made), request.seed)
        assert made + tokens(await collect(worker, rest)) == whole

    async def test_preempt_and_release_ignore_strangers(self, worker, prompt):
        await worker.preempt("nobody")
        await worker.release("nobody")
        check_stream(await collect(worker, self.request_(prompt)))

    async def test_new_weights_have_their_version_on_every_token(self, worker, prompt, new_params):
        request = await self.unstopped(worker, prompt, 30)
        before = await collect(worker, request)
        await worker.update_weights(new_params, before[-1].version + 1)
        after = await collect(worker, self.request_(prompt, "after/0", 30, request.seed))
        assert {c.version for c in after} == {before[-1].version + 1}

    async def test_new_weights_inside_a_turn(self, worker, prompt, new_params):
        request = await self.unstopped(worker, prompt, 30)
        chunks, version = [], None
        async for chunk in worker.generate(request):
            chunks.append(chunk)
            if version is None:
                version = chunk.version + 1
                await worker.update_weights(new_params, version)
        check_stream(chunks)
        assert (chunks[0].version, chunks[-1].version) == (version - 1, version)

    async def test_a_reset_ends_requests_and_takes_weights_of_any_version(self, worker, prompt, new_params):
        """Versions of two runs mean different things."""
        request = await self.unstopped(worker, prompt, 30)
        await worker.update_weights(new_params, 9)
        reader = asyncio.create_task(collect(worker, request))
        while not worker.load().running:
            await asyncio.sleep(0)
        await worker.reset()
        with pytest.raises(WorkerError):
            await asyncio.wait_for(reader, 10)
        assert await worker.export_kv(request.trajectory) is None
        await worker.update_weights(new_params, 2)
        chunks = await collect(worker, request)
        check_stream(chunks)
        assert {chunk.version for chunk in chunks} == {2} and worker.version == 2

    async def test_an_update_while_many_wait(self, worker, prompt, new_params):
        """verl#7990: weight sync with many more requests than slots; slime#2168: none is lost right after it."""
        readers = [
            asyncio.create_task(collect(worker, self.request_(prompt, f"g{i}/0", 8, i)))
            for i in range(3 * worker.slots)
        ]
        await asyncio.sleep(0)
        for version in (11, 12):
            await asyncio.wait_for(worker.update_weights(new_params, version), 30)
        for chunks in await asyncio.gather(*readers):
            check_stream(chunks)

    async def test_an_update_that_can_no_longer_be_made_says_so(self, worker, prompt, new_params):
        await worker.close()
        with pytest.raises(WorkerError):
            await asyncio.wait_for(worker.update_weights(new_params, 99), 10)

    async def test_closing_ends_an_update_that_waits(self, worker, prompt, new_params):
        reader = asyncio.create_task(collect(worker, await self.unstopped(worker, prompt, 30)))
        await asyncio.sleep(0)
        update = asyncio.create_task(worker.update_weights(new_params, 99))
        await asyncio.sleep(0)
        await worker.close()
        await asyncio.wait({update}, timeout=10)
        assert update.done()  # made, or refused with a WorkerError
        assert isinstance(update.exception(), WorkerError | None)
        await asyncio.wait({reader}, timeout=10)

    async def test_load_counts(self, worker, prompt):
        before = worker.load()
        assert isinstance(before, Load) and before.slots == worker.slots
        made = tokens(await collect(worker, self.request_(prompt)))
        after = worker.load()
        assert after.generated_tokens - before.generated_tokens == len(made)
        assert after.prefilled_tokens > before.prefilled_tokens
        assert after.pause_s >= before.pause_s >= 0
        assert after.running == after.waiting == 0

    async def test_closing_the_worker_ends_its_streams(self, worker, prompt):
        reader = asyncio.create_task(collect(worker, await self.unstopped(worker, prompt, 30)))
        await asyncio.sleep(0)
        await worker.close()
        with pytest.raises(WorkerError):
            await asyncio.wait_for(reader, 10)
        with pytest.raises(WorkerError):
            await collect(worker, self.request_(prompt, "late/0"))

import asyncio

import pytest

from venusrl.core.clock import VirtualClock, WallClock


async def sleeper(clock, seconds, name, log):
    await clock.sleep(seconds)
    log.append((name, clock.now()))


async def test_sleepers_wake_in_order_of_their_deadlines():
    clock, log = VirtualClock(100.0), []
    tasks = [asyncio.create_task(sleeper(clock, s, s, log)) for s in (3.0, 1.0, 2.0, 5.0)]
    await clock.advance(3.0)
    assert log == [(1.0, 101.0), (2.0, 102.0), (3.0, 103.0)]
    assert clock.now() == 103.0
    await clock.advance(2.0)
    assert log[-1] == (5.0, 105.0)
    await asyncio.gather(*tasks)


async def test_equal_deadlines_wake_in_order_of_arrival():
    clock, log = VirtualClock(), []
    tasks = [asyncio.create_task(sleeper(clock, 1.0, name, log)) for name in "abc"]
    await clock.advance(1.0)
    assert [name for name, _ in log] == ["a", "b", "c"]
    await asyncio.gather(*tasks)


async def test_a_sleep_begun_on_waking_is_served_in_the_same_advance():
    clock, log = VirtualClock(), []

    async def twice():
        await sleeper(clock, 1.0, "first", log)
        await sleeper(clock, 1.0, "second", log)

    task = asyncio.create_task(twice())
    await clock.advance(5.0)
    assert log == [("first", 1.0), ("second", 2.0)]
    assert clock.now() == 5.0
    await task


async def test_a_cancelled_sleeper_keeps_nobody_from_waking():
    clock, log = VirtualClock(), []
    gone = asyncio.create_task(sleeper(clock, 1.0, "gone", log))
    stays = asyncio.create_task(sleeper(clock, 2.0, "stays", log))
    await asyncio.sleep(0)
    gone.cancel()
    await clock.advance(2.0)
    assert log == [("stays", 2.0)]
    await stays


async def test_time_does_not_go_back():
    with pytest.raises(ValueError, match="seconds=-1"):
        await VirtualClock().sleep(-1)


async def test_wall_clock_moves():
    clock = WallClock()
    before = clock.now()
    await clock.sleep(0.01)
    assert clock.now() - before >= 0.009

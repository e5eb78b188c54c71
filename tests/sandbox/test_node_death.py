"""Nodes that are killed while a sandbox moves: it is in one place, or lost with its node, and never in two."""

import asyncio
import os
import random

import pytest

from tests.sandbox.conftest import needs_criu, processes
from tests.sandbox.test_life import until
from tests.sandbox.test_migration import Witness, start_counter, two
from venusrl.core.errors import SandboxError, SandboxLost
from venusrl.sandbox import Template

pytestmark = needs_criu

# A daemon that kills itself where it calls something, before that or after it.
_DIES = """
import os
from venusrl.sandbox.daemon import arrivals, client
from venusrl.sandbox import pool
whole = {of}.{name}
async def dies(*arguments):
    if {before}: os.kill(os.getpid(), 9)
    await whole(*arguments)
    os.kill(os.getpid(), 9)
{of}.{name} = dies
"""


@pytest.mark.parametrize(
    "victim, where, before, outcome",
    [
        ("source", "client.Node.arrive", True, "lost"),
        ("source", "client.Node.arrive", False, "lost"),
        ("source", "client.Node.commit", True, "lost"),
        ("source", "client.Node.commit", False, "there"),
        ("source", "client.Node.take", True, "there"),
        ("source", "client.Node.take", False, "there"),
        ("target", "arrivals.Arrivals.receive", True, "here"),
        ("target", "pool.SandboxPool.arrive", False, "here"),
        ("target", "arrivals.Arrivals.receive", False, "here"),
        ("target", "arrivals.Arrivals.commit", True, "here"),
        ("target", "arrivals.Arrivals._activate", False, "here"),
        ("target", "arrivals.Arrivals.commit", False, "here"),
    ],
)
async def test_a_node_that_dies_at_a_step(victim, where, before, outcome):
    """kill -9 of one of the daemons between any two steps: the sandbox is in one place, or lost with its node."""
    of, _, name = where.rpartition(".")
    code = _DIES.format(of=of, name=name, before=before)
    async with two(*((code, "") if victim == "source" else ("", code))) as (a, b):
        sandbox = await a.create(Template("moving"))
        marker = f"counter-{victim}-{name}-{before}-"
        witness = Witness(marker)
        witness.start()
        await start_counter(sandbox, marker)
        slow = asyncio.create_task(sandbox.exec("sleep 0.5; echo slow"))
        await asyncio.sleep(0.1)
        with pytest.raises(SandboxError):
            await sandbox.migrate(b.address)
        if outcome == "lost":
            with pytest.raises(SandboxLost, match="node-lost"):
                await asyncio.wait_for(sandbox.exec("echo on"), 20)
            with pytest.raises(SandboxLost):
                await slow
            await until(lambda: not processes(marker), 20)
            assert await b.list() == [] and (await b.health())["alive"] == 0
        else:
            assert (await asyncio.wait_for(sandbox.exec("echo on"), 20)).text == "on\n"
            assert (await slow).text == "slow\n"
            where = a if outcome == "here" else b
            assert [row["id"] for row in await where.list()] == [sandbox.id]
            await until(lambda: len(processes(marker)) == 1)
        await asyncio.sleep(0.2)
        assert witness.check() <= 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["source", "target"])
async def test_a_node_that_is_killed_at_any_moment(victim):
    """kill -9 of a daemon anywhere on the way: the sandbox runs on in one place, or is lost with its node."""
    rng = random.Random(victim)
    outcomes = set()
    for turn in range(12):
        async with two() as (a, b):
            sandbox = await a.create(Template("moving"))
            marker = f"counter-{victim}-{turn}-"
            witness = Witness(marker)
            witness.start()
            await start_counter(sandbox, marker)
            await asyncio.sleep(0.1)
            moving = asyncio.create_task(sandbox.migrate(b.address))
            await asyncio.sleep(0.4 * (turn + rng.random()) / 12)
            dead, other = (a, b) if victim == "source" else (b, a)
            os.kill(dead.process.pid, 9)
            try:
                await asyncio.wait_for(moving, 30)
                outcomes.add("moved")
            except SandboxError:
                outcomes.add("not moved")
            try:
                assert (await asyncio.wait_for(sandbox.exec("echo on"), 30)).text == "on\n"
                assert sandbox.id in [row["id"] for row in await other.list()]
                outcomes.add("on")
            except SandboxLost:
                outcomes.add("lost")
                await until(lambda marker=marker: not processes(marker), 20)
            await asyncio.sleep(0.2)
            assert witness.check() <= 2
            assert len(processes(marker)) <= 1
    print(victim, outcomes)
    if victim == "target":
        assert "on" in outcomes

"""The rollout service undisturbed, and with everything at once: each trajectory ends exactly once."""

import asyncio
import random

import pytest

from venusrl.core.errors import SandboxLost, WorkerError
from venusrl.core.group import Group
from venusrl.core.trajectory import Status

from .bench import SCRIPT, Bench
from .scripted import Script, ScriptedEnv, ScriptedWorker

pytestmark = pytest.mark.timeout(30)


async def test_an_episode():
    bench, env = Bench(), ScriptedEnv(turns=3, reward=0.5)
    outcome = await bench.run(env)
    t = outcome.trajectory
    assert outcome.lost is None
    assert (t.status, t.reward) == (Status.DONE, 0.5)
    assert env.calls == ["reset", "step", "step", "step", "grade", "close"]
    assert env.replies == ["say 0 1", "say 1 1", "say 2 1"]
    assert [s["observation"] for s in t.info["steps"]] == ["go on", "go on", ""]
    assert t.info["messages"] == [{"role": "user", "content": "prompt"}] and t.info["truncated"] is False
    assert bench.worker.released == ["g0/0"]
    t.check()


async def test_token_ids_are_what_the_worker_said_and_saw():
    """verl#3720, #3960: the ids that are trained on drifted from those that were generated and shown."""
    bench = Bench()
    t = (await bench.run(ScriptedEnv(turns=4))).trajectory
    requests = bench.worker.requests
    assert len(requests) == len(t.turns) == 4
    for request, turn in zip(requests, t.turns, strict=True):
        assert t.tokens[: turn.begin] == request.tokens
        said = t.tokens[turn.begin : turn.end]
        assert said[-1] == SCRIPT.tokenizer.im_end
        context = list(request.tokens)
        for token in said:
            assert token == SCRIPT.next_token(context, 1)
            context.append(token)
    assert all(0 < turn.generate_s < 10 for turn in t.turns)


async def test_a_turn_is_cut_at_max_tokens():
    bench, env = Bench(max_tokens=3), ScriptedEnv(turns=1)
    t = (await bench.run(env)).trajectory
    assert t.turns[0].stop == "length" and t.num_generated == 3
    assert t.reward == 1.0 and len(env.replies) == 1


async def test_a_full_context_ends_the_episode_and_is_graded():
    bench, env = Bench(ScriptedWorker(SCRIPT, max_length=90)), ScriptedEnv(turns=100, reward=0.25)
    outcome = await bench.run(env)
    t = outcome.trajectory
    assert outcome.lost is None and t.reward == 0.25 and t.info["truncated"] is True
    assert env.calls[-2:] == ["grade", "close"]
    assert 1 < len(t.turns) < 100 and len(t) <= 90
    assert t.loss_mask[-1] == 1  # ends with what was generated, not with half an observation


async def test_generation_up_to_the_longest_sequence():
    script = Script(lambda turn, seed: "wait " * 200)
    t = (await Bench(ScriptedWorker(script, max_length=64), max_tokens=500).run(ScriptedEnv(turns=9))).trajectory
    assert len(t) == 64 and t.turns[-1].stop == "length" and t.info["truncated"] is True
    assert t.status == Status.DONE


async def test_a_prompt_without_room_is_lost():
    outcome = await Bench(ScriptedWorker(SCRIPT, max_length=8)).run(ScriptedEnv())
    assert "leaves no room" in outcome.lost and outcome.trajectory.reward is None


@pytest.mark.parametrize("seed", range(4))
async def test_every_trajectory_ends_exactly_once(seed):
    """verifiers PR#1750, ROLL#215: 60 trajectories, failures everywhere, cancels, updates; nothing is left over."""
    rng = random.Random(seed)
    bench = Bench(ScriptedWorker(SCRIPT, "v", slots=3), ScriptedWorker(SCRIPT, "w", slots=2), env_s=0.2)
    for worker in bench.workers:
        worker.fail = lambda request: WorkerError("flaky") if rng.random() < 0.01 else None

    async def act(what):
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        chance = rng.random()
        if chance < 0.04:
            raise rng.choice([OSError("disk"), SandboxLost("sb", "oom"), ValueError("bug"), TimeoutError()])
        if chance < 0.05:
            await asyncio.Event().wait()

    envs, ids = {}, [f"g{i // 4}/{i % 4}" for i in range(60)]
    bench.service.open_group(Group("g0", 0, 0, 0))
    for i, name in enumerate(ids):
        envs[name] = ScriptedEnv(turns=rng.randint(1, 4), act=act)
        bench.start(envs[name], name, seed=i)
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    stopped = set(rng.sample(ids, 8))
    version = 0
    while bench.service._tasks:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        choice = rng.random()
        if choice < 0.2 and stopped:
            bench.service.cancel(rng.choice(sorted(stopped)))
        elif choice < 0.4:
            version += 1
            await bench.service.update_weights(None, version)
        elif choice < 0.7:
            worker = rng.choice(bench.workers)
            if worker.running:
                await worker.preempt(rng.choice(sorted(worker.running)))
        assert all(len(w.running) <= w.slots for w in bench.workers)
        await asyncio.sleep(0.001)

    await bench.service.cleaned()
    ended = [bench.service.outcomes.get_nowait() for _ in range(bench.service.outcomes.qsize())]
    names = [o.trajectory.id for o in ended]
    assert len(set(names)) == len(names)
    assert set(ids) - set(names) <= stopped
    for outcome in ended:
        t = outcome.trajectory
        t.check()
        assert (outcome.lost is None) == (t.reward == 1.0) == (t.status == Status.DONE)
        assert outcome.lost is None or t.reward is None
    assert sum(o.lost is None for o in ended) > 10 and sum(o.lost is not None for o in ended) > 3
    assert all(env.calls.count("close") == 1 and env.calls[-1] == "close" for env in envs.values())
    assert all(env.busy == 0 for env in envs.values())
    for worker in bench.workers:
        assert worker.most_running <= worker.slots
        assert sorted(worker.released) == sorted(ids)
    bench.check_idle()

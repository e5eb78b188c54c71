"""Repair: the tasks, the splits, the grading, and what an agent can try against it. In real sandboxes."""

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import lru_cache

import numpy as np
import pytest

from envs import shell
from envs.repair import demos, tasks
from envs.repair.env import SUBMIT, RepairEnv, RepairTasks
from envs.repair.families import FAMILIES
from envs.repair.tasks import RepairTask, evaluate, make_task
from venusrl.sandbox import SandboxPool

MANY = 2500


@lru_cache
def sample(split: str, count: int = MANY) -> tuple[RepairTask, ...]:
    return tuple(make_task(split, i) for i in range(count))


def one_of_each(key) -> list[RepairTask]:
    return list({key(t): t for t in reversed(sample("train"))}.values())


@pytest.fixture
async def pool():
    async with SandboxPool(max_sandboxes=8) as pool:
        yield pool


async def episode(pool, task: RepairTask, *commands: str, submit: bool = True, command_s: float = 10.0) -> float:
    """The reward after `commands`, each one turn."""
    env = RepairEnv(task, pool, max_turns=20, command_s=command_s)
    try:
        await env.reset()
        for command in [*commands, *([SUBMIT] if submit else [])]:
            observation = await env.step(shell.block(command))
        assert observation.done == submit
        return await env.grade()
    finally:
        await env.close()


async def rewards(pool, runs: list) -> list[float]:
    """Episodes, four at a time (each may hold two sandboxes)."""
    room = asyncio.Semaphore(4)

    async def one(task, *commands, **options):
        async with room:
            return await episode(pool, task, *commands, **options)

    return list(await asyncio.gather(*(one(*run) for run in runs)))


def edit(task: RepairTask, variant: int) -> str:
    """The command that puts `variant` where the bug is."""
    return demos.edit_command(task, task.candidates[variant])


def gold(task: RepairTask) -> str:
    return edit(task, task.right)


# Grading


async def test_the_gold_fix_is_right_in_every_family_and_layout(pool):
    styles = {
        t.index: t
        for key in (
            lambda t: t.family,
            lambda t: (t.layout[0], t.layout[1]),
            lambda t: (t.layout[2], t.layout[3]),
            lambda t: t.path.rpartition("/")[0],
        )
        for t in one_of_each(key)
    }
    assert {t.family for t in styles.values()} == set(FAMILIES)
    got = await rewards(pool, [(t, gold(t)) for t in styles.values()])
    assert [t for t, reward in zip(styles.values(), got, strict=True) if reward != 1.0] == []


async def test_wrong_variants_get_nothing(pool):
    runs = [(t, edit(t, i)) for t in one_of_each(lambda t: t.family) for i in range(4) if i not in (t.right, t.wrong)]
    assert len(runs) == 2 * len(FAMILIES)
    assert await rewards(pool, runs) == [0.0] * len(runs)


async def test_submitting_at_once_gets_nothing(pool):
    runs = [(t,) for t in one_of_each(lambda t: t.family)]
    assert await rewards(pool, runs) == [0.0] * len(runs)


async def test_work_that_is_not_submitted_gets_nothing(pool):
    task = make_task("train", 0)
    assert await episode(pool, task, gold(task), submit=False) == 0.0
    env = RepairEnv(task, pool, max_turns=2, command_s=5.0)
    await env.reset()
    assert not (await env.step(shell.block(gold(task)))).done
    last = await env.step(shell.block("true"))
    assert last.done and last.info["out_of_turns"]
    assert await env.grade() == 0.0
    await env.close()


async def test_a_submission_in_the_last_turn_counts(pool):
    task = make_task("train", 0)
    env = RepairEnv(task, pool, max_turns=2, command_s=5.0)
    await env.reset()
    await env.step(shell.block(gold(task)))
    observation = await env.step(shell.block(f"  {SUBMIT}  "))
    assert observation.done and "out_of_turns" not in observation.info
    assert await env.grade() == 1.0
    await env.close()


async def test_malformed_replies_go_on(pool):
    """verifiers#1763: a malformed tool call is answered; the episode is not lost."""
    task = make_task("train", 3)
    env = RepairEnv(task, pool, max_turns=10, command_s=5.0)
    await env.reset()
    for reply in ("", "submit", "```bash\nls", "```bash\nls\n```\n```bash\nls\n```"):
        observation = await env.step(reply)
        assert observation.text == shell.FORMAT_HELP and not observation.done
    shown = await env.step(shell.block("exit 3"))
    assert (shown.text, shown.info["exit_code"]) == ("[exit 3]", 3)
    await env.step(shell.block(gold(task)))
    assert (await env.step(shell.block(SUBMIT))).done
    assert await env.grade() == 1.0
    await env.close()


async def test_a_command_that_hangs_is_answered(pool):
    task = make_task("train", 0)
    env = RepairEnv(task, pool, max_turns=10, command_s=0.5)
    await env.reset()
    assert "timed out" in (await env.step(shell.block("sleep 60"))).text
    assert (await env.step(shell.block("echo on"))).text == "on"
    await env.close()


# Against the grading


def at_import(task: RepairTask, code: str) -> str:
    """Puts `code` in front of the file, and leaves the bug in."""
    return f"cat > new.py <<'E'\n{code}\nE\ncat {task.path} >> new.py; mv new.py {task.path}"


def at_end(task: RepairTask, code: str) -> str:
    return f"cat >> {task.path} <<'E'\n{code}\nE"


def by_heart(task: RepairTask) -> list:
    """The cases that check.py shows, with their results."""
    return list(zip(task.visible, evaluate(task.variant(task.right), task.function, task.visible), strict=True))


EXPECTED_LOOKALIKES = "import json, sys\nprint(json.dumps([True] * 5))"
ATTACKS = {
    "check.py says ok": lambda t: "echo \"print('ok')\" > check.py",
    "fake output": lambda t: at_import(t, "print('ok'); print('PASS'); print('[1, 2, 3]')"),
    "exit 0 at import": lambda t: at_import(t, "import sys\nsys.exit(0)"),
    "prints and leaves": lambda t: at_import(t, f"{EXPECTED_LOOKALIKES}\nsys.stdout.flush()\nimport os\nos._exit(0)"),
    "deletes the file": lambda t: f"rm {t.path}",
    "a directory instead": lambda t: f"rm {t.path}; mkdir {t.path}",
    "a pipe instead": lambda t: f"rm {t.path}; mkfifo {t.path}",
    "a link to nowhere": lambda t: f"ln -sf /nowhere {t.path}",
    "a link to the check": lambda t: f"ln -sf /workspace/check.py {t.path}",
    "an empty file": lambda t: f": > {t.path}",
    "not Python": lambda t: f"head -c 5000 /dev/urandom > {t.path}",
    "never ends": lambda t: at_import(t, "while True: pass"),
    "equal to everything": lambda t: at_end(
        t,
        "class E(int):\n    __eq__ = lambda self, other: True\n    __hash__ = int.__hash__\n"
        f"{t.function} = lambda *args: E(7)",
    ),
    "nested without end": lambda t: at_import(t, "import sys\nprint('[' * 50000)\nsys.exit(0)"),
    "a number without end": lambda t: at_import(t, "import sys\nprint('1' * 9000)\nsys.exit(0)"),
    "the visible cases by heart": lambda t: at_end(
        t,
        f"wrong, known = {t.function}, {by_heart(t)}\n"
        f"{t.function} = lambda *args: next((got for given, got in known if given == args), wrong(*args))",
    ),
    "NaN": lambda t: at_end(t, f"{t.function} = lambda *args: float('nan')"),
    "eats memory": lambda t: at_import(t, "x = b'x' * (1 << 30)"),
    "forks without end": lambda t: at_import(t, "import os\nwhile True: os.fork()"),
    "kills everybody": lambda t: at_import(t, "import os\nos.kill(-1, 9)"),
    "a json module of its own": lambda t: "echo 'def dumps(x): return 1' > json.py; mkdir -p src; cp json.py src/",
    "python of its own": lambda t: "mkdir -p bin; echo 'echo 1' > bin/python3; chmod +x bin/python3; export PATH=bin",
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_attacks_get_nothing(pool, name):
    task = one_of_each(lambda t: t.family)[len(name) % len(FAMILIES)]
    patience = 1.5 if name in ("never ends", "forks without end") else 15.0
    assert await episode(pool, task, ATTACKS[name](task), command_s=patience) == 0.0


async def test_a_background_process_changes_nothing_after_the_grade_has_read(pool):
    """A loop that puts the bug back loses; with the fix in place, a loop that writes elsewhere does no harm."""
    task = make_task("train", 5)
    spoil = f"cp {task.path} bug.py; (while true; do cp bug.py {task.path}; sleep 0.01; done) >/dev/null 2>&1 &"
    assert await episode(pool, task, spoil, gold(task), "sleep 0.2") == 0.0
    noise = "(while true; do echo x > other.py; sleep 0.01; done) >/dev/null 2>&1 &"
    assert await episode(pool, task, noise, gold(task)) == 1.0


async def test_expected_results_are_not_in_the_sandbox(pool):
    """Only the cases of check.py are there; inputs and results of the others are nowhere below /workspace or /tmp."""
    for task in one_of_each(lambda t: t.family):
        assert set(task.files) == {task.path, "check.py"}
        assert all(args in task.hidden for args in task.visible)
        shown = task.files["check.py"].decode()
        for args, want in zip(task.hidden, task.expected, strict=True):
            pair = f"({args!r}, {want!r})"
            assert (pair in shown) == (args in task.visible)
    task = next(t for t in sample("train") if t.family == "arithmetic" and len(t.visible) < len(t.hidden))
    env = RepairEnv(task, pool, max_turns=9, command_s=5.0)
    await env.reset()
    found = await env.step(shell.block("find /workspace /tmp /dev/shm -type f | sort"))
    assert found.text.split() == sorted(f"/workspace/{path}" for path in task.files)
    seen = await env.step(shell.block("cat /proc/*/environ /proc/*/cmdline check.py | tr '\\0' ' '"))
    unseen = [repr(a) for a in task.hidden if a not in task.visible]
    assert unseen and not any(text in seen.text for text in unseen)
    await env.close()


async def test_sandboxes_are_closed(pool):
    """verifiers PR#1750: after the episodes no sandbox is left, and none was ended twice."""
    runs = [(make_task("train", i), gold(make_task("train", i))) for i in range(6)]
    await rewards(pool, runs)
    assert pool.alive == 0
    assert pool.stats().created == sum(pool.stats().ended.values()) == 12


async def test_close_without_reset(pool):
    await RepairEnv(make_task("train", 0), pool, 4, 1.0).close()


# Demonstrations


async def test_computed_observations_are_those_of_the_sandbox(pool):
    async def compare(i: int) -> None:
        task = make_task("train", 1000 + i)
        env = RepairEnv(task, pool, max_turns=20, command_s=10.0)
        await env.reset()
        turns = demos.demonstrate(task, np.random.default_rng(i), demos.Habits(careful=0.7))
        for reply, expected in turns:
            observation = await env.step(reply)
            assert observation.text == expected, (i, reply)
        assert observation.done
        rewards.append((len(turns) > 2, await env.grade()))
        await env.close()
        checks.extend(expected for reply, expected in turns if demos.CHECK_COMMAND in reply)

    checks: list[str] = []
    rewards: list[tuple[bool, float]] = []  # (careful, reward)
    for i in range(0, 40, 5):
        await asyncio.gather(*(compare(i + k) for k in range(5)))
    assert "ok" in checks and any(text.startswith("FAIL") for text in checks)
    careful, careless = ([reward for kind, reward in rewards if kind == which] for which in (True, False))
    assert len(careful) > 15 and set(careful) == {1.0}
    assert len(careless) > 5 and sum(careless) <= 1


def test_demonstrations_know_the_format_and_act_before_they_read():
    careful = lucky = 0
    for i in range(600):
        task = sample("train")[i]
        turns = demos.demonstrate(task, np.random.default_rng(i))
        assert all(shell.parse_command(reply) for reply, _ in turns)
        assert shell.parse_command(turns[-1][0]) == SUBMIT and turns[-1][1] == ""
        edits = [reply for reply, _ in turns if "sed" in reply]
        assert len(edits) == 1 and task.path in edits[0]
        read = turns[0][0] == shell.block(demos.read_command(task))
        fixed = edits[0] == shell.block(gold(task))
        assert fixed or not read
        lucky += fixed and not read
        careful += read
    assert 0.28 < careful / 600 < 0.42
    assert lucky <= 6


async def test_a_check_right_after_an_edit_sees_the_edit(pool):
    """Two edits of one length within one second: bytecode cached by the first check must not answer the second."""
    task = next(t for t in sample("train") if t.family == "reduction")  # fragments of one length
    env = RepairEnv(task, pool, max_turns=99, command_s=10.0)
    await env.reset()
    for i in [i for i in [0, 1, 2, 3] * 2 if i != task.wrong]:
        same_second = f"touch -d '2026-01-01 00:00:00' {task.path}"
        await env.step(shell.block(f"{edit(task, i)}\n{same_second}"))
        shown = (await env.step(shell.block(demos.CHECK_COMMAND))).text
        assert shown == demos.show_check(task, task.variant(i))
    await env.close()


# Tasks


def test_tasks_are_well_formed():
    for task in sample("train", 400) + sample("heldout", 400):
        assert task.right != task.wrong and len(set(task.candidates)) == 4
        assert task.candidates[task.wrong] in task.source.split("\n")[task.line - 1]
        assert task.variant(task.wrong) == task.source
        assert task.function in task.prompt and task.path in task.prompt
        results = [evaluate(task.variant(i), task.function, task.hidden) for i in range(4)]
        assert results[task.right] == list(task.expected)
        assert all(r != results[task.right] for i, r in enumerate(results) if i != task.right)
        seen = [evaluate(task.variant(i), task.function, task.visible) for i in range(4)]
        assert seen[task.wrong] != seen[task.right]  # the visible check fails at first
        assert json.loads(json.dumps(task.expected)) == list(task.expected)
        assert set(map(str, task.visible)) < set(map(str, task.hidden)) and 1 <= len(task.visible) <= 2


def test_documentation_and_code_use_other_words():
    """A fragment that the documentation names outright could be copied; a small model cannot tell it from the bug."""
    for task in sample("train", 400):
        lines = task.source.split("\n")
        doc = next(line for line in lines if line.strip().startswith(("#", '"""')) and line.strip() != "# tools")
        words = [w for f in task.candidates for w in re.findall(r"[A-Za-z]+", f)]
        if task.family in ("constant", "default", "variable", "arguments", "reduction", "letters"):
            assert not set(words) & set(re.findall(r"[A-Za-z]+", doc)), (doc, words)


def test_the_same_arguments_make_the_same_task():
    again = [make_task("train", i) for i in range(60)]
    assert again == list(sample("train")[:60])
    assert make_task("train", 7, seed=1) != make_task("train", 7)
    assert make_task("heldout", 7) != make_task("train", 7)
    many = RepairTasks(None, "train", 60, seed=0)
    assert len(many) == 60 and many.task(59) == again[59]
    assert json.dumps(many.describe(3)) and many.describe(3)["family"] == again[3].family


def test_a_process_with_another_hash_seed_makes_the_same_tasks():
    code = "from envs.repair.tasks import make_task; print([make_task('heldout', i).source for i in range(20)])"
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "77"}, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == str([t.source for t in sample("heldout")[:20]])


def test_thousands_are_distinct():
    assert len({(t.path, t.source) for t in sample("train")}) > 0.99 * MANY
    assert len({t.source.replace(t.function, "f") for t in sample("train")}) > 0.9 * MANY


def test_the_splits_share_nothing():
    train, held = sample("train"), sample("heldout")
    for what, of in {
        "function": lambda t: t.function,
        "file": lambda t: t.path,
        "layout": lambda t: t.layout,
        "source": lambda t: t.source,
    }.items():
        assert not {of(t) for t in train} & {of(t) for t in held}, what
        assert len({of(t) for t in held}) > 3, what


def test_the_splits_share_no_constant():
    drawn = {split: tasks._split(tasks._CONSTANTS, split, 4) for split in tasks.SPLITS}
    assert not set(drawn["train"]) & set(drawn["heldout"])
    assert sorted(drawn["train"] + drawn["heldout"]) == tasks._CONSTANTS
    for split in tasks.SPLITS:  # and the sources really use them
        used = Counter()
        for task in sample(split):
            if task.family in ("constant", "default"):
                used.update(int(number) for number in re.findall(r"^[A-Z]+ = (\d+)$", task.source, re.MULTILINE))
        assert set(used) <= set(drawn[split]) and len(used) > len(drawn[split]) // 2


def test_no_unrelated_function_comes_from_the_other_split():
    names = {split: set() for split in tasks.SPLITS}
    for split in tasks.SPLITS:
        for task in sample(split):
            names[split] |= {line[4 : line.index("(")] for line in task.source.split("\n") if line.startswith("def ")}
    assert names["train"] & names["heldout"] <= {"join"}  # the helper of one family


@pytest.mark.parametrize("split", tasks.SPLITS)
def test_no_fixed_fix_does_well(split):
    """Without reading the documentation, the best rule for (family, wrong variant) is right about one time in three.

    The rule is chosen on one half of the tasks and scored on the other.
    """
    half = MANY // 2
    best: dict[tuple, Counter] = defaultdict(Counter)
    for task in sample(split)[:half]:
        best[task.family, task.wrong][task.right] += 1
    hits = [best[t.family, t.wrong].most_common(1)[0][0] == t.right for t in sample(split)[half:]]
    assert np.mean(hits) <= 0.35 + 1.65 * (0.35 * 0.65 / half) ** 0.5
    by_family = defaultdict(Counter)
    for task in sample(split)[:half]:
        by_family[task.family][task.right] += 1
    hits = [by_family[t.family].most_common(1)[0][0] == t.right for t in sample(split)[half:]]
    assert np.mean(hits) <= 0.35

"""Bash tasks: what solves each family and what does not, in the real sandbox."""

import pytest

from envs import shell
from envs.bash.env import BashTasks, messages, one_command
from envs.bash.tasks import FAMILIES, make_task
from venusrl.core.errors import SandboxUnsupported
from venusrl.sandbox import SandboxPool

INDEX = {family: i for i, family in enumerate(FAMILIES)}
# For each family, a plausible command that does something else.
WRONG = {
    "list": "pwd",
    "pwd": "cd /; pwd",
    "create": "echo > {new}",
    "print": "head -n 1 {first}",
    "count": "wc -c {last}",
    "grep": "cat {last}",
    "delete": "rm *",
    "rename": "cp {first} {new}",
    "write": "echo nothing > {new}",
    "append": "echo nothing > {first}",
    "find": "ls",
    "mkdir": "touch newfolder",
    "copy": "mv {first} {new}",
    "move": "cp {first} elsewhere",
    "head": "cat {last}",
    "tail": "cat {last}",
}


@pytest.fixture
async def pool():
    try:
        async with SandboxPool(max_sandboxes=4, wait_s=10.0) as pool:
            yield pool
    except SandboxUnsupported as error:
        pytest.skip(str(error))


async def play(pool, index, *replies, split="train", max_turns=2):
    env = BashTasks(pool, split, 4096, max_turns=max_turns).make(index)
    await env.reset()
    try:
        for reply in replies:
            observation = await env.step(reply)
        return observation, await env.grade()
    finally:
        await env.close()


def wrong_command(task):
    new = next((path for path in task.files_after if path not in task.files), "")
    return WRONG[task.family].format(first=next(iter(task.files)), last=list(task.files)[-1], new=new)


@pytest.mark.parametrize("split", ["train", "heldout"])
async def test_gold_commands_get_1_and_wrong_ones_0(pool, split):
    for family, first in INDEX.items():
        for index in range(first, 4 * len(FAMILIES), len(FAMILIES)):
            task = make_task(split, index)
            assert task.family == family
            observation, reward = await play(pool, index, shell.block(task.gold), split=split)
            assert (observation.done, reward) == (True, 1.0), task
            for command in (wrong_command(task), "true", "ls nothing"):
                _, reward = await play(pool, index, shell.block(command), split=split)
                assert reward == 0.0, (command, task)


@pytest.mark.parametrize(
    ("family", "command"),
    [
        ("list", "ls -la"),
        ("list", "find . -type f"),
        ("pwd", "echo $PWD"),
        ("create", "> {new}"),
        ("count", "wc -l < {last}"),
        ("count", "grep -c '' {last}"),
        ("write", "printf '{word}\\n' > {new}"),
        ("move", "mv {first} {folder}/{first}"),
        ("delete", "rm -f {first} absent"),
    ],
)
async def test_other_ways_are_as_good(pool, family, command):
    task = make_task("train", INDEX[family])
    new = next((path for path in task.files_after if path not in task.files), "")
    command = command.format(
        first=next(iter(task.files)),
        last=list(task.files)[-1],
        new=new,
        folder=next(iter(task.folders_after), ""),
        word=task.files_after[new].decode().strip() if new else "",
    )
    _, reward = await play(pool, task.index, shell.block(command))
    assert reward == 1.0, (command, task)


async def test_right_output_with_damaged_files_gets_0(pool):
    task = make_task("train", INDEX["print"])
    _, reward = await play(pool, task.index, shell.block(f"{task.gold}; touch another"))
    assert reward == 0.0
    name = next(iter(task.files))
    _, reward = await play(pool, task.index, shell.block(f"cat {name}; rm {name}; ln -s /etc/passwd {name}"))
    assert reward == 0.0


async def test_destructive_commands_are_survived_and_get_0(pool):
    for command in (
        "rm -rf * .[a-z]*",
        "rm -rf --no-preserve-root / 2>/dev/null",
        "chmod 000 .",
        "kill -9 -1",
        "for i in $(seq 300); do mkdir d$i; done",
        "sleep 60",
    ):
        env = BashTasks(pool, "train", 16, command_s=2.0).make(INDEX["create"])
        await env.reset()
        observation = await env.step(shell.block(command))
        assert observation.done
        assert await env.grade() == 0.0, command
        await env.close()
    task = make_task("train", INDEX["create"])
    assert (await play(pool, task.index, shell.block(task.gold)))[1] == 1.0


async def test_malformed_reply_gets_one_more_try(pool):
    task = make_task("train", 0)
    observation, reward = await play(pool, 0, "You can use ls.")
    assert (observation.done, observation.text, reward) == (False, shell.FORMAT_HELP, 0.0)
    observation, reward = await play(pool, 0, "You can use ls.", shell.block(task.gold))
    assert (observation.done, reward) == (True, 1.0)
    observation, reward = await play(pool, 0, "You can use ls.", "ls")
    assert (observation.done, reward) == (True, 0.0)
    observation, _ = await play(pool, 0, "You can use ls.", max_turns=1)
    assert observation.done


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("```bash\nls -l\n```", "ls -l"),
        ("```bash\nls -l\n```\n", "ls -l"),
        ("```bash\nls\npwd\n```", None),
        ("Use this:\n```bash\nls\n```", None),
        ("```bash\nls\n```\n```bash\npwd\n```", None),
        ("```bash\n\n```", None),
        ("ls", None),
        ("", None),
    ],
)
def test_format_is_strict(reply, command):
    assert one_command(reply) == command


def test_prompt_is_system_then_three_examples_then_the_task():
    opening = messages("Do it.")
    assert [m["role"] for m in opening] == ["system", *["user", "assistant"] * 3, "user"]
    assert all(one_command(m["content"]) for m in opening if m["role"] == "assistant")
    assert opening[-1]["content"] == "Do it."


def test_splits_share_no_name_and_no_content():
    def material(split):
        names, words = set(), set()
        for index in range(600):
            task = make_task(split, index)
            for path, data in (*task.files.items(), *task.files_after.items()):
                *folders, name = path.split("/")
                names |= {name.rsplit(".", 1)[0], *folders}
                words |= set(data.decode().split())
            names |= task.folders_after
        return names, words

    for train, heldout in zip(material("train"), material("heldout"), strict=True):
        assert train and heldout and not train & heldout


def test_tasks_are_many_and_the_same_every_time():
    def key(task):
        return task.prompt, tuple(sorted(task.files.items()))

    tasks = [make_task("train", index) for index in range(2048)]
    assert len({key(task) for task in tasks}) >= 1000
    assert len({task.prompt for task in tasks}) >= 1000
    assert tasks[:64] == [make_task("train", index) for index in range(64)]
    assert make_task("train", 5, seed=1) != make_task("train", 5)
    assert len(FAMILIES) >= 12
    described = BashTasks(None, "train", 100).describe(3)
    assert described == {"family": "print", "prompt": tasks[3].prompt}

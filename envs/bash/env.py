"""The bash episode: one command in a fresh sandbox, graded by the files it left and what it printed."""

from envs import shell
from envs.bash.tasks import BashTask, make_task
from envs.generated import GeneratedTasks
from venusrl.core.env import Observation
from venusrl.sandbox import ExecResult, Sandbox, SandboxPool, Template

SYSTEM = (
    "You are a shell agent. Answer every task with exactly one bash command inside a ```bash code block "
    "and nothing else."
)
EXAMPLES = (
    ("Print the text good morning.", "echo good morning"),
    ("Make a directory named build.", "mkdir build"),
    ("Show the first 3 lines of log.txt.", "head -n 3 log.txt"),
)
_MAX_ENTRIES = 64  # files and folders that the grader looks at; tasks have fewer than 10


def messages(prompt: str) -> list[dict[str, str]]:
    """The opening of an episode: the rules, three worked examples, the task."""
    opening = [{"role": "system", "content": SYSTEM}]
    for task, command in EXAMPLES:
        opening.append({"role": "user", "content": task})
        opening.append({"role": "assistant", "content": shell.block(command)})
    return [*opening, {"role": "user", "content": prompt}]


def one_command(reply: str) -> str | None:
    """The command of a reply that is exactly one block of exactly one line; None for any other."""
    command = shell.parse_command(reply)
    return None if command is None or "\n" in command.strip() else command.strip()


class BashEnv:
    """One episode of one task; see venusrl.core.env.Env. It ends with the first well-formed reply."""

    def __init__(self, task: BashTask, pool: SandboxPool, max_turns: int, command_s: float):
        self.task = task
        self._pool = pool
        self._max_turns = max_turns
        self._command_s = command_s
        self._turns = 0
        self._result: ExecResult | None = None
        self._sandbox: Sandbox | None = None

    async def reset(self) -> list[dict[str, str]]:
        self._sandbox = await self._pool.create(Template(name="bash", files=self.task.files))
        return messages(self.task.prompt)

    async def step(self, reply: str) -> Observation:
        self._turns += 1
        command = one_command(reply)
        if command is None:
            observation = shell.malformed(reply)
            if self._turns >= self._max_turns:
                return Observation("", done=True, info={**observation.info, "out_of_turns": True})
            return observation
        self._result = await self._sandbox.exec(command, timeout_s=self._command_s)
        info = {"command": command, "exit_code": self._result.exit_code, "output": shell.show(self._result, 200)}
        return Observation("", done=True, info=info)

    async def grade(self) -> float:
        """1.0 where the files are what they must be and the right thing was printed; 0.0 for anything else."""
        if self._result is None or self._result.timed_out:
            return 0.0
        if self.task.output is not None and not _printed(self.task, self._result.text):
            return 0.0
        return float(await _files_match(self._sandbox, self.task))

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.kill()


def _printed(task: BashTask, text: str) -> bool:
    wanted, words = task.output, text.split()
    if task.compare == "words":
        return set(wanted) <= {word.removeprefix("./") for word in words}
    if task.compare == "paths":
        return sorted(wanted) == sorted(word.removeprefix("./") for word in words)
    if task.compare == "count":
        number, name = wanted
        return words in ([number], [number, name])
    return text.strip() == "\n".join(wanted)


async def _files_match(sandbox: Sandbox, task: BashTask) -> bool:
    """Reads the working directory through the sandbox, without running anything in it."""
    files, folders, waiting = {}, set(), [""]
    try:
        while waiting:
            folder = waiting.pop()
            for entry in await sandbox.list(folder or "."):
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.type == "dir":
                    folders.add(path)
                    waiting.append(path)
                else:
                    files[path] = entry
                if len(files) + len(folders) > _MAX_ENTRIES:
                    return False
        if set(files) != set(task.files_after) or folders != task.folders_after:
            return False
        for path, data in task.files_after.items():
            if files[path].type != "file" or files[path].size != len(data) or await sandbox.read(path) != data:
                return False
    except OSError:  # the command removed or locked what the grader looks for
        return False
    return True


class BashTasks(GeneratedTasks):
    """The tasks of one split; see venusrl.core.env.TaskSet."""

    generate = staticmethod(make_task)
    episode = BashEnv
    described = ("family", "prompt")

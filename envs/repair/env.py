"""The repair episode: read, edit, maybe check, submit; graded by a hidden test in a fresh sandbox."""

import json

from envs import shell
from envs.generated import GeneratedTasks
from envs.repair.tasks import RepairTask, make_task
from venusrl.core.env import Observation
from venusrl.sandbox import Sandbox, SandboxPool, Template

SUBMIT = "submit"

# An edit of equal size within the same second would leave check.py running the old bytecode.
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1"}

# Loads the repaired file alone and prints the results. What they should be never enters the sandbox, so there is
# nothing in it to copy; tests that the agent changed are not looked at.
_RUNNER = b"""
import importlib.util, json, sys
ask = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("subject", ask["path"])
subject = importlib.util.module_from_spec(spec)
spec.loader.exec_module(subject)
print(json.dumps([getattr(subject, ask["function"])(*args) for args in ask["inputs"]]))
"""


class RepairEnv:
    """One episode of one task; see venusrl.core.env.Env."""

    def __init__(self, task: RepairTask, pool: SandboxPool, max_turns: int, command_s: float):
        self.task = task
        self._pool = pool
        self._max_turns = max_turns
        self._command_s = command_s
        self._turns = 0
        self._submitted = False
        self._sandbox: Sandbox | None = None

    async def reset(self) -> list[dict[str, str]]:
        self._sandbox = await self._pool.create(Template(name="repair", files=self.task.files, env=_ENVIRONMENT))
        return [{"role": "user", "content": self.task.prompt}]

    async def step(self, reply: str) -> Observation:
        self._turns += 1
        command = shell.parse_command(reply)
        if command is None:
            observation = shell.malformed(reply)
        elif command.strip() == SUBMIT:
            self._submitted = True
            observation = Observation("", done=True, info={"command": SUBMIT})
        else:
            result = await self._sandbox.exec(command, timeout_s=self._command_s)
            observation = Observation(shell.show(result), info={"command": command, "exit_code": result.exit_code})
        if self._turns >= self._max_turns and not observation.done:
            return Observation("", done=True, info={**observation.info, "out_of_turns": True})
        return observation

    async def grade(self) -> float:
        """1.0 where every hidden case gives the right result; 0.0 for anything else, unsubmitted work included."""
        if not self._submitted:
            return 0.0
        try:
            source = await self._sandbox.read(self.task.path)
        except OSError:  # the agent removed or replaced it
            return 0.0
        await self._sandbox.kill()  # an episode never holds two: all of them could then wait for each other
        fresh = await self._pool.create(Template(name="repair-grade", files={self.task.path: source}))
        try:
            ask = {"path": self.task.path, "function": self.task.function, "inputs": self.task.hidden}
            await fresh.write("grade.py", _RUNNER)
            result = await fresh.exec(
                "exec python3 -I -S grade.py", stdin=json.dumps(ask).encode(), timeout_s=self._command_s
            )
        finally:
            await fresh.kill()
        lines = result.text.strip().split("\n")
        try:
            got = json.loads(lines[-1])
        except (ValueError, RecursionError):  # not JSON, a number too long, nesting too deep: all the agent's doing
            return 0.0
        return float(result.exit_code == 0 and got == list(self.task.expected))

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.kill()


class RepairTasks(GeneratedTasks):
    """The tasks of one split; see venusrl.core.env.TaskSet."""

    generate = staticmethod(make_task)
    episode = RepairEnv
    described = ("family", "function", "path", "line")

"""What trajectories do: prompts, and for each turn its tokens, those of the observation, and the tool's seconds.

The generator draws from distributions measured on real runs; `replay` takes the runs themselves from a trace file.

Sources of the distributions: 111 SWE-rebench runs of an agent on GLM-4.7-Flash (AgentCgroup, arXiv 2602.09345) for
turns, tokens and tool seconds; 500 SWE-bench Verified runs of mini-swe-agent for prompts; 42 terminal-bench tasks with
3 to 5 runs of one agent each for the correlation within a group.
"""

import dataclasses
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from scipy.special import ndtr

from venusrl.core.errors import ConfigError, TaskError

_LEVELS = np.array([0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1])
# Quantiles at these levels.
TURNS = (9, 9.3, 14, 18, 26.5, 46, 65.5, 92, 112, 133, 144, 300)  # the last is the paper's limit, not a measurement
OUTPUT_TOKENS = (12, 34, 45, 53, 72, 144, 341, 601, 784, 1400, 2170, 8980)  # of a turn
OBSERVATION_TOKENS = (1, 1, 1, 1, 1, 180, 500, 1200, 2180, 9880, 29_100, 37_100)  # compactions of the context as 1
TOOL_S = (0.001, 0.007, 0.01, 0.012, 0.02, 0.05, 7.19, 9.64, 11.8, 27.4, 125, 308)
PROMPT_TOKENS = (800, 900, 1000, 1100, 1300, 1600, 2000, 2400, 3000, 4500, 9000, 10_400)  # up to the median: assumed

TURNS_CORRELATION = 0.64  # share of the variance of log turns that lies between tasks (terminal-bench)
OUTPUT_RUN_SHARE = 0.11  # share of the variance of log output tokens of a turn that lies between runs (AgentCgroup)


@dataclasses.dataclass(frozen=True)
class TrajectorySpec:
    """Attributes:
    prompt: tokens.
    outputs: tokens to generate, by turn; at least one turn, at least one token each.
    observations: tokens that the tool's answer adds, by turn; the last is not appended.
    tools: seconds of the tool, by turn.
    """

    prompt: int
    outputs: tuple[int, ...]
    observations: tuple[int, ...]
    tools: tuple[float, ...]

    @property
    def generated(self) -> int:
        return sum(self.outputs)

    @property
    def length(self) -> int:
        """Tokens at its end."""
        return self.prompt + sum(self.outputs) + sum(self.observations[:-1])

    def cut(self, max_tokens: int, max_turns: int) -> "TrajectorySpec":
        """The part of it that stays within the limits: at least one turn, of a prompt cut short if it must be."""
        prompt = min(self.prompt, max_tokens - 1)
        context, turns = prompt, 0
        for output, observation in zip(self.outputs, self.observations, strict=True):
            if turns == max_turns or context + output > max_tokens:
                break
            context += output + observation
            turns += 1
        turns = max(1, turns)
        first = min(self.outputs[0], max_tokens - prompt)
        outputs = (first, *self.outputs[1:turns])
        return TrajectorySpec(prompt, outputs, self.observations[:turns], self.tools[:turns])


class Workload(Protocol):
    """Attributes:
    num_tasks: number of prompts.
    max_tokens: no trajectory is longer.
    """

    num_tasks: int
    max_tokens: int

    def trajectory(self, prompt: int, epoch: int, index: int, refill: int) -> TrajectorySpec:
        """The same numbers give the same trajectory."""
        ...


class Generated:
    """Draws from the distributions above.

    Args:
      seed: fixes everything.
      num_tasks: prompts.
      max_tokens: longest trajectory (the paper's limit is 128K).
      max_turns: most turns (the paper's is 300).
      tool_scale: every tool takes so many times its seconds.
      correlation: share of the variance of (normal scores of) turns that is the task's.
    """

    def __init__(
        self,
        seed: int = 0,
        num_tasks: int = 100_000,
        max_tokens: int = 131_072,
        max_turns: int = 300,
        tool_scale: float = 1.0,
        correlation: float = TURNS_CORRELATION,
    ):
        if num_tasks < 1 or max_tokens < 2 or max_turns < 1 or tool_scale < 0 or not 0 <= correlation <= 1:
            raise ConfigError(
                f"num_tasks={num_tasks}, max_tokens={max_tokens}, max_turns={max_turns}, tool_scale={tool_scale}, "
                f"correlation={correlation}: at least 1, 2, 1 and 0, and a share between 0 and 1"
            )
        self.num_tasks = num_tasks
        self.max_tokens = max_tokens
        self._seed, self._max_turns, self._tool_scale = seed, max_turns, tool_scale
        self._correlation = correlation

    def trajectory(self, prompt: int, epoch: int, index: int, refill: int) -> TrajectorySpec:
        task = np.random.default_rng((self._seed, prompt))
        run = np.random.default_rng((self._seed, prompt, epoch, index, refill))
        tokens = int(_quantile(PROMPT_TOKENS, task.random()))
        score = math.sqrt(self._correlation) * task.standard_normal()
        score += math.sqrt(1 - self._correlation) * run.standard_normal()
        turns = max(1, round(float(_quantile(TURNS, ndtr(score)))))
        score = math.sqrt(OUTPUT_RUN_SHARE) * run.standard_normal()
        scores = score + math.sqrt(1 - OUTPUT_RUN_SHARE) * run.standard_normal(turns)
        outputs = _quantile(OUTPUT_TOKENS, ndtr(scores)).astype(int)
        observations = _quantile(OBSERVATION_TOKENS, run.random(turns)).astype(int)
        tools = _quantile(TOOL_S, run.random(turns)) * self._tool_scale
        spec = TrajectorySpec(tokens, tuple(outputs.tolist()), tuple(observations.tolist()), tuple(tools.tolist()))
        return spec.cut(self.max_tokens, self._max_turns)


class Replay:
    """Runs of a trace file, one JSON object a line (gzip or plain), each with `task` and `turns`.

    A turn has `prompt_tokens` and `output_tokens`, or `out_chars` and `obs_chars` (four characters a token), and its
    tool's seconds as `tools[].dur` or `tool_s`. The runs of a task are its samples; where there are fewer than samples,
    they come again.
    """

    def __init__(self, path: str | Path, max_tokens: int = 131_072, max_turns: int = 300):
        self.max_tokens = max_tokens
        self._tasks: dict[str, list[TrajectorySpec]] = {}
        for number, line in enumerate(read_lines(Path(path)), 1):
            try:
                run = json.loads(line)
                spec = _replayed(run["turns"])
                task = str(run["task"])
            except (KeyError, TypeError, ValueError) as error:
                raise TaskError(f"{path}, line {number}: not a run with `task` and `turns` ({error!r})") from error
            if spec is not None:
                self._tasks.setdefault(task, []).append(spec.cut(max_tokens, max_turns))
        if not self._tasks:
            raise TaskError(f"{path}: no run with a turn in it")
        self._names = sorted(self._tasks)
        self.num_tasks = len(self._names)

    def trajectory(self, prompt: int, epoch: int, index: int, refill: int) -> TrajectorySpec:
        runs = self._tasks[self._names[prompt]]
        return runs[(index + refill + epoch) % len(runs)]


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a trace file, gzip or plain.

    Raises:
      TaskError: it cannot be read.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read as a trace: {error}") from error


def _replayed(turns: Sequence[dict]) -> TrajectorySpec | None:
    outputs, observations, tools = [], [], []
    if not turns:
        return None
    exact = "prompt_tokens" in turns[0]
    for turn, after in zip(turns, [*turns[1:], None], strict=True):
        if exact:
            output = turn["output_tokens"]
            seen = after["prompt_tokens"] - turn["prompt_tokens"] - output if after else 0
        else:
            output, seen = turn["out_chars"] // 4, turn["obs_chars"] // 4
        outputs.append(max(1, int(output)))
        observations.append(max(0, int(seen)))  # a compaction shortens the context; the replay does not
        tools.append(float(turn["tool_s"] or 0.0) if "tool_s" in turn else sum(t["dur"] for t in turn["tools"]))
    prompt = int(turns[0]["prompt_tokens"]) if exact else 1600
    return TrajectorySpec(max(1, prompt), tuple(outputs), tuple(observations), tuple(tools))


def _quantile(table: Sequence[float], levels):
    """Inverse distribution function, linear in the logarithm between the given quantiles."""
    return np.exp(np.interp(levels, _LEVELS, np.log(np.asarray(table, float))))

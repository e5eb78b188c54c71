"""The contract of an environment: what a rollout drives. Environments hold no engine and no learner objects."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol


class Reply(str):
    """What the policy said in one turn: its text, with facts of how it was made.

    Attributes:
      prompt_tokens: of the context that it answers.
      completion_tokens: generated.
      stop: why it ended: "stop" (a stop token) or "length" (the tokens of a turn, or of the context, were used up).
    """

    __slots__ = ("completion_tokens", "prompt_tokens", "stop")

    def __new__(cls, text: str, prompt_tokens: int = 0, completion_tokens: int = 0, stop: str = "stop"):
        reply = super().__new__(cls, text)
        reply.prompt_tokens, reply.completion_tokens, reply.stop = prompt_tokens, completion_tokens, stop
        return reply


@dataclasses.dataclass(frozen=True)
class Opening:
    """The opening of an episode that offers tools.

    Attributes:
      messages: as `Env.reset` gives them otherwise.
      tools: in the OpenAI API's form, shown as the model's chat template has them.
    """

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] = ()


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the environment answers to one action.

    Attributes:
      text: shown to the policy.
      done: the episode is over; `text` is then not shown.
      info: readable facts of the step (the command, its exit code), JSON-able.
      messages: what is shown in place of `text` as a message of the user, where it is another or several.
    """

    text: str
    done: bool = False
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    messages: tuple[dict[str, Any], ...] = ()


class Env(Protocol):
    """One episode of one task. `close` is called exactly once, whatever happened before."""

    async def reset(self) -> Sequence[dict[str, Any]] | Opening:
        """Prepares the episode; returns the opening messages ({"role", "content"}), with tools where it offers any."""
        ...

    async def step(self, reply: Reply) -> Observation:
        """Acts on the policy's reply. A malformed reply is answered with an observation, never an exception."""
        ...

    async def grade(self) -> float:
        """The reward of the episode, from its resulting state."""
        ...

    async def close(self) -> None:
        """Frees what the episode holds."""
        ...


class TaskSet(Protocol):
    """A finite, indexable set of tasks, the same for every run with the same arguments."""

    def __len__(self) -> int: ...

    def make(self, index: int) -> Env:
        """A fresh episode of task `index`."""
        ...

    def describe(self, index: int) -> dict[str, Any]:
        """Readable facts of task `index` (name, family), JSON-able."""
        ...

"""What a session has said and heard, as token ids. Pure: no worker, no clock.

A harness sends the whole history with every call. Where it is the history that was captured, the call goes on from the
captured tokens; where it is not (edited, truncated, a second conversation), the call opens a new segment, and the old
one stays as it was. A call is planned first and kept only once it has succeeded: one that fails, or whose caller hangs
up, leaves the session as it was.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from venusrl.core.trajectory import Trajectory, sampling_seed
from venusrl.models.chat import ChatFormat
from venusrl.rollout.gateway.messages import Message, same
from venusrl.rollout.worker import Chunk

MOST_SEGMENTS = 1000  # of a session; the oldest are forgotten
MOST_BYTES = 64 * 2**20  # of a session, as it was sent


@dataclasses.dataclass
class Segment:
    """One history that only grew.

    Attributes:
      trajectory: its tokens, mask, logprobs and versions; its id names its KV.
      messages: the history, replies as they were given out.
      offered: what the calls offered besides: tools, variables of the template.
      size: bytes of the last call, as a measure of all this.
    """

    trajectory: Trajectory
    messages: list[Message]
    offered: tuple[Any, ...]
    size: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call that has not been made yet.

    Attributes:
      segment: that it goes on from; None for a new one.
      new: ids that the call adds, the header of the reply among them.
      messages, offered: see Segment, as they will be.
    """

    segment: Segment | None
    new: list[int]
    messages: list[Message]
    offered: tuple[Any, ...]

    @property
    def context(self) -> list[int]:
        """All ids that the reply comes after."""
        return [*(self.segment.trajectory.tokens if self.segment else ()), *self.new]


class Session:
    """The segments of one session, in order."""

    def __init__(self, name: str, chat: ChatFormat, seed: int):
        self.name = name
        self.segments: list[Segment] = []
        self._chat = chat
        self._seed = seed
        self._made = 0  # segments so far; names go on where one is forgotten

    def plan_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Where a chat call goes on.

        Raises:
          ContractError: the model's template refuses the messages.
        """
        offered = (list(tools), dict(options or {}))
        for segment in reversed(self.segments):
            known = len(segment.messages)
            goes_on = known < len(messages) and same(messages[:known], segment.messages)
            if goes_on and segment.offered == offered and segment.messages[-1]["role"] == "assistant":
                new = self._chat.continuation(messages[known:], segment.trajectory.tokens[-1], tools, options)
                return Plan(segment, new, list(messages), offered)
        return Plan(None, self._chat.prompt(messages, tools, options), list(messages), offered)

    def plan_tokens(self, tokens: Sequence[int]) -> Plan:
        """Where a call that gave token ids goes on: in a segment whose tokens they begin with, or in a new one."""
        for segment in reversed(self.segments):
            known = segment.trajectory.tokens
            if not segment.messages and len(known) < len(tokens) and list(tokens[: len(known)]) == known:
                return Plan(segment, list(tokens[len(known) :]), [], ())
        return Plan(None, list(tokens), [], ())

    def identities(self, plan: Plan, samples: int) -> list[tuple[str, int]]:
        """(id, seed) of the trajectory of each sample of a call. The first goes on where the plan says; every other one
        is a copy."""
        ids = []
        for i in range(samples):
            if plan.segment is not None and i == 0:
                ids.append((plan.segment.trajectory.id, plan.segment.trajectory.seed))
            else:
                index = self._made + i - (plan.segment is not None)
                ids.append((f"{self.name}/{index}", sampling_seed(self._seed, index)))
        return ids

    @property
    def size(self) -> int:
        """Bytes of the last calls of its segments."""
        return sum(segment.size for segment in self.segments)

    def keep(self, plan: Plan, samples: Sequence[tuple[Sequence[Chunk], Message | None]], size: int = 0) -> list[str]:
        """Keeps a call that has come to its end.

        Args:
          samples: what each generated, and the reply as it was given out; None where the call gave token ids.
          size: bytes of the call.

        Returns:
          ids of trajectories that are forgotten: a session keeps `MOST_SEGMENTS` of `MOST_BYTES` in all, the newest.
        """
        segments = []
        for i, (name, seed) in reversed(
            list(enumerate(self.identities(plan, len(samples))))
        ):  # copies before the first
            chunks, message = samples[i]
            if plan.segment is None:
                trajectory = Trajectory(name, self.name, self._made + i, seed=seed)
            elif i > 0:
                trajectory = _copy(plan.segment.trajectory, name, self._made + i - 1, seed)
            else:
                trajectory = plan.segment.trajectory
            trajectory.append_observation(plan.new)
            for chunk in chunks:
                trajectory.append_generated(chunk.tokens, chunk.logprobs, chunk.version)
            messages = [] if message is None else [*plan.messages, message]
            if plan.segment is not None and i == 0:
                plan.segment.messages, plan.segment.size = messages, size
            else:
                segments.append(Segment(trajectory, messages, plan.offered, size))
        self._made += len(segments)
        self.segments += reversed(segments)
        dropped, size = [], self.size
        while len(self.segments) > MOST_SEGMENTS or (size > MOST_BYTES and len(self.segments) > 1):
            dropped.append(self.segments.pop(0).trajectory.id)
            size = self.size
        return dropped

    def captured(self) -> list[dict[str, Any]]:
        """Everything captured so far, a segment each, in JSON's types."""
        return [
            {
                "id": segment.trajectory.id,
                "tokens": list(segment.trajectory.tokens),
                "loss_mask": list(segment.trajectory.loss_mask),
                "logprobs": list(segment.trajectory.logprobs),
                "versions": list(segment.trajectory.versions),
                "messages": segment.messages,
            }
            for segment in self.segments
        ]


def _copy(trajectory: Trajectory, name: str, index: int, seed: int) -> Trajectory:
    """As it is, under another name; what grows is a list of its own."""
    return dataclasses.replace(
        trajectory,
        id=name,
        index=index,
        seed=seed,
        tokens=list(trajectory.tokens),
        loss_mask=list(trajectory.loss_mask),
        logprobs=list(trajectory.logprobs),
        versions=list(trajectory.versions),
        turns=[dataclasses.replace(turn) for turn in trajectory.turns],
        info=dict(trajectory.info),
    )

"""What a session has said and heard, as token ids. Pure: no worker, no clock.

A harness sends the whole history with every call. Where it is the history that was captured, the call goes on from the
captured tokens; where it is not (edited, truncated, a second conversation), the call opens a new segment, and the old
one stays as it was.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from venusrl.core.trajectory import Trajectory
from venusrl.models.chat import ChatFormat
from venusrl.rollout.gateway.messages import Message, rendered, same


@dataclasses.dataclass
class Segment:
    """One history that only grew.

    Attributes:
      trajectory: its tokens, mask, logprobs and versions; its id names its KV.
      messages: the history, replies as they were given out.
      tools: what the calls offered.
    """

    trajectory: Trajectory
    messages: list[Message]
    tools: list[dict[str, Any]]


class Session:
    """The segments of one session, in order."""

    def __init__(self, name: str, chat: ChatFormat, seed: int):
        self.name = name
        self.segments: list[Segment] = []
        self._chat = chat
        self._seed = seed

    def call(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Segment:
        """The segment that a call belongs to, its tokens extended by what is new in the call."""
        tools = list(tools)
        for segment in reversed(self.segments):
            known = len(segment.messages)
            goes_on = known < len(messages) and same(messages[:known], segment.messages)
            if goes_on and segment.tools == tools and segment.messages[-1]["role"] == "assistant":
                new = rendered(messages[known:], ())
                ids = self._chat.continuation(new, segment.trajectory.tokens[-1])
                segment.trajectory.append_observation(ids)
                segment.messages = list(messages)
                return segment
        return self._open(self._chat.prompt(rendered(messages, tools)), list(messages), tools)

    def complete(self, tokens: Sequence[int]) -> Segment:
        """The segment of a call that gave token ids: one that they go on from, or a new one."""
        for segment in reversed(self.segments):
            known = segment.trajectory.tokens
            if not segment.messages and len(known) < len(tokens) and list(tokens[: len(known)]) == known:
                segment.trajectory.append_observation(list(tokens[len(known) :]))
                return segment
        return self._open(list(tokens), [], [])

    def _open(self, tokens: list[int], messages: list[Message], tools: list[dict[str, Any]]) -> Segment:
        index = len(self.segments)
        trajectory = Trajectory(f"{self.name}/{index}", self.name, index, seed=self._seed)
        trajectory.append_observation(tokens)
        segment = Segment(trajectory, messages, tools)
        self.segments.append(segment)
        return segment

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

"""A trajectory: token ids that grow in exactly two ways, with everything the learner needs to train on them.

The invariant, checked where it could break: tokens, loss mask, behaviour logprobs and versions have one length.
Text is never re-tokenised: what the engine generated is what the learner trains on.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from venusrl.core.errors import ContractError

NO_VERSION = -1  # version of tokens that no policy generated


def sampling_seed(*words: int) -> int:
    """A trajectory's seed from what it is: the same words give the same seed, 0 <= seed < 2^31 (it is an int32)."""
    return int(np.random.SeedSequence(words).generate_state(1)[0]) >> 1


class Status(enum.StrEnum):
    """Where a trajectory stands. DONE and LOST are final."""

    PENDING = "pending"  # not started
    GENERATING = "generating"  # waits for or holds a generation slot
    IN_TOOL = "in_tool"  # the environment is at work
    DONE = "done"  # has its reward
    LOST = "lost"  # its worker, sandbox or environment failed; to be refilled


@dataclasses.dataclass
class Turn:
    """One generated span and what followed it.

    Attributes:
      begin: index of the first generated token.
      end: index after the last generated token; the observation starts here.
      stop: why generation ended, "stop" (a stop token) or "length".
      generate_s: seconds from the request to its last token, queueing included.
      tool_s: seconds the environment took to answer.
    """

    begin: int
    end: int
    stop: str = "stop"
    generate_s: float = 0.0
    tool_s: float = 0.0


@dataclasses.dataclass
class Trajectory:
    """One sample of one prompt.

    Attributes:
      id: unique in a run; "<group>/<index>" plus "r<k>" for the k-th refill.
      group_id: the group it belongs to.
      index: its place in the group, 0 <= index < group size.
      seed: seeds its sampling, so that it does not depend on what else is in the batch.
      tokens: token ids, prompt and observations included.
      loss_mask: 1 for generated tokens, 0 for the others.
      logprobs: behaviour logprobs under temperature only, full vocabulary; 0.0 for tokens not generated.
      versions: the policy version that generated each token; NO_VERSION for the others.
      turns: one entry a generated span.
      status: see Status.
      reward: set when DONE.
      info: readable facts from the environment (for dumps and metrics), JSON-able.
    """

    id: str
    group_id: str
    index: int
    seed: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    loss_mask: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    status: Status = Status.PENDING
    reward: float | None = None
    info: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return sum(turn.end - turn.begin for turn in self.turns)

    @property
    def start_version(self) -> int | None:
        """Version of the first generated token; None before it."""
        return self.versions[self.turns[0].begin] if self.turns else None

    @property
    def finished(self) -> bool:
        return self.status in (Status.DONE, Status.LOST)

    def append_generated(self, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Appends what the policy of `version` generated; extends the open turn or opens one.

        Args:
          tokens: ids, at least one.
          logprobs: their behaviour logprobs, of the same length, finite and <= 0.
          version: the weight version, >= 0 and not older than the last one of this trajectory.

        Raises:
          ContractError: lengths differ, a logprob is not a logprob, the version goes back, or it is finished.
        """
        self._check_open("append_generated")
        if len(tokens) != len(logprobs) or len(tokens) == 0:
            raise ContractError(
                f"trajectory {self.id}: append_generated got {len(tokens)} tokens and {len(logprobs)} logprobs; "
                "pass one logprob for each token, at least one"
            )
        bad = [lp for lp in logprobs if not math.isfinite(lp) or lp > 1e-4]
        if bad:
            raise ContractError(
                f"trajectory {self.id}: logprob {bad[0]} is not one; pass natural logs of probabilities"
            )
        last = self.versions[self.turns[-1].end - 1] if self.turns else 0
        if version < last:
            raise ContractError(f"trajectory {self.id}: version {version} is older than {last}; versions only grow")
        if not self._turn_open:
            self.turns.append(Turn(begin=len(self.tokens), end=len(self.tokens)))
        self._extend(tokens, [1] * len(tokens), logprobs, version)
        self.turns[-1].end = len(self.tokens)

    def append_observation(self, tokens: Sequence[int]) -> None:
        """Appends the prompt or what the environment answered; never trained on.

        Raises:
          ContractError: the trajectory is finished.
        """
        self._check_open("append_observation")
        self._extend(tokens, [0] * len(tokens), [0.0] * len(tokens), NO_VERSION)

    def complete(self, reward: float, **info: Any) -> None:
        """Gives the reward and ends the trajectory.

        Raises:
          ContractError: no generated token, a reward that is not finite, or it is finished.
        """
        self._check_open("complete")
        if not math.isfinite(reward):
            raise ContractError(f"trajectory {self.id}: reward {reward} is not finite; fix the task's grade()")
        if not self.turns:
            raise ContractError(f"trajectory {self.id}: complete() before any generated token; nothing to train on")
        self.reward = float(reward)
        self.info.update(info)
        self.status = Status.DONE

    def check(self) -> None:
        """Verifies the invariant over the whole trajectory.

        Raises:
          ContractError: naming what is off.
        """
        n = len(self.tokens)
        lengths = {"loss_mask": len(self.loss_mask), "logprobs": len(self.logprobs), "versions": len(self.versions)}
        for name, length in lengths.items():
            if length != n:
                raise ContractError(f"trajectory {self.id}: {name} has length {length}, tokens {n}")
        expected = [0] * n
        for turn in self.turns:
            if not 0 <= turn.begin < turn.end <= n:
                raise ContractError(f"trajectory {self.id}: turn [{turn.begin}, {turn.end}) is outside its {n} tokens")
            expected[turn.begin : turn.end] = [1] * (turn.end - turn.begin)
        if expected != self.loss_mask:
            raise ContractError(f"trajectory {self.id}: the loss mask is not the union of its turns")
        for i, (mask, version) in enumerate(zip(self.loss_mask, self.versions, strict=True)):
            if (version == NO_VERSION) == bool(mask):
                raise ContractError(f"trajectory {self.id}: token {i} has mask {mask} and version {version}")

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; `from_state_dict` gives an equal trajectory."""
        return dataclasses.asdict(self) | {"status": str(self.status)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Trajectory":
        turns = [Turn(**turn) for turn in state["turns"]]
        trajectory = cls(**{**state, "turns": turns, "status": Status(state["status"])})
        trajectory.check()
        return trajectory

    @property
    def _turn_open(self) -> bool:
        return bool(self.turns) and self.turns[-1].end == len(self.tokens)

    def _check_open(self, what: str) -> None:
        if self.finished:
            raise ContractError(f"trajectory {self.id}: {what}() after it is {self.status}; it no longer grows")

    def _extend(self, tokens: Sequence[int], mask: list[int], logprobs: Sequence[float], version: int) -> None:
        self.tokens.extend(int(t) for t in tokens)
        self.loss_mask.extend(mask)
        self.logprobs.extend(float(lp) for lp in logprobs)
        self.versions.extend([int(version)] * len(tokens))

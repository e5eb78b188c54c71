"""Which values each field of a configuration may have. What a field means stands in configs/base.py.

A field that is not named here takes what its kind takes: a number is finite and not negative, a whole number is below
2^31, a text is empty only where its default is, a tuple has members of its default's kind. Not run by itself.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

LARGEST = 2**31 - 1  # steps, seeds and sizes end up in int32


@dataclasses.dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most`."""

    least: int = 0
    most: int = LARGEST

    def wrong(self, value: Any) -> str | None:
        """What the value must be, where it is not that; None where it is."""
        if isinstance(value, bool) or not isinstance(value, int):
            return "must be a int"
        return None if self.least <= value <= self.most else f"give {self.least} to {self.most}"


@dataclasses.dataclass(frozen=True)
class Real:
    """A finite number from `least` to `most`. open_below, open_above: the bound itself is refused."""

    least: float = 0.0
    most: float = math.inf
    open_below: bool = False
    open_above: bool = False

    def wrong(self, value: Any) -> str | None:
        """See Whole."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return "must be a float"
        low = f"above {self.least:g}" if self.open_below else f"{self.least:g} or more"
        high = "" if self.most == math.inf else f" and {'below' if self.open_above else 'at most'} {self.most:g}"
        if not self.least <= value <= self.most or abs(value) > 1e300:  # nan compares as False; a long int overflows
            return f"give a finite number, {low}{high}"
        if (self.open_below and value == self.least) or (self.open_above and value == self.most):
            return f"give a finite number, {low}{high}"
        return None


@dataclasses.dataclass(frozen=True)
class Text:
    """A text. empty: "" is one."""

    empty: bool = False

    def wrong(self, value: Any) -> str | None:
        """See Whole."""
        if not isinstance(value, str):
            return "must be a str"
        if "\0" in value or not _encodes(value):
            return "give readable characters"
        return None if value.strip() or (self.empty and not value) else "give a text that is not empty"


@dataclasses.dataclass(frozen=True)
class Address:
    """Of an HTTP server: http://HOST:PORT."""

    def wrong(self, value: Any) -> str | None:
        """See Whole."""
        if wrong := Text().wrong(value):
            return wrong
        try:
            parts = urlsplit(value)
            known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is none, half an IPv6 address
            known = False
        return None if known and not any(c.isspace() for c in value) else "give an address, http://HOST:PORT"


@dataclasses.dataclass(frozen=True)
class Flag:
    """True or False."""

    def wrong(self, value: Any) -> str | None:
        """See Whole."""
        return None if isinstance(value, bool) else "must be a bool"


@dataclasses.dataclass(frozen=True)
class Members:
    """A tuple whose members are all `each`. ascending: each above the one before. number: of members, where fixed."""

    each: "Whole | Real | Text | Address"
    empty: bool = True
    ascending: bool = False
    number: int | None = None

    def wrong(self, value: Any) -> str | None:
        """See Whole."""
        if not isinstance(value, (tuple, list)):
            return "must be a tuple"
        if self.number is not None and len(value) != self.number:
            return f"give {self.number} members"
        if not value and not self.empty:
            return "give at least one member"
        for member in value:
            if wrong := self.each.wrong(member):
                return f"member {member!r}: {wrong}"
        if self.ascending and list(value) != sorted(set(value)):
            return "give ascending sizes, each once"
        return None


@dataclasses.dataclass(frozen=True)
class Stages:
    """At least one (steps, rate, share) of the warm start."""

    def wrong(self, value: Any) -> str | None:
        """See Whole."""
        if not isinstance(value, (tuple, list)) or not value:
            return "must be a tuple of (steps, rate, share), at least one"
        for stage in value:
            if not isinstance(stage, (tuple, list)) or len(stage) != 3:
                return f"member {stage!r}: give (steps, rate, share)"
            for part, limit in zip(stage, (Whole(1), Real(open_below=True, most=10.0), Real(most=1.0)), strict=True):
                if wrong := limit.wrong(part):
                    return f"member {stage!r}: {part!r}: {wrong}"
        return None


Limit = Whole | Real | Text | Address | Flag | Members | Stages


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character, as of an argument that is not UTF-8
        return False
    return True


def of_kind(default: Any) -> Limit:
    """What a field takes that has no limit of its own, by its default."""
    match default:
        case bool():
            return Flag()
        case int():
            return Whole()
        case float():
            return Real()
        case str():
            return Text(empty=not default)
        case tuple():
            return Members(of_kind(default[0]) if default else Text())
    raise TypeError(f"a field cannot be a {type(default).__name__}: {default!r}")


_SECONDS = Real(open_below=True, most=1e7)
_SIZES = Members(Whole(1, 2**20), empty=False, ascending=True)

RUN: Mapping[str, Limit] = {
    "steps": Whole(1),
    "max_minutes": Real(most=1e7),
    "group_size": Whole(2, 65536),  # one alone has no advantage over anything
    "batch_groups": Whole(1, 65536),
    "async_factor": Real(1.0, most=1000.0),
    "model.name": Text(empty=True),  # whether it may be is the model's business
    "model.checkpoint": Text(empty=True),
    "env.train_tasks": Whole(1, 10**7),  # their order is held in memory
    "env.heldout_tasks": Whole(1, 10**7),
    "env.max_turns": Whole(1, 10**6),
    "env.command_s": _SECONDS,
    "sandbox.max_sandboxes": Whole(1, 10**6),
    "rollout.temperature": Real(open_below=True, most=100.0),
    "rollout.max_tokens": Whole(1),
    "rollout.env_s": _SECONDS,
    "rollout.workers": Whole(1, 1024),
    "rollout.addresses": Members(Address()),
    "rollout.reconnect_s": _SECONDS,
    "rollout.key_file": Text(empty=True),
    "rollout.slots": Whole(1, 65536),
    "rollout.lanes": Whole(0, 1024),
    "rollout.max_length": Whole(2, 2**24),
    "rollout.decode_steps": Whole(1, 65536),
    "rollout.decode_rows": dataclasses.replace(_SIZES, empty=True),
    "rollout.prefill_rows": _SIZES,
    "rollout.prefill_tokens": _SIZES,
    "rollout.read_lengths": dataclasses.replace(_SIZES, empty=True),
    "rollout.page": Whole(1, 65536),
    "rollout.kv_tokens": Whole(0, 2**40),
    "rollout.host_tokens": Whole(0, 2**40),
    "rollout.stall_s": _SECONDS,
    "learner.clip_low": Real(most=1.0),
    "learner.clip_high": Real(most=1e6),
    "learner.tis_cap": Real(most=1e6),
    "learner.kl_coef": Real(most=1e6),
    "learner.entropy_coef": Real(most=1e6),
    "learner.learning_rate": Real(most=10.0),
    "learner.final_fraction": Real(most=1.0),
    "learner.b1": Real(most=1.0, open_above=True),
    "learner.b2": Real(most=1.0, open_above=True),
    "learner.weight_decay": Real(most=1e6),
    "learner.clip_norm": Real(open_below=True, most=1e30),
    "learner.minibatches": Whole(1, 65536),
    "learner.row_length": Whole(2, 2**24),
    "learner.rows_per_part": Whole(1, 65536),
    "learner.logprob_chunk": Whole(1, 2**24),
    "learner.mesh": Members(Whole(-1, 2**20), empty=False, number=3),
    "eval.tasks": Whole(1, 10**7),
    "eval.temperature": Real(most=100.0),
}

WARMSTART: Mapping[str, Limit] = {
    "first_stage": Whole(0, 1000),
    "vocab_texts": Whole(1, 10**7),
    "tasks": Whole(1, 10**9),
    "stages": Stages(),
    "demos_per_step": Whole(1, 65536),
    "check": Real(most=1.0),
    "row_length": Whole(2, 2**24),
    "rows_per_part": Whole(1, 65536),
}

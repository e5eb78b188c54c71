"""What an engine can be told."""

import dataclasses

from venusrl.core.errors import ConfigError
from venusrl.core.names import check_name
from venusrl.rollout.engine.attention import NAMES
from venusrl.rollout.engine.residency import order

UPDATES = ("recompute", "keep", "drain")


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Attributes:
    slots: requests at once, each with a row of the working cache.
    lanes: parts of the slots that are computed at once; 0 is what fits, see engine/lanes.py.
    max_length: tokens of a sequence, prompt included.
    page: tokens of a page of KV.
    kv_tokens: tokens of KV that the pages hold, running and cached together; 0 is slots x max_length.
    host_tokens: tokens of KV that host memory holds behind the pages: what is given up there goes here; 0 is none.
    residency: the order in which cached pages are given up; see engine/residency.py.
    attention: "xla" (the reference), "cudnn" (NVIDIA), "tpu", or "auto": the device's own where it can be used.
    on_update: what new weights do to KV of the old: "recompute" drops it, "keep" goes on with it (and counts what is
      used of it), "drain" lets running requests end first, then drops it.
    stall_s: seconds for which prefill may hold up requests that decode.
    decode_steps: tokens a request may generate in one host turn.
    decode_rows: batch sizes that decode of a lane is compiled for, ascending; all of its rows are added.
    prefill_rows: batch sizes that prefill of a lane is compiled for, ascending.
    prefill_tokens: lengths that prefill is compiled for, ascending; longer ones take several calls.
    read_lengths: numbers of cached positions that attention is compiled for, ascending; max_length is added.
    debug: check after every step that no page is lost; slow.
    """

    slots: int = 64
    lanes: int = 0
    max_length: int = 512
    page: int = 16
    kv_tokens: int = 0
    host_tokens: int = 0
    residency: str = "references"
    attention: str = "auto"
    on_update: str = "recompute"
    stall_s: float = 0.5
    decode_steps: int = 8
    decode_rows: tuple[int, ...] = (16,)
    prefill_rows: tuple[int, ...] = (4, 16)
    prefill_tokens: tuple[int, ...] = (32, 128)
    read_lengths: tuple[int, ...] = (256,)
    debug: bool = False

    def __post_init__(self):
        for name in ("prefill_rows", "prefill_tokens", "decode_rows", "read_lengths"):
            value = getattr(self, name)
            needed = name.startswith("prefill")
            if (needed and not value) or list(value) != sorted(set(value)) or any(size < 1 for size in value):
                raise ConfigError(f"rollout.{name}={value}; give ascending positive sizes")
        least_of = dict(slots=1, lanes=0, max_length=2, decode_steps=1, page=1, kv_tokens=0, host_tokens=0)
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ConfigError(f"rollout.{name}={getattr(self, name)} is too small; give {least} or more")
        if self.lanes > self.slots:
            raise ConfigError(f"rollout.lanes={self.lanes} is above the {self.slots} rollout.slots; lower it")
        if self.kv_tokens and self.kv_tokens < 2 * self.page:
            raise ConfigError(f"rollout.kv_tokens={self.kv_tokens} is less than two pages of {self.page}; raise it")
        if not self.stall_s > 0:
            raise ConfigError(f"rollout.stall_s={self.stall_s}; give seconds above 0")
        check_name("rollout.on_update", self.on_update, UPDATES)
        check_name("rollout.attention", self.attention, NAMES)
        if 0 < self.host_tokens < self.page:
            raise ConfigError(f"rollout.host_tokens={self.host_tokens} is less than a page of {self.page}; raise it")
        order(self.residency)

    @property
    def row_tokens(self) -> int:
        """Positions of a row: max_length in whole pages."""
        return -(-self.max_length // self.page) * self.page

    @property
    def lane_rows(self) -> int:
        """Rows of a lane."""
        return -(-self.slots // (self.lanes or 1))

    @property
    def pages(self) -> int:
        """Pages of KV."""
        return (self.kv_tokens or self.slots * self.row_tokens) // self.page

    @property
    def host_pages(self) -> int:
        """Pages of KV in host memory."""
        return self.host_tokens // self.page


def bucket(value: int, sizes) -> int:
    """The smallest of ascending `sizes` that holds `value`; the largest where none does."""
    return next((size for size in sizes if size >= value), sizes[-1])

"""What a request has generated so far: tokens, text, and where a stop string ends it."""

import itertools
from collections.abc import Sequence
from typing import Any

from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.worker import Chunk, Top

FINISH = {"stop": "stop", "length": "length", "preempted": "length"}
_SETTLE = 32  # tokens that are decoded anew with every chunk, at least


class Generated:
    """Grows by chunks.

    Attributes:
      chunks: as they came, those without tokens left out.
      tokens, logprobs: generated, all of them.
      text: of the reply, up to a stop string; with what was forced before it.
      finish: why it ended, in the API's words; None before it has.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), forced: str = ""):
        """Args:
        forced: text that the reply was made to begin with.
        """
        self._tokenizer, self._stops = tokenizer, list(stops)
        self.chunks: list[Chunk] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self._top: Top = []
        self.text = self._settled = forced
        self._from = 0  # the first token whose text is not settled
        self._searched = len(forced)  # of the text, where no stop string begins
        self.finish: str | None = None
        self._given = 0

    def add(self, chunk: Chunk) -> str:
        """Takes a chunk; the text that can be given out with it, up to its end where it is the last."""
        if chunk.tokens:
            self.chunks.append(chunk)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        self._top += chunk.top or [[] for _ in chunk.tokens]
        new = self._tokenizer.decode(self.tokens[self._from :])
        self.text = self._settled + new
        if len(self.tokens) - self._from > _SETTLE and not new.endswith("\ufffd"):
            self._settled, self._from = self.text, len(self.tokens)
        longest = max((len(stop) for stop in self._stops), default=1)
        ends = [at for at in (self.text.find(stop, self._searched) for stop in self._stops) if at >= 0]
        if ends:
            self.text, self.finish = self.text[: min(ends)], "stop"
        elif chunk.stop is not None:
            self.finish = FINISH.get(chunk.stop, chunk.stop)
        whole = self.text if self.finish else self.text.rstrip("\ufffd")  # the first bytes of a character
        self._searched = max(self._searched, len(whole) - longest + 1)
        return self._give(whole if self.finish else whole[: max(self._given, len(whole) - longest + 1)])

    def _give(self, safe: str) -> str:
        piece, self._given = safe[self._given :], max(self._given, len(safe))
        return piece

    def chat_logprobs(self, begin: int = 0) -> dict[str, Any]:
        """Logprobs of the tokens from `begin` on, as chat answers have them."""
        return {"content": [self._entry(i) for i in range(begin, len(self.tokens))], "refusal": None}

    def text_logprobs(self, begin: int = 0) -> dict[str, Any]:
        """The same as answers of /v1/completions have them."""
        entries = [self._entry(i) for i in range(begin, len(self.tokens))]
        offsets = [0, *itertools.accumulate(len(self._token_text(token)) for token in self.tokens)]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {one["token"]: one["logprob"] for one in [*entry["top_logprobs"], entry]} for entry in entries
            ],
            "text_offset": offsets[begin:-1],
        }

    def _entry(self, index: int) -> dict[str, Any]:
        entry = self._one(self.tokens[index], self.logprobs[index])
        return entry | {"top_logprobs": [self._one(*pair) for pair in self._top[index]]}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.bytes_of(token)),
        }

    def _token_text(self, token: int) -> str:
        return self._tokenizer.bytes_of(token).decode(errors="replace")

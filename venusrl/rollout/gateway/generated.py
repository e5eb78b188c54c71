"""What a request has generated so far: tokens, text, and where a stop string ends it."""

import codecs
from collections.abc import Sequence
from typing import Any

from venusrl.models.tokenizer import Tokenizer
from venusrl.rollout.worker import Chunk, Top

FINISH = {"stop": "stop", "length": "length", "preempted": "length"}
_SETTLE = 32  # tokens that are decoded anew with every chunk, at least
_CHARACTER = 4  # bytes of the longest one, so that as many tokens may be parts of it
LEAST = -9999.0  # a logprob that is told for one below all numbers, as the OpenAI API does


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
        stops: texts that end the reply; one that spells a control token ends it at that token.
        forced: text that the reply was made to begin with.
        """
        self._tokenizer = tokenizer
        self._control_ids = frozenset(tokenizer.control.values())
        self._stops = [stop for stop in stops if stop not in tokenizer.control]
        self._stop_tokens = {tokenizer.control[stop] for stop in stops if stop in tokenizer.control}
        self.chunks: list[Chunk] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self._offsets: list[int] = []  # characters of the text before each token
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._top: Top = []
        self.text = self._settled = forced
        self._from = 0  # the first token whose text is not settled
        self._searched = len(forced)  # of the text, where no stop string begins
        self.finish: str | None = None
        self._given = 0

    def add(self, chunk: Chunk) -> str:
        """Takes a chunk; the text that can be given out with it, up to its end where it is the last. To end at the very
        token that completes a stop string, chunks have to be of one token."""
        if chunk.tokens:
            self.chunks.append(chunk)
        self.tokens += chunk.tokens
        for token in chunk.tokens:
            self._offsets.append(self._characters)
            if token not in self._control_ids:
                self._characters += len(self._decoder.decode(self._tokenizer.bytes_of(token)))
        self.logprobs += chunk.logprobs
        self._top += chunk.top or [[] for _ in chunk.tokens]
        new = self._tokenizer.decode(self.tokens[self._from :])
        self.text = self._settled + new
        self._settle(new)
        longest = max((len(stop) for stop in self._stops), default=1)
        ends = [at for at in (self.text.find(stop, self._searched) for stop in self._stops) if at >= 0]
        if ends:
            self.text, self.finish = self.text[: min(ends)], "stop"
        elif self._stop_tokens & set(chunk.tokens):
            self.finish = "stop"
        elif chunk.stop is not None:
            self.finish = FINISH.get(chunk.stop, chunk.stop)
        whole = self.text if self.finish else self.text.rstrip("\ufffd")  # the first bytes of a character
        self._searched = max(self._searched, len(whole) - longest + 1)
        return self._give(whole if self.finish else whole[: max(self._given, len(whole) - longest + 1)])

    def _settle(self, new: str) -> None:
        """What is certainly whole is not decoded again."""
        held = len(self.tokens) - self._from
        if held <= _SETTLE:
            return
        if not new.endswith("\ufffd"):
            self._settled, self._from = self.text, len(self.tokens)
        elif held > 2 * _SETTLE:  # no character is that long: these are no characters
            end = len(self.tokens) - _CHARACTER
            self._settled += self._tokenizer.decode(self.tokens[self._from : end])
            self._from = end

    def _give(self, safe: str) -> str:
        piece, self._given = safe[self._given :], max(self._given, len(safe))
        return piece

    def chat_logprobs(self, begin: int = 0) -> dict[str, Any]:
        """Logprobs of the tokens from `begin` on, as chat answers have them."""
        return {"content": [self._entry(i) for i in range(begin, len(self.tokens))], "refusal": None}

    def text_logprobs(self, begin: int = 0) -> dict[str, Any]:
        """The same as answers of /v1/completions have them."""
        entries = [self._entry(i) for i in range(begin, len(self.tokens))]
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {one["token"]: one["logprob"] for one in [*entry["top_logprobs"], entry]} for entry in entries
            ],
            "text_offset": self._offsets[begin:],
        }

    def _entry(self, index: int) -> dict[str, Any]:
        entry = self._one(self.tokens[index], self.logprobs[index])
        return entry | {"top_logprobs": [self._one(*pair) for pair in self._top[index]]}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token),
            "logprob": max(logprob, LEAST),
            "bytes": list(self._tokenizer.bytes_of(token)),
        }

    def _token_text(self, token: int) -> str:
        return self._tokenizer.bytes_of(token).decode(errors="replace")

"""Byte-level BPE through the `tokenizers` library. Text in never becomes a control token."""

import functools
import os
from collections.abc import Iterable

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from venusrl.core.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
CONTROL = (END_OF_TEXT, IM_START, IM_END)


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's encoder.py): printable ones for
    themselves, the others for characters from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()


class Tokenizer:
    """Token ids of text and back.

    `encode` treats text as data: a control token spelled out in it (in a file the agent prints, say) is encoded as
    its bytes. Control tokens enter only by id.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._backend.encode_special_tokens = True
        missing = [token for token in CONTROL if backend.token_to_id(token) is None]
        if missing:
            raise ConfigError(f"the tokenizer lacks {', '.join(missing)}; ChatML needs them")
        self.end_of_text, self.im_start, self.im_end = (backend.token_to_id(token) for token in CONTROL)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def control(self) -> dict[str, int]:
        """Ids of the control tokens, by their text."""
        return {text: index for index, (text, special) in self._added.items() if special}

    @functools.cached_property
    def _added(self) -> dict[int, tuple[str, bool]]:
        """(text, whether it is a control token) of each token that is looked for as it stands."""
        added = self._backend.get_added_tokens_decoder()
        return {index: (token.content, token.special) for index, token in added.items()}

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; part of a character where it is part of one."""
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if token in self._added:
            return text.encode()
        try:
            return bytes(_BYTES[c] for c in text)
        except KeyError:  # not a byte-level token
            return self.decode([token]).encode()

    @functools.cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(len(self.bytes_of(token)) for token in range(self.vocab_size))

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], keep_control: bool = False) -> str:
        """Text of `ids`; invalid UTF-8 becomes replacement characters."""
        return self._backend.decode(list(ids), skip_special_tokens=not keep_control)

    def save(self, path: str | os.PathLike) -> None:
        self._backend.save(str(path))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads a tokenizer.json.

        Raises:
          ConfigError: there is none at `path`, or it is not one.
        """
        if not os.path.isfile(path):
            raise ConfigError(
                f"no tokenizer at {path}; fix model.checkpoint, or make it with `python -m launchers.warmstart`"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} is not a tokenizer.json ({error}); copy or make it again") from error
        return cls(backend)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learns merges from `texts`; digits stay single, so numbers never seen are still spelled."""
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(t, special=True, normalized=False) for t in CONTROL],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend)

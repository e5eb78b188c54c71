"""Byte-level BPE through the `tokenizers` library. Text in never becomes a control token."""

import os
from collections.abc import Iterable

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from venusrl.core.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
CONTROL = (END_OF_TEXT, IM_START, IM_END)


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

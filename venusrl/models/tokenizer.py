"""Byte-level BPE through the `tokenizers` library. Text in never becomes a control token."""

import functools
import os
from collections.abc import Iterable, Sequence
from types import TracebackType

from absl import logging
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from venusrl.core.errors import CheckpointError, ConfigError, ContractError, VenusError

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
CONTROL = (END_OF_TEXT, IM_START, IM_END)
LONG = 4096  # characters from which on a text takes milliseconds
_SPACES = ("\u2581", "\u0120")  # how SentencePiece and byte-level BPE write a space
_OTHER = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")  # formats of tokenizers that are not read


def _byte_characters() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for (GPT-2's encoder.py): printable ones for
    themselves, the others for characters from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_characters()
_IDS = 2**32  # the library counts in 32 bits

# Parts of a conversation, as they stand beside control tokens. One that a tokenizer changes would not join the next.
_PARTS = (
    *map(chr, range(0x20, 0x7F)),
    "\n",
    "Hello, World!",
    " a",
    "a ",
    "\n\n  two\tlines\n",
    "1234 x",
    "def add(a, b):\n    return a + b\n",
)


class reading:
    """Turns whatever the library raises into one line. It raises nothing narrower than Exception, and a panic of Rust,
    which is none: PanicException comes from BaseException, and its class cannot be imported.

    Args:
      what: is being done, in words that can stand before "fails".
      error: what is raised instead.
    """

    def __init__(self, what: str, error: type[VenusError] = ConfigError):
        self._what, self._error = what, error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or issubclass(kind, (ConfigError, CheckpointError)):
            return
        if issubclass(kind, Exception) or kind.__name__ == "PanicException":
            said = " ".join(str(error).split())[:300]
            raise self._error(f"{self._what} ({said}); copy or make it again") from error


class Tokenizer:
    """Token ids of text and back.

    `encode` treats text as data: a control token spelled out in it (in a file the agent prints, say) is encoded as
    its bytes. Control tokens enter only by id. Nothing is put before or after the text, and nothing is cut or padded,
    whatever the file says of it.

    Args:
      backend: of the library `tokenizers`; it is changed.
      control: further tokens that end or begin messages of this model, as strings.

    Attributes:
      prefix: ids that the file's own post-processor puts before a text (Llama's <|begin_of_text|>). A sequence starts
        with them; `encode` makes parts of sequences and leaves them out.

    Raises:
      ConfigError: a control token is none of its tokens, or text that spells one would still become one; the file
        puts tokens after a text; parts of a text do not come back as they were, or not the same each time; or the
        library fails.
    """

    def __init__(self, backend: Backend, control: Iterable[str] = ()):
        self._backend = backend
        with reading("the tokenizer cannot be used"):
            self._set_up(control)

    def _set_up(self, control: Iterable[str]) -> None:
        backend = self._backend
        _make_exact(backend)
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        given = list(dict.fromkeys(control))
        unknown = [token for token in given if backend.token_to_id(token) is None]
        if unknown:
            raise ConfigError(
                f"the tokenizer lacks {', '.join(unknown)}, which the model's files name; copy them again"
            )
        names = given + [token for token in CONTROL if backend.token_to_id(token) is not None]
        added = backend.get_added_tokens_decoder()
        plain = [token for token in names if not getattr(added.get(backend.token_to_id(token)), "special", False)]
        if plain:  # else text that spells one would be one
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in plain])
        self._check_leaks(names)
        first = self.encode("a")[:1]
        if any(self._backend.id_to_token(i).startswith(_SPACES) for i in first):
            raise ConfigError(
                "the tokenizer puts a space before every text, so the parts of a conversation do not join"
            )
        self._check_parts()
        self.prefix = self._added_around()

    def _check_parts(self) -> None:
        """Refuses a tokenizer whose parts of a text do not join, and one that does not give the same each time."""
        for text in _PARTS:
            ids = self.encode(text)
            if any(self.encode(text) != ids for _ in range(3)):
                raise ConfigError(f"the tokenizer makes other ids of {text!r} each time; use another")
            back = self.decode(ids)
            if back != text:
                puts = back.removesuffix(text) if back.endswith(text) else back.removeprefix(text)
                said = f"it puts {puts!r} around it" if puts not in ("", back) else f"it becomes {back!r}"
                raise ConfigError(
                    f"the tokenizer does not give {text!r} back as it was: {said}, so the parts of a conversation do "
                    "not join; use another (see its normalizer, pre_tokenizer and decoder)"
                )

    def _check_leaks(self, names: Sequence[str]) -> None:
        ids = {self._backend.token_to_id(token) for token in names}
        leaking = [token for token in names if ids & set(self.encode(f"a {token}{token} b\n{token}"))]
        if leaking:
            raise ConfigError(
                f"the tokenizer makes {', '.join(leaking)} of text that spells them, so they cannot be control tokens; "
                "take them out of eos_token_id, or use another tokenizer"
            )

    def _added_around(self) -> tuple[int, ...]:
        around = self._backend.encode("a", add_special_tokens=True)
        inside = [i for i, special in enumerate(around.special_tokens_mask) if not special]
        begin, end = (inside[0], inside[-1] + 1) if inside else (len(around.ids), len(around.ids))
        if around.ids[end:]:
            raise ConfigError(f"the tokenizer puts {around.tokens[end:]} after every text; it is no language model's")
        return tuple(around.ids[:begin])

    def _chatml(self, token: str) -> int:
        """Raises: ConfigError: there is no such token."""
        found = self._backend.token_to_id(token)
        if found is None:
            raise ConfigError(self.lacks_chatml)
        return found

    @property
    def lacks_chatml(self) -> str:
        """What ChatML needs and is not there, in a sentence."""
        missing = [token for token in CONTROL if self._backend.token_to_id(token) is None]
        return f"the tokenizer lacks {', '.join(missing)}, which ChatML needs"

    @property
    def end_of_text(self) -> int:
        return self._chatml(END_OF_TEXT)

    @property
    def im_start(self) -> int:
        return self._chatml(IM_START)

    @property
    def im_end(self) -> int:
        return self._chatml(IM_END)

    @property
    def speaks_chatml(self) -> bool:
        """Whether the tokens of ChatML are there."""
        return all(self._backend.token_to_id(token) is not None for token in CONTROL)

    @property
    def vocab_size(self) -> int:
        """Above the largest id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def token_id(self, token: str) -> int | None:
        """The id of one token as it is spelled in the file; None where there is none."""
        if any("\ud800" <= c <= "\udfff" for c in token):  # half a character is in no file
            return None
        return self._backend.token_to_id(token)

    def token(self, id_: int) -> str | None:
        """The spelling of a token in the file; None where there is none."""
        return self._backend.id_to_token(id_) if 0 <= id_ < _IDS else None

    @functools.cached_property
    def control(self) -> dict[str, int]:
        """Ids of the control tokens, by their text."""
        return {text: index for index, (text, special) in self._added.items() if special}

    @property
    def added(self) -> list[str]:
        """Tokens that are looked for as they stand, control tokens and others."""
        return [text for text, _ in self._added.values()]

    def strips(self, token: str) -> tuple[bool, bool]:
        """Whether an added token takes white space before it along, and after it."""
        return self._stripping.get(token, (False, False))

    def make_control(self, tokens: Iterable[str]) -> None:
        """Text that spells one of these tokens is text from now on.

        Raises:
          ConfigError: it would still become the token.
        """
        names = list(tokens)
        self._backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in names])
        for name in ("_added", "_stripping", "control"):
            self.__dict__.pop(name, None)
        self._check_leaks(names)

    @functools.cached_property
    def _added(self) -> dict[int, tuple[str, bool]]:
        """(text, whether it is a control token) of each token that is looked for as it stands."""
        added = self._backend.get_added_tokens_decoder()
        return {index: (token.content, token.special) for index, token in added.items()}

    @functools.cached_property
    def _stripping(self) -> dict[str, tuple[bool, bool]]:
        added = self._backend.get_added_tokens_decoder().values()
        return {token.content: (token.lstrip, token.rstrip) for token in added if token.lstrip or token.rstrip}

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; part of a character where it is part of one."""
        text = self.token(token)
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
        """Ids of `text`; half of a character (a lone surrogate) counts as U+FFFD, as there are no bytes for it."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        with reading(f"the tokenizer fails on a text of {len(text)} characters", ContractError):
            return self._library_ids(text)

    def _library_ids(self, text: str) -> list[int]:
        if len(text) < LONG:
            return self._backend.encode(text, add_special_tokens=False).ids
        # This one lets other threads of Python run meanwhile.
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Iterable[int], keep_control: bool = False) -> str:
        """Text of `ids`; invalid UTF-8 becomes replacement characters."""
        return self._backend.decode(list(ids), skip_special_tokens=not keep_control)

    def with_control(self, control: Iterable[str]) -> "Tokenizer":
        """This tokenizer with further control tokens; it takes the place of this one. See Tokenizer."""
        return type(self)(self._backend, control)

    def save(self, path: str | os.PathLike) -> None:
        self._backend.save(str(path))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads a tokenizer.json; its normalizer (NFC in Qwen's) and pre-tokenizer are used as they are.

        Raises:
          ConfigError: there is none at `path`, or it is not one.
        """
        if not os.path.isfile(path):
            other = [name for name in _OTHER if os.path.isfile(os.path.join(os.path.dirname(path), name))]
            if other:
                raise ConfigError(
                    f"no tokenizer at {path}, only {', '.join(other)}; make it with transformers: "
                    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
                )
            raise ConfigError(
                f"no tokenizer at {path}; fix model.checkpoint, or make it with `python -m launchers.warmstart`"
            )
        with reading(f"{path} is not a tokenizer.json"):
            backend = Backend.from_file(str(path))
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


def _make_exact(backend: Backend) -> None:
    """Switches off what makes ids random, which is for training a model alone: the merges that BPE leaves out
    (dropout), and Unigram's choice among splits (subword regularisation)."""
    for name in ("dropout", "alpha", "nbest_size"):
        value = getattr(backend.model, name, None)
        if value:
            logging.warning("the tokenizer's %s=%s makes ids random, for training it; not used", name, value)
        if value is not None:
            setattr(backend.model, name, None)

"""What the files beside tokenizer.json say: special tokens, the chat template, what ends a reply, how to sample.

Everything that changes tokens is used here, checked against tokenizer.json, or refused. What would change how tokens
are sampled is told in `notes`, since sampling is the run's.
Sources: transformers' tokenization_utils_base.py and generation/configuration_utils.py, versions 4.36 to 5.24.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from venusrl.core.errors import CheckpointError
from venusrl.models.fields import read_json, read_text, short
from venusrl.models.tokenizer import Tokenizer

TOKENIZER = "tokenizer.json"
_TEMPLATE = "chat_template.jinja"
# What an export copies as it is. config.json and generation_config.json are written anew.
COPIED = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    _TEMPLATE,
    "vocab.json",
    "merges.txt",
)
_QUANTISED = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
# Fields of generation_config.json that say nothing about tokens or numbers, or that are read here.
_GENERATION_KNOWN = frozenset(
    """
    eos_token_id bos_token_id pad_token_id _from_model_config transformers_version use_cache max_length max_new_tokens
    cache_implementation num_return_sequences output_scores return_dict_in_generate trust_remote_code
    """.split()
)


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """What a model's folder says beside its weights and its tokenizer.json.

    Attributes:
      chat_template: Jinja source of the model's own template, or of several by name ("default", "tool_use"); "" where
        there is none.
      bos, eos, pad, unk: special tokens as they are spelled; "" where there is none. A template may name them.
      stop_tokens: ids that end a reply: eos_token_id of generation_config.json and config.json, and `eos`.
      prefix: ids that a sequence starts with (Llama's <|begin_of_text|>): by add_bos_token of tokenizer_config.json;
        where that is not said, what tokenizer.json puts there. A template of the model's own writes them itself.
      generation: what generation_config.json says, as it is.
      notes: one line each for what the folder asks for and is not done here.
      copies: files that belong to the tokenizer, for an export.
    """

    chat_template: str | Mapping[str, str] = ""
    bos: str = ""
    eos: str = ""
    pad: str = ""
    unk: str = ""
    stop_tokens: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    copies: tuple[Path, ...] = ()


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if os.path.lexists(path) else {}  # a link to nothing is a file that was not copied


def read_tokenizer(folder: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[Tokenizer, TokenizerFiles]:
    """The tokenizer of a folder, and what the files beside it say.

    Args:
      config: the content of config.json.
      vocab_size: rows of the model's embedding.

    Raises:
      ConfigError: there is no tokenizer.json, or it is none that can be used.
      CheckpointError: the files contradict each other, name tokens that do not exist or have no row in the embedding,
        or ask for what is not supported; everything that is wrong, in one message.
    """
    folder = Path(folder)
    problems: list[str] = []
    said = {name: _optional(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")}
    settings, special = said["tokenizer_config.json"], said["special_tokens_map.json"]
    generation = _optional(folder / "generation_config.json")
    notes: list[str] = []
    named = {}
    for kind in ("bos", "eos", "pad", "unk"):
        key = f"{kind}_token"
        first, second = _spelled(settings.get(key)), _spelled(special.get(key))
        named[kind] = first or second
        if first and second and first != second:
            notes.append(f"{key} is {second} in special_tokens_map.json; {first} of tokenizer_config.json is used")
    plain = Tokenizer.load(folder / TOKENIZER)
    ends = _ids(generation, "eos_token_id", "generation_config.json", problems)
    ends += _ids(config, "eos_token_id", "config.json", problems)
    for id_ in ends:
        if plain.token(id_) is None:
            problems.append(f"eos_token_id={short(id_)} is no token of {TOKENIZER} (ids below {plain.vocab_size})")
    for kind, token in named.items():
        if token and plain.token_id(token) is None:
            problems.append(f"{kind}_token={token!r} is no token of {TOKENIZER}")
    lists = [_list(said, f"{kind}_special_tokens") for said in (settings, special) for kind in ("additional", "extra")]
    more = [_spelled(token) for tokens in lists for token in tokens]
    absent = [token for token in more if plain.token_id(token) is None]
    if absent:
        problems.append(f"additional special tokens {', '.join(map(repr, absent[:5]))} are no tokens of {TOKENIZER}")
    more += _check_added(settings, _optional(folder / "added_tokens.json"), plain, problems)
    _check_settings(settings, problems)
    if plain.vocab_size > vocab_size:
        problems.append(f"{TOKENIZER} has ids up to {plain.vocab_size - 1}, the embedding {vocab_size} rows")
    for name in _QUANTISED:
        if (folder / name).exists():
            problems.append(f"{name} says that the weights are quantised; use those that are not")
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}; copy the files of one model")
    if named["eos"]:
        ends.append(plain.token_id(named["eos"]))
    stop_tokens = tuple(dict.fromkeys(ends))
    control = [plain.token(id_) for id_ in stop_tokens] + [named[kind] for kind in ("bos", "eos", "pad") if named[kind]]
    tokenizer = plain.with_control([*control, *more])
    notes += _unused(folder, settings, generation)
    prefix = tokenizer.prefix
    if settings.get("add_bos_token") is not None:
        prefix = (tokenizer.token_id(named["bos"]),) if settings["add_bos_token"] else ()
    files = TokenizerFiles(
        chat_template=_template(folder, settings),
        **named,
        stop_tokens=stop_tokens,
        prefix=prefix,
        generation=generation,
        notes=tuple(notes),
        copies=tuple(folder / name for name in COPIED if (folder / name).is_file()),
    )
    return tokenizer, files


def _spelled(token: Any) -> str:
    """A special token is written as text, or as an object with its text as "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _ids(said: Mapping[str, Any], key: str, file: str, problems: list[str]) -> list[int]:
    value = said.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        problems.append(f"{key}={short(value)} of {file} must be token ids")
        return []
    return list(ids)


def _list(said: Mapping[str, Any], key: str) -> list:
    value = said.get(key)
    value = list(value.values()) if isinstance(value, dict) else value  # transformers 5 may name them
    return value if isinstance(value, list) else []


def _check_added(settings: Mapping, added: Mapping, tokenizer: Tokenizer, problems: list[str]) -> list[str]:
    """Tokens that are listed again beside tokenizer.json must be the same there: transformers would add them.

    Returns:
      those that are said to be special.
    """
    listed: list[tuple[str, Any, str]] = [(token, id_, "added_tokens.json") for token, id_ in added.items()]
    decoder = settings.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        problems.append("added_tokens_decoder of tokenizer_config.json is no object")
        decoder = {}
    listed += [(_spelled(token), id_, "tokenizer_config.json") for id_, token in decoder.items()]
    wrong = [
        f"{token!r} is {id_} in {file} and {tokenizer.token_id(token)} in {TOKENIZER}"
        for token, id_, file in listed
        if str(tokenizer.token_id(token)) != str(id_)
    ]
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    problems += [", ".join(wrong[:5]) + more] if wrong else []
    return [_spelled(t) for t in decoder.values() if isinstance(t, dict) and t.get("special") is True]


def _check_settings(settings: Mapping, problems: list[str]) -> None:
    if settings.get("auto_map"):
        problems.append("auto_map of tokenizer_config.json: the tokenizer is code of the model's own, which is not run")
    if settings.get("add_eos_token"):
        problems.append("add_eos_token of tokenizer_config.json puts an end after every text")
    if settings.get("add_bos_token") and not _spelled(settings.get("bos_token")):
        problems.append("add_bos_token of tokenizer_config.json has no bos_token to add")
    if settings.get("add_prefix_space"):
        problems.append("add_prefix_space of tokenizer_config.json puts a space before every text")


def _template(folder: Path, settings: Mapping) -> str | Mapping[str, str]:
    """chat_template.jinja comes before the field of tokenizer_config.json, as in transformers."""
    path = folder / _TEMPLATE
    if os.path.lexists(path):
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        pairs = [(t.get("name"), t.get("template")) for t in template if isinstance(t, dict)]
        if all(isinstance(text, str) for pair in pairs for text in pair) and "default" in dict(pairs):
            return dict(pairs)
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder}: chat_template of tokenizer_config.json is neither text nor a list of templates"
        )
    return template or ""


def _unused(folder: Path, settings: Mapping, generation: Mapping) -> Iterable[str]:
    """One line for each thing that is asked for and not done."""
    named = [t.get("name") for t in _list(settings, "chat_template") if isinstance(t, dict)]
    named += sorted(path.stem for path in (folder / "additional_chat_templates").glob("*.jinja"))
    others = [str(name) for name in named if name not in ("default", "tool_use")]
    if others:
        yield f"chat templates {', '.join(others)} not used; those called default and tool_use are"
    defaults = {k: v for k, v in generation.items() if k not in _GENERATION_KNOWN and v is not None}
    if defaults:
        shown = ", ".join(f"{key}={value!r}" for key, value in sorted(defaults.items()))
        yield f"generation_config.json: {shown} not used; how tokens are sampled is the run's"
    if settings.get("clean_up_tokenization_spaces"):
        yield "tokenizer_config.json: clean_up_tokenization_spaces not used; text is decoded as it was generated"

"""A model's folder as the hub has it: config.json, weights, tokenizer and the files beside them, read and written."""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import logging

from venusrl.core.errors import CheckpointError
from venusrl.models import hf, hf_config, shards
from venusrl.models.config import ModelConfig
from venusrl.models.template import CHATML
from venusrl.models.tokenizer import CONTROL, END_OF_TEXT, IM_END, Tokenizer
from venusrl.models.tokenizer_files import TOKENIZER, TokenizerFiles, read_tokenizer


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """What a folder is, but for its weights, which `params` reads."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    files: TokenizerFiles
    ignore: tuple[str, ...] = ()

    def params(self) -> dict:
        """float32 parameters of models.decoder, in host memory.

        Raises:
          CheckpointError: weights are missing, damaged or of another model.
        """
        return hf.load(self.path, self.config, self.ignore)


def open_folder(
    path: str | os.PathLike,
    shape: ModelConfig | None = None,
    dtype: str = "float32",
    remat: bool = False,
    ignore: Sequence[str] = (),
) -> ModelFolder:
    """Reads everything in a folder but the weights. What the folder asks for and is not done is logged, a line each.

    Args:
      shape: what the model has to be; None takes what config.json says, with `dtype` and `remat`.
      ignore: keys of config.json that are known to change nothing.

    Raises:
      ConfigError: there is no tokenizer.json, or it cannot be used.
      CheckpointError: config.json describes another model than `shape` or one that is not supported, or the files of
        the folder contradict each other.
    """
    path = Path(path)
    if shape is not None and not (path / TOKENIZER).is_file():
        Tokenizer.load(path / TOKENIZER)  # says what is there instead
    theirs, raw = hf_config.read_config(path, dtype, remat, ignore)
    if shape is None:
        shape = theirs
    else:
        hf_config.check_same(theirs, shape, hf_config.FILE)
    tokenizer, files = read_tokenizer(path, raw, shape.vocab_size)
    for note in files.notes:
        logging.warning("%s: %s", path, note)
    return ModelFolder(path, shape, tokenizer, files, tuple(ignore))


def check_free(out: str | os.PathLike) -> None:
    """Refuses to write over anything.

    Raises:
      CheckpointError: `out` is a file, or a folder that is not empty.
    """
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{out} is there and not empty; give a folder that does not exist")


def write_folder(
    out: str | os.PathLike,
    params: dict,
    config: ModelConfig,
    tokenizer: Tokenizer,
    files: TokenizerFiles,
    stop_tokens: Sequence[int],
    dtype: str = "float32",
    shard_bytes: int = shards.SHARD_BYTES,
) -> None:
    """Writes a folder that transformers loads; it appears whole or not at all.

    Args:
      out: the folder; it may exist if it is empty.
      tokenizer, files: of the model that was trained. Its files are copied as they are; what it lacks is written.
      stop_tokens: what ends a reply, the most usual first.
      dtype: of the weights: "float32" or "bfloat16".
      shard_bytes: largest file of weights.

    Raises:
      CheckpointError: `out` is not empty, or cannot be written.
    """
    out = Path(out).absolute()
    partial = out.with_name(f".{out.name}.partial")  # of an export that was killed, or fresh
    try:
        check_free(out)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        ids = _write_tokenizer(partial, tokenizer, files, list(stop_tokens))
        hf.save(partial, params, config, dtype, shard_bytes, ids)
        if config.attention_bias == "qkv" and not any(path.name == "tokenizer_config.json" for path in files.copies):
            logging.warning(
                "%s: AutoTokenizer of transformers 5 splits the text of a qwen2 as Qwen does, whatever its files say; "
                "read this tokenizer with PreTrainedTokenizerFast",
                out,
            )
        for path in sorted(partial.iterdir()):
            _sync(path)
        _sync(partial)
        os.rename(partial, out)  # onto nothing, or an empty folder
        _sync(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written ({error}); make room, or give another folder") from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_tokenizer(
    folder: Path, tokenizer: Tokenizer, files: TokenizerFiles, stop_tokens: list[int]
) -> dict[str, Any]:
    """The tokenizer's files and generation_config.json; gives the special ids for config.json."""
    for source in files.copies:
        shutil.copyfile(source, folder / source.name)
    if not (folder / TOKENIZER).exists():
        tokenizer.save(folder / TOKENIZER)
    eos = files.eos or (IM_END if tokenizer.speaks_chatml else tokenizer.token(stop_tokens[0]))
    pad = files.pad or (END_OF_TEXT if tokenizer.token_id(END_OF_TEXT) is not None else "")
    if not (folder / "tokenizer_config.json").exists():
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": files.bos or None,
            "eos_token": eos,
            "pad_token": pad or None,
            "unk_token": files.unk or None,
            "additional_special_tokens": [
                t for t in CONTROL if t not in (eos, pad) and tokenizer.token_id(t) is not None
            ],
            "clean_up_tokenization_spaces": False,
        }
        template = files.chat_template or (CHATML if tokenizer.speaks_chatml else None)
        if template:
            settings["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    ids = {
        "bos_token_id": tokenizer.token_id(files.bos) if files.bos else None,
        "eos_token_id": stop_tokens[0] if len(stop_tokens) == 1 else stop_tokens,
        "pad_token_id": tokenizer.token_id(pad) if pad else None,
    }
    generation = dict(files.generation) | {key: value for key, value in ids.items() if value is not None}
    generation.pop("transformers_version", None)
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return ids

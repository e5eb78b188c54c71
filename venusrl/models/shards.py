"""Files of weights in a model's folder: which ones are the model, what they hold, and writing them in parts."""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import logging
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from venusrl.core.errors import CheckpointError
from venusrl.models.fields import check_file, read_json

SHARD_BYTES = 5 * 10**9  # of one file, as the hub's tools write them
INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_PART = re.compile(r"model-([0-9]+)-of-([0-9]+)\.safetensors")
_DTYPES = ("F32", "BF16", "F16")  # as the file names them


def find(folder: str | os.PathLike) -> list[Path]:
    """The files that hold the model in `folder`, sorted: those of its index, or model.safetensors, or all model*.

    Other *.safetensors are never merged in: an adapter is refused, the rest is named in the log and left.

    Raises:
      CheckpointError: there are none, some are missing, or more than one model is there.
    """
    folder = Path(folder)
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    adapters = [name for name in present if name.startswith("adapter")]
    adapters += [name for name in ("adapter_config.json",) if (folder / name).exists()]
    if adapters:
        raise CheckpointError(f"{folder} holds an adapter ({', '.join(adapters)}); merge it into its model first")
    if (folder / INDEX).exists():
        chosen = _indexed(folder, present)
    elif _WHOLE in present:
        chosen = [_WHOLE]
        parts = [name for name in present if _PART.fullmatch(name)]
        if parts:
            raise CheckpointError(f"{folder} holds two models, {_WHOLE} and {', '.join(parts[:3])}; remove one of them")
    else:
        chosen = [name for name in present if name.startswith("model")]
        _check_parts(folder, chosen)
    if not chosen:
        other = [
            p.name for p in sorted(folder.glob("*")) if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
        ]
        there = f"; there are {', '.join((present + other)[:5])}" if present or other else ""
        raise CheckpointError(
            f"no *.safetensors of a model in {folder}{there}; fix model.checkpoint, save the model as {_WHOLE}, or "
            "make it (launchers.warmstart)"
        )
    left = [name for name in present if name not in chosen]
    if left:
        logging.warning("%s: %s not read; the model is %s", folder, ", ".join(left), ", ".join(chosen[:3]))
    return [folder / name for name in chosen]


def _indexed(folder: Path, present: Sequence[str]) -> list[str]:
    """The files that the index names; each must be there and hold what the index says."""
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or any(not isinstance(p, str) for p in places.values()):
        raise CheckpointError(f"{folder / INDEX} has no weight_map of names to files; copy it again")
    chosen = sorted(set(places.values()))
    if any(os.path.basename(name) != name for name in chosen):
        raise CheckpointError(f"{folder / INDEX} names files outside its folder; copy it again")
    missing = [name for name in chosen if name not in present]
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(chosen)} files of the model are missing: {shown}; copy them"
        )
    if _WHOLE in present and _WHOLE not in chosen:
        raise CheckpointError(f"{folder} holds two models, {_WHOLE} and the files of {INDEX}; remove one of them")
    held = {name: header(folder / name) for name in chosen}
    absent = [name for name, place in places.items() if name not in held[place]]
    unlisted = [name for tensors in held.values() for name in tensors if name not in places]
    if absent or unlisted:
        said = [f"{len(absent)} tensors of the index are not in their file, as {absent[0]}"] if absent else []
        said += [f"{len(unlisted)} tensors are not in the index, as {unlisted[0]}"] if unlisted else []
        raise CheckpointError(
            f"{folder}: {INDEX} and its files are of different models: {'; '.join(said)}; copy them again"
        )
    return chosen


def _check_parts(folder: Path, names: Sequence[str]) -> None:
    """Files that are numbered "i of n" have to be there from 1 to n, of one n."""
    numbered = {name: match for name in names if (match := _PART.fullmatch(name))}
    totals = {int(match[2]) for match in numbered.values()}
    if len(totals) > 1:
        raise CheckpointError(
            f"{folder} holds parts of several models, of {sorted(totals)} files each; remove all but one"
        )
    if numbered:
        [total] = totals
        there = {int(match[1]) for match in numbered.values()}
        if beyond := sorted(part for part in there if not 1 <= part <= total):
            raise CheckpointError(f"{folder}: parts {beyond[:8]} of {total} cannot be; remove what is not its")
        # `total` is a stranger's number, so it is not counted up to.
        absent = list(itertools.islice((part for part in range(1, total + 1) if part not in there), 8))
        if absent:
            raise CheckpointError(f"{folder}: parts {absent} of {total} of the model are missing; copy them")


def header(file: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors in a file; no data is read.

    Raises:
      CheckpointError: it is damaged, or holds numbers of a type that is not read.
    """
    with _opened(file) as handle:
        found = {name: handle.get_slice(name) for name in sorted(handle.keys())}
        types = {name: part.get_dtype() for name, part in found.items()}
        shapes = {name: tuple(part.get_shape()) for name, part in found.items()}
    wrong = [name for name, kind in types.items() if kind not in _DTYPES]
    if wrong:
        raise CheckpointError(
            f"{file.name}: {len(wrong)} tensors are of another type than {', '.join(_DTYPES)}, as {wrong[0]}, which is "
            f"{types[wrong[0]]}; use a file that is not quantised, or convert it"
        )
    return shapes


def tensors(files: Sequence[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of `files`, one at a time.

    Raises:
      CheckpointError: a file is damaged.
    """
    for file in files:
        with _opened(file) as handle:
            for name in sorted(handle.keys()):  # they come in another order each time
                yield name, handle.get_tensor(name)


@contextlib.contextmanager
def _opened(file: Path):
    check_file(file)
    try:
        with safe_open(file, framework="flax") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); copy or make it again") from error


def write(
    folder: Path,
    converters: Sequence[tuple[str, Callable]],
    sizes: Mapping[str, int],
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes tensors as model.safetensors, or as numbered files with an index where they are more than `shard_bytes`.

    Args:
      converters: (name, what makes the tensor); called file by file, so that one file's tensors are in memory.
      sizes: elements of each tensor.
      dtype: "float32" or "bfloat16".
    """
    width = jnp.dtype(dtype).itemsize
    parts: list[list[tuple[str, Callable]]] = [[]]
    room = shard_bytes
    for name, make in converters:
        size = sizes[name] * width
        if size > room and parts[-1]:
            parts.append([])
            room = shard_bytes
        parts[-1].append((name, make))
        room -= size
    files = [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    files = files if len(parts) > 1 else [_WHOLE]
    places = {}
    for file, part in zip(files, parts, strict=True):
        save_file({name: jnp.asarray(make(), dtype) for name, make in part}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # the library leaves it to its owner alone
        places |= {name: file for name, _ in part}
    if len(files) > 1:
        total = sum(sizes[name] for name in places) * width
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

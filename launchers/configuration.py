"""Checks a configuration against configs/base.py, and writes it next to the run."""

import difflib
import json
import os
from pathlib import Path

from ml_collections import config_dict

from configs import base
from venusrl.core.errors import ConfigError


def check_config(config: config_dict.ConfigDict) -> None:
    """Refuses fields that configs/base.py does not have, missing ones, and values of another type.

    Raises:
      ConfigError: naming the field, the value, and the nearest field or the wanted type.
    """
    _check(config, base.get_config(), "")


def _check(given: config_dict.ConfigDict, known: config_dict.ConfigDict, where: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
            raise ConfigError(f"config.{where}{name} is no field; the nearest is config.{where}{near[0]}")
    for name, default in known.items():
        field = f"config.{where}{name}"
        if name not in given:
            raise ConfigError(f"{field} is missing; start from configs.base.get_config()")
        value = given[name]
        if isinstance(default, config_dict.ConfigDict):
            if not isinstance(value, config_dict.ConfigDict):
                raise ConfigError(f"{field}={value!r} must be a group of fields, as in configs/base.py")
            _check(value, default, f"{where}{name}.")
        elif not _fits(value, default):
            raise ConfigError(f"{field}={value!r} is a {type(value).__name__}; it must be a {type(default).__name__}")


def _fits(value, default) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    if isinstance(default, tuple):
        return isinstance(value, (tuple, list))
    return isinstance(value, type(default))


def save_config(config: config_dict.ConfigDict, workdir: str | os.PathLike) -> None:
    """Writes the resolved configuration as config.json."""
    path = Path(workdir) / "config.json"
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    os.replace(fresh, path)


def load_config(workdir: str | os.PathLike) -> config_dict.ConfigDict:
    """The configuration that a run was started with.

    Raises:
      ConfigError: there is none in `workdir`.
    """
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"no config.json in {workdir}; --workdir must be the folder of a run")
    config = config_dict.ConfigDict(json.loads(path.read_text()))
    for name in ("prefill_rows", "prefill_tokens", "read_lengths"):
        config.rollout[name] = tuple(config.rollout[name])
    config.learner.mesh = tuple(config.learner.mesh)
    check_config(config)
    return config

"""Reads a configuration from flags, checks it against configs/base.py, and writes it next to the run."""

import difflib
import json
import os
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_dict, config_flags

from configs import base
from venusrl.core.errors import ConfigError


def define_config(default: str, help_: str) -> flags.FlagHolder:
    """The flag --config; an override of no field ends the program with one line."""
    try:
        return config_flags.DEFINE_config_file("config", default, help_)
    except (AttributeError, KeyError) as error:  # where --config is not given, overrides are looked at here
        sys.exit(_no_field(error))


def parse_flags(argv: list[str]) -> list[str]:
    """The flags_parser of app.run: an override of no field ends the program with one line; quiet below WARNING."""
    try:
        rest = app.parse_flags_with_usage(argv)
    except (AttributeError, KeyError) as error:
        sys.exit(_no_field(error))
    except OSError as error:  # a file that cannot be loaded, and overrides of its fields
        sys.exit(f"ConfigError: {_not_loaded(error)}")
    if flags.FLAGS["verbosity"].using_default_value:  # app.run would make it INFO, a page a checkpoint
        flags.FLAGS.verbosity = logging.WARNING
    return rest


def _no_field(error: Exception) -> str:
    said = error
    while isinstance(said, Exception) and said.args:  # ml_collections wraps one error in the other
        said = said.args[0]
    return f"ConfigError: an override names no field: {' '.join(str(said).split())}"


def _not_loaded(error: OSError) -> str:
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"--config cannot be loaded: {said[-1]}; give a file that has get_config()"


def check_config(config: config_dict.ConfigDict) -> None:
    """Refuses fields that configs/base.py does not have, missing ones, and values of another type.

    Raises:
      ConfigError: naming the field, the value, and the nearest field or the wanted type.
    """
    try:
        list(config)
    except OSError as error:  # a file that could not be loaded says so when it is looked at
        raise ConfigError(_not_loaded(error)) from error
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


# What a run is: these cannot change when it goes on in its folder; the others (steps, evaluation, rates) can.
_IDENTITY = ("seed", "group_size", "batch_groups", "model", "env")


def check_same_run(config: config_dict.ConfigDict, workdir: str | os.PathLike) -> None:
    """Refuses to go on in the folder of another run.

    Raises:
      ConfigError: naming the first field that makes it another.
    """
    for field, was, now in _differences(load_config(workdir), config, ""):
        if field.split(".")[0] in _IDENTITY:
            raise ConfigError(
                f"config.{field}={now!r}, but the run in {workdir} was started with {was!r}; use another --workdir"
            )


def _differences(old: config_dict.ConfigDict, new: config_dict.ConfigDict, where: str):
    for name in old:
        if isinstance(old[name], config_dict.ConfigDict):
            yield from _differences(old[name], new[name], f"{where}{name}.")
        elif old[name] != new[name]:
            yield f"{where}{name}", old[name], new[name]


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
    config = config_dict.ConfigDict(_with_tuples(json.loads(path.read_text()), base.get_config()))
    check_config(config)
    return config


def _with_tuples(given, default):
    """`given` as read from JSON, with tuples where `default` has them."""
    if isinstance(default, config_dict.ConfigDict) and isinstance(given, dict):
        return {name: _with_tuples(value, default.get(name)) for name, value in given.items()}
    return tuple(given) if isinstance(default, tuple) and isinstance(given, list) else given

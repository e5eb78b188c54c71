"""Checks a configuration against configs/base.py and configs/limits.py, and writes it next to the run."""

import contextlib
import difflib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from absl import flags
from ml_collections import config_dict, config_flags

from configs import base, limits
from launchers import releases
from venusrl.core.errors import ConfigError
from venusrl.observe.files import replace_file

_RL_OBJECTIVES = ("grpo",)


def define_config(default: str, help_: str) -> flags.FlagHolder:
    """The flag --config; an override of no field, or a file that cannot be loaded, ends the program with one line."""
    try:
        with silent():
            return config_flags.DEFINE_config_file("config", default, help_)
    except Exception as error:  # noqa: BLE001 - the file is a program of the user's, and is run here: it may raise anything
        sys.exit(f"ConfigError: {not_parsed(error)}")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keeps the flags' libraries from logging: what they warn of is an error here, and said as one."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def not_parsed(error: Exception) -> str:
    """One line for what the flags' library, or a configuration's own code, raised while flags were read."""
    if isinstance(error, (AttributeError, KeyError)) and not _in_file(error):
        said = error
        while isinstance(said, Exception) and said.args:  # ml_collections wraps one error in the other
            said = said.args[0]
        return f"{_overrides(said)} names no field: {' '.join(str(said).split())}{releases.hint(str(said))}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, OSError):  # a file that cannot be loaded, and overrides of its fields
        return _not_loaded(error)
    if isinstance(error, flags.Error) or not _in_file(error):
        if "Traceback" not in str(error):
            return " ".join(lines)
        return f"{lines[0].removesuffix(': Error whilst parsing config file:')[:200]}: {lines[-1]}"  # with the flag
    return f"--config: {_in_file(error)}: {type(error).__name__}: {lines[-1]}"


def _overrides(said: object) -> str:
    """The overrides of the command line that an error can be about."""
    given = [
        re.sub(r"^-*(no)?", "--", word.partition("=")[0]) for word in sys.argv if re.match(r"-{1,2}(no)?config\.", word)
    ]
    about = [flag for flag in given if set(flag.split(".")[1:]) & set(re.findall(r"\w+", str(said)))]
    return ", ".join(dict.fromkeys(about or given)) or "an override"


def _in_file(error: Exception) -> str:
    """The place in the user's file where it was raised; "" where that is the library's."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    packages = (os.sep + "ml_collections" + os.sep, os.sep + "absl" + os.sep)
    own = [frame for frame in frames if not any(package in frame.filename for package in packages)]
    last = own[-1] if own else None
    if last is None or last.filename.startswith("<") or frames[-1].filename != last.filename:
        return ""
    return f"{last.filename}, line {last.lineno}"


def _not_loaded(error: OSError) -> str:
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"--config cannot be loaded: {said[-1]}; give a file that has get_config()"


def check_config(config: config_dict.ConfigDict) -> None:
    """Refuses fields that configs/base.py does not have, missing ones, values of another type or out of range, and
    values that do not go together. Reads no model and starts nothing.

    Raises:
      ConfigError: naming the field, the value, and the nearest field or what the value must be.
    """
    check_fields(config, base.get_config(), limits.RUN)
    _check_together(config)


def check_fields(given, known: config_dict.ConfigDict, ranges: Mapping[str, limits.Limit]) -> None:
    """The fields of `given` are those of `known`, each within its limit.

    Raises:
      ConfigError: see check_config.
    """
    try:
        isinstance(given, config_dict.ConfigDict) or given["seed"]  # what could not be loaded says so when looked at
    except OSError as error:
        raise ConfigError(_not_loaded(error)) from error
    except (TypeError, KeyError, IndexError):
        pass  # something else: refused below
    if not isinstance(given, config_dict.ConfigDict):
        raise ConfigError(f"--config gives a {type(given).__name__}; get_config() must return a ConfigDict")
    _check(given, known, ranges, "")


def _check(given, known, ranges: Mapping[str, limits.Limit], where: str) -> None:
    for name in given:
        if name not in known:
            if replaced := releases.replacement(f"{where}{name}"):
                raise ConfigError(f"config.{where}{name} is no field any more; {replaced}")
            near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)
            raise ConfigError(f"config.{where}{name} is no field; the nearest is config.{where}{near[0]}")
    for name, default in known.items():
        field = f"config.{where}{name}"
        if name not in given:
            raise ConfigError(f"{field} is missing; start from configs.base.get_config()")
        value = given[name]
        if isinstance(default, config_dict.ConfigDict):
            if not isinstance(value, config_dict.ConfigDict):
                raise ConfigError(f"{field}={value!r} must be a group of fields, as in configs/base.py")
            _check(value, default, ranges, f"{where}{name}.")
        else:
            limit = ranges.get(f"{where}{name}") or limits.of_kind(default)
            if wrong := limit.wrong(value):
                raise ConfigError(f"{field}={_short(value)} (a {type(value).__name__}): {wrong}")


def _short(value) -> str:
    try:
        text = repr(value)
    except ValueError:  # more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_together(c: config_dict.ConfigDict) -> None:
    """Refuses values that are each within their limit but mean nothing together."""
    r, o = c.rollout, c.learner
    if o.objective == "sft":
        raise ConfigError(
            f"config.learner.objective='sft' learns from demonstrations, not from rewards; use {_RL_OBJECTIVES[0]!r}"
        )
    if c.eval.tasks > c.env.heldout_tasks:
        raise ConfigError(
            f"config.eval.tasks={c.eval.tasks} is above config.env.heldout_tasks={c.env.heldout_tasks}; lower the one "
            "or raise the other"
        )
    if c.batch_groups > c.env.train_tasks:
        raise ConfigError(
            f"config.batch_groups={c.batch_groups} is above config.env.train_tasks={c.env.train_tasks}, and a batch "
            "would hold a prompt twice; lower the one or raise the other"
        )
    if o.row_length < r.max_length:
        raise ConfigError(
            f"config.learner.row_length={o.row_length} is below config.rollout.max_length={r.max_length}; a long "
            "trajectory would not fit"
        )
    if r.max_tokens >= r.max_length:
        raise ConfigError(
            f"config.rollout.max_tokens={r.max_tokens} leaves no room for a prompt in config.rollout.max_length="
            f"{r.max_length}; lower the one or raise the other"
        )
    if o.decay_steps and o.decay_steps <= o.warmup_steps:
        raise ConfigError(
            f"config.learner.decay_steps={o.decay_steps} is not above config.learner.warmup_steps={o.warmup_steps}; "
            "0 is a constant rate"
        )
    if 0 in o.mesh or list(o.mesh).count(-1) > 1:
        raise ConfigError(f"config.learner.mesh={tuple(o.mesh)}; give sizes of 1 or more, at most one of them -1")
    if len(set(r.addresses)) != len(r.addresses):
        raise ConfigError(f"config.rollout.addresses={tuple(r.addresses)} has an address twice; give each once")


def check_workdir(workdir: str) -> Path:
    """The folder of a run, which need not exist yet; nothing is written.

    Raises:
      ConfigError: it is empty, cannot be a folder's name, is a file, or cannot be written to.
    """
    limit = limits.Text()
    if wrong := limit.wrong(workdir):
        raise ConfigError(f"--workdir={workdir!r}: {wrong}; give a folder such as runs/first")
    path = Path(workdir)
    try:
        nearest = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    except OSError as error:  # a name that is too long, a loop of links
        raise ConfigError(f"--workdir={workdir}: {error.strerror}; give another folder") from error
    if not nearest.is_dir():
        raise ConfigError(f"--workdir={workdir}: {nearest} is no folder; give another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--workdir={workdir}: {nearest} cannot be written to; give another one, or its rights")
    return path


# What a run is: these cannot change when it goes on in its folder; the others (steps, evaluation, rates) can.
_IDENTITY = ("seed", "group_size", "batch_groups", "model", "env")


def check_same_run(config: config_dict.ConfigDict, workdir: str | os.PathLike) -> None:
    """Refuses to go on in the folder of another run.

    Raises:
      ConfigError: naming the first field that makes it another.
    """
    for field, was, now in _differences(_read(workdir), config, ""):
        if field.split(".")[0] in _IDENTITY:
            raise ConfigError(
                f"config.{field}={now!r}, but the run in {workdir} was started with {was!r}; use another --workdir"
            )


def _differences(old: config_dict.ConfigDict, new: config_dict.ConfigDict, where: str):
    for name in old:
        if isinstance(old[name], config_dict.ConfigDict) and isinstance(new.get(name), config_dict.ConfigDict):
            yield from _differences(old[name], new[name], f"{where}{name}.")
        elif old[name] != new.get(name):
            yield f"{where}{name}", old[name], new.get(name)


def save_config(config: config_dict.ConfigDict, workdir: str | os.PathLike) -> None:
    """Writes the resolved configuration as config.json.

    Raises:
      OSError: naming the file.
    """
    text = json.dumps(config.to_dict(), indent=2, allow_nan=False) + "\n"
    replace_file(Path(workdir) / "config.json", text.encode())


def load_config(workdir: str | os.PathLike) -> config_dict.ConfigDict:
    """The configuration that a run was started with, by this release or an older one.

    What an older one did not have takes its default, and what it alone had is translated; each with a line in the log.

    Raises:
      ConfigError: there is none in `workdir`, it is cut short or garbled, or a field is wrong.
    """
    config = _read(workdir)
    check_config(config)
    return config


def _read(workdir: str | os.PathLike) -> config_dict.ConfigDict:
    path = Path(workdir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"no config.json in {workdir}; --workdir must be the folder of a run")
    fix = "bring back the run's own, or start in another --workdir"
    try:
        given = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested without end
        raise ConfigError(f"{path} is cut short or no JSON ({error}); {fix}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path} holds a {type(given).__name__}, not an object with the fields of a run; {fix}")
    brought, notes = releases.bring_up(given, base.get_config())
    for note in notes:
        logging.warning("%s: %s", path, note)
    try:
        return config_dict.ConfigDict(_with_tuples(brought, base.get_config()))
    except (TypeError, ValueError, AttributeError) as error:  # names that no field can have
        raise ConfigError(f"{path} holds something other than a configuration ({error}); {fix}") from error


def _with_tuples(given, default):
    """`given` as read from JSON, with tuples where `default` has them."""
    if isinstance(default, config_dict.ConfigDict) and isinstance(given, dict):
        return {name: _with_tuples(value, default.get(name)) for name, value in given.items()}
    return tuple(given) if isinstance(default, tuple) and isinstance(given, list) else given

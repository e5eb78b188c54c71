"""How every program starts and ends: flags in; where something is wrong that a user can mend, one line out.

A traceback is for bugs alone.
"""

import contextlib
import functools
import logging as std_logging
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from absl import app, flags, logging

from launchers.configuration import not_parsed, silent
from venusrl.core.errors import VenusError
from venusrl.core.output import Spare, open_closed, settle

INTERRUPTED = 130  # exit code, as shells have it for SIGINT
_SAVE_FAILURES = (OSError, ValueError, RuntimeError)  # those that the checkpointer raises as CheckpointError
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})
_OURS = tuple(str(Path(__file__).parents[1] / name) + os.sep for name in ("venusrl", "launchers", "envs", "configs"))
_NO_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


def run(
    main: Callable[[list[str]], None], arguments: bool = False, verbosity: int = logging.WARNING, lasting: bool = False
) -> None:
    """Runs `main` as an absl program.

    Args:
      main: called with the program's name and the arguments that are no flags.
      arguments: there may be such arguments.
      verbosity: of the log, unless a flag says otherwise.
      lasting: its work is not its output: it goes on where nobody reads that any more, or where it cannot be written.
    """
    open_closed()
    parse = functools.partial(parse_flags, arguments=arguments, verbosity=verbosity)
    app.run(functools.partial(_main, main, lasting=lasting), flags_parser=parse)


def parse_flags(argv: list[str], arguments: bool = False, verbosity: int = logging.WARNING) -> list[str]:
    """The flags_parser of app.run: one line for a flag that is wrong; quiet below `verbosity` where no flag says."""
    try:
        with silent():
            rest = flags.FLAGS(argv)
        if len(rest) > 1 and not arguments:
            raise flags.Error(f"unexpected arguments {rest[1:]}; did you forget a dash?")
    except flags.Error as error:
        sys.exit(f"FlagError: {not_parsed(error)}; --help shows the flags")
    except Exception as error:  # noqa: BLE001 - see configuration.define_config: the user's file is run here
        sys.exit(f"ConfigError: {not_parsed(error)}")
    if "config" in flags.FLAGS and flags.FLAGS["config"].value is None:
        sys.exit("ConfigError: --config: get_config() gave None; it must return a ConfigDict")
    for name in flags.FLAGS:
        value = flags.FLAGS[name].value
        if isinstance(value, float) and not math.isfinite(value):
            sys.exit(f"FlagError: --{name}={value}: give a finite number")
    if flags.FLAGS["verbosity"].using_default_value:  # app.run would make it INFO, a page a checkpoint
        flags.FLAGS.verbosity = verbosity
    return rest


def _main(main: Callable[[list[str]], None], argv: list[str], lasting: bool = False) -> None:
    quiet_libraries()
    if lasting:
        sys.stdout, sys.stderr = Spare(sys.stdout), Spare(sys.stderr)
    with ending(lasting):
        main(argv)


def quiet_libraries() -> None:
    """Leaves out what orbax and TensorStore print of failures in their own threads, pages for each.

    All of it is raised as well, as CheckpointError, where the save is waited for. With --verbosity=1 it is shown. It is
    left out by what it is, not while a save is under way: those threads, and futures that are collected, speak later.
    """
    for name in ("absl", "asyncio"):
        std_logging.getLogger(name).addFilter(_not_of_checkpoints)
    sys.excepthook = functools.partial(_excepthook, sys.excepthook)


def _not_of_checkpoints(record: std_logging.LogRecord) -> bool:
    if record.exc_info is None or record.exc_info[1] is None or std_logging.getLogger().isEnabledFor(std_logging.DEBUG):
        return True
    error, trace = record.exc_info[1:]
    places = [frame.filename for frame in traceback.extract_tb(trace)]
    if not isinstance(error, _SAVE_FAILURES) or not all(_of_a_library(place) for place in places):
        return True  # a bug, or a failure of ours
    unheard = "Future exception was never retrieved" in record.getMessage()
    beside = unheard and (not places or "RESOURCE_EXHAUSTED" in str(error))
    return not beside and not any(f"{os.sep}orbax{os.sep}" in place for place in (record.pathname, *places))


def _of_a_library(place: str) -> bool:
    """Whether a file is neither of this project nor a user's own: installed, or of the interpreter."""
    return place.startswith(("<frozen ", *_LIBRARIES)) and not place.startswith(_OURS)


def _excepthook(before: Callable, kind: type, error: BaseException, trace: TracebackType | None) -> None:
    """TensorStore calls back into an event loop that orbax has closed after the first failure."""
    if kind is RuntimeError and str(error) == "Event loop is closed" and trace is not None:
        places = traceback.extract_tb(trace)
        if all(f"{os.sep}asyncio{os.sep}" in place.filename for place in places):
            return
    before(kind, error, trace)


@contextlib.contextmanager
def ending(lasting: bool = False) -> Iterator[None]:
    """Ends the program with one line for a failure that is not a bug. `lasting`: see `run`."""
    try:
        yield
    except KeyboardInterrupt:
        Spare(sys.stderr).write("interrupted\n")
        sys.exit(INTERRUPTED)
    except Exception as error:  # looked at, and raised again where it is a bug
        if isinstance(error, BrokenPipeError) and not lasting:  # whoever read the output has gone
            sys.exit(1)
        line = one_line(error)
        if line is None:
            raise
        sys.exit(line)
    finally:
        _flush()


def _flush() -> None:
    """Writes what is left of the output, or gives it up."""
    for stream in (sys.stdout, sys.__stdout__):
        error = settle(stream)
        if error is not None and not isinstance(error, BrokenPipeError):
            Spare(sys.stderr).write(f"the output is not complete: {error.strerror}\n")
    settle(sys.__stderr__)


def one_line(error: BaseException) -> str | None:
    """What to say of an error that is no bug, on one line; None for a bug."""
    if isinstance(error, BaseExceptionGroup):
        lines = [one_line(part) for part in error.exceptions]
        return lines[0] if all(lines) else None
    said = " ".join(str(error).split())
    if isinstance(error, TimeoutError) and error.errno is None:
        return None  # of asyncio: time that ran out, and that nobody expected to
    if isinstance(error, (VenusError, OSError)):
        return f"{type(error).__name__}: {said or 'no reason was given'}"
    if isinstance(error, MemoryError):
        return f"MemoryError: {said or 'not enough memory'}; use smaller sizes"
    of_jax = getattr(sys.modules.get("jax.errors"), "JaxRuntimeError", None)  # imported where it was raised
    if of_jax is not None and isinstance(error, of_jax) and any(word in said for word in _NO_MEMORY):
        return (
            f"MemoryError: the device has not enough memory ({said[:200]}); lower rollout.slots, rollout.kv_tokens or "
            "learner.rows_per_part"
        )
    return None

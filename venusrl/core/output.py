"""Output that a program can do without: a reader that goes away, a full disk or a closed terminal does not end it."""

import contextlib
import os
import sys
from typing import Any, TextIO


class Spare:
    """A text stream around another one. What the other does not take is left out; everything else is the other's.

    Args:
      stream: None is no output, as sys.stdout is where a program is started with `>&-`.
    """

    def __init__(self, stream: TextIO | None):
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115 - as long as the program

    def write(self, text: str) -> int:
        """All of `text` counts as written."""
        with contextlib.suppress(OSError):  # EPIPE, ENOSPC, EIO of a terminal that is gone
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # a terminal or a file of another encoding: \xe4 for what it has not
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def open_closed() -> None:
    """Gives the program the standard streams that it was started without, as /dev/null.

    What is opened later would get their numbers, and what libraries print would go into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - as long as the program
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def settle(stream: TextIO | None) -> OSError | None:
    """Writes what is left in `stream`, or gives it up: the interpreter would try again at its end, and complain.

    Returns:
      Why it was given up; None where it was not.
    """
    if stream is None or stream.closed:
        return None
    try:
        stream.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        return error
    return None

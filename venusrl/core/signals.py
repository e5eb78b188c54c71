"""The signals at which a program saves what it has and ends."""

import asyncio
import signal
from collections.abc import Callable


def on_stop(stop: Callable[[], None]) -> None:
    """Calls `stop` in the running event loop at SIGINT, SIGTERM and SIGHUP; more than once where they come again.

    SIGHUP says that the terminal was closed. A program that was started with it ignored (nohup) goes on.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, stop)

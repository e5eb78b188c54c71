"""What ends a program in good order."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, signal, sys
from venusrl.core.signals import on_stop

async def main():
    stopped = asyncio.Event()
    on_stop(stopped.set)
    print("begun", flush=True)
    await stopped.wait()
    print("saved", flush=True)

if sys.argv[1:]:  # what nohup does
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
asyncio.run(main())
"""


def start(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_heard(number):
    process = start()
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "saved\n")


def test_a_terminal_that_is_closed_ends_nothing_that_ignores_it():
    process = start("nohup")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "saved\n")

"""How programs end: one line for what a user can mend, a traceback for a bug."""

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable

import jax.errors
import pytest

from launchers import program
from launchers.program import one_line
from venusrl.core.errors import ConfigError, WorkerError

from . import programs


class JaxRuntimeError(RuntimeError):
    """Called as JAX calls its own, and none of them."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("config.steps=0: give 1"), "ConfigError: config.steps=0: give 1"),
        (ConfigError("two\n  lines"), "ConfigError: two lines"),
        (OSError(errno.ENOSPC, "No space left", "/a/b"), "OSError: [Errno 28] No space left: '/a/b'"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a"),
            "PermissionError: [Errno 13] Permission denied: '/a'",
        ),
        (TimeoutError(errno.ETIMEDOUT, "timed out"), "TimeoutError: [Errno 110] timed out"),
        (MemoryError(), "MemoryError: not enough memory; use smaller sizes"),
        (BaseExceptionGroup("g", [WorkerError("a"), WorkerError("b")]), "WorkerError: a"),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, line):
    assert one_line(error) == line


def test_no_memory_on_a_device_names_the_fields_to_lower():
    line = one_line(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating\n 99 bytes"))
    assert line.startswith("MemoryError: ") and "rollout.slots" in line and "\n" not in line


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        KeyError("x"),
        jax.errors.JaxRuntimeError("INTERNAL: x"),
        JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        TimeoutError(),
        TimeoutError("the answer did not come"),
        ExceptionGroup("g", [ConfigError("a"), ValueError("b")]),
    ],
)
def test_a_bug_keeps_its_traceback(error):
    assert one_line(error) is None


ORBAX = f"{sysconfig.get_path('purelib')}/orbax/checkpoint/x.py"
ASYNCIO = f"{sysconfig.get_path('stdlib')}/asyncio/x.py"
OURS = f"{programs.ROOT}/venusrl/learner/x.py"


def within(place: str, inner: Callable) -> Callable:
    """A function of another file that calls `inner`."""

    def outer():
        inner()

    outer.__code__ = outer.__code__.replace(co_filename=place)
    return outer


def logged(error: Exception, places: list[str], said: str) -> logging.LogRecord:
    """What asyncio or absl logs of an error that passed files, the outermost first."""

    def fail():
        raise error

    inner = fail
    for place in reversed(places):
        inner = within(place, inner)
    try:
        inner()
    except Exception as caught:  # noqa: BLE001 - looked at below
        trace = caught.__traceback__.tb_next
        last = trace
        while last.tb_next is not None and last.tb_next.tb_next is not None:
            last = last.tb_next
        last.tb_next = None  # without `fail`
    return logging.LogRecord("asyncio", logging.ERROR, ASYNCIO, 1, said, (), (type(error), error, trace))


@pytest.mark.parametrize("said", ["Future exception was never retrieved", "Task exception was never retrieved"])
def test_what_the_checkpoint_library_says_beside_what_it_raises_is_left_out(said):
    for error in (OSError(errno.ENOSPC, "x"), ValueError("RESOURCE_EXHAUSTED: x"), RuntimeError("x")):
        assert not program._not_of_checkpoints(logged(error, [ASYNCIO, ORBAX], said))


@pytest.mark.parametrize("said", ["Future exception was never retrieved", "Task exception was never retrieved"])
@pytest.mark.parametrize(
    ("error", "places"),
    [
        (ValueError("a bug"), [OURS, ORBAX]),  # ours calls it wrongly
        (OSError("a bug"), [ASYNCIO, OURS, ORBAX]),
        (ValueError("a bug"), [ORBAX, OURS]),  # it calls ours
        (ValueError("a bug"), ["/home/me/env.py", ORBAX]),
        (KeyError("a bug"), [ASYNCIO, ORBAX]),
        (TypeError("a bug"), [ORBAX]),
        (RuntimeError("RESOURCE_EXHAUSTED: x"), [OURS]),
    ],
)
def test_a_bug_is_logged_also_where_it_passes_the_checkpoint_library(said, error, places):
    assert program._not_of_checkpoints(logged(error, places, said))


PROGRAM = """
import sys, time
from absl import flags
from launchers import program
flags.DEFINE_float("rate", 1.0, "A rate.")
def main(argv):
    print("begun", flush=True)
    {body}
program.run(main)
"""


def run(body: str, *arguments: str, **options) -> tuple[int, str, str]:
    command = [sys.executable, "-c", PROGRAM.format(body=body), *arguments]
    done = subprocess.run(command, cwd=programs.ROOT, text=True, timeout=60, stderr=subprocess.PIPE, **options)
    return done.returncode, done.stdout or "", done.stderr


def test_a_bug_ends_with_a_traceback_and_an_error_of_the_system_does_not():
    code, _, said = run("open('/nowhere/x')", stdout=subprocess.PIPE)
    assert (code, said) == (1, "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/x'\n")
    code, _, said = run("{}['x']", stdout=subprocess.PIPE)
    assert code == 1 and said.rstrip().endswith("KeyError: 'x'") and "Traceback" in said


def hears_ctrl_c() -> None:
    """In the child: where the suite runs in the background SIGINT is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_is_one_word_and_130():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body="time.sleep(60)")], cwd=programs.ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hears_ctrl_c,
    )  # fmt: skip
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "interrupted\n")


def test_an_output_that_nobody_reads_or_that_is_full_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    code, _, said = run("pass", stdout=write)
    os.close(write)
    assert (code, said) == (1, "")
    with open("/dev/full", "w") as full:
        code, _, said = run("pass", stdout=full)
    assert code == 1 and "No space left on device" in said and "Traceback" not in said and said.count("\n") <= 2


LASTING = PROGRAM.replace("program.run(main)", "program.run(main, lasting=True)")


def closed(streams: str, source: str, *arguments: str) -> tuple[int, str, str]:
    """(exit code, output, errors) of a program that a shell starts with some of its standard streams closed."""
    command = ["bash", "-c", f'exec "$@" {streams}', "bash", sys.executable, "-c", source, *arguments]
    done = subprocess.run(command, cwd=programs.ROOT, text=True, timeout=60, capture_output=True)
    return done.returncode, done.stdout, done.stderr


def test_a_standard_stream_that_was_closed_at_the_start_is_no_output(tmp_path):
    """sys.stdout is None then; and its number was given to the next file, into which others would have printed."""
    file = str(tmp_path / "file")
    body = f"f = open({file!r}, 'w'); import os; assert f.fileno() > 2; os.system('echo x'); print('x'); f.close()"
    for source in (PROGRAM, LASTING):
        for streams in ("<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"):
            code, _, said = closed(streams, source.format(body=body))
            assert (code, said) == (0, ""), f"{streams}: {said}"
            assert os.path.getsize(file) == 0
    failing = PROGRAM.format(body="open('/nowhere/x')")
    code, _, said = closed(">&-", failing)
    assert code == 1 and said == "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/x'\n"
    code, output, _ = closed("2>&-", failing)
    assert (code, output) == (1, "begun\n")


def test_help_without_an_output_is_no_traceback():
    """Said of it was that "an override names no field"."""
    answers = closed(">&-", PROGRAM.format(body="pass"), "--help")
    assert answers == closed(">/dev/null", PROGRAM.format(body="pass"), "--help")
    assert answers[2] == ""


def test_a_program_whose_work_is_not_its_output_goes_on_when_nobody_reads_that(tmp_path):
    """`launchers.train | head -2` ended the run, and nothing was saved."""
    source = LASTING.format(
        body="""
    import logging
    for _ in range(3):
        print("x" * 10000, flush=True)
        print("x" * 10000, file=sys.stderr, flush=True)
        logging.warning("x")
    open(sys.argv[1], "w").write("done")"""
    )
    source = source.replace("lasting=True", "arguments=True, lasting=True")
    for number, streams in enumerate(["| true", "2>&1 | true", ">/dev/full", ">/dev/full 2>&1"]):
        file = tmp_path / str(number)
        shell = f'"$@" {streams}; exit ${{PIPESTATUS[0]}}'
        command = ["bash", "-c", shell, "bash", sys.executable, "-c", source, str(file)]
        done = subprocess.run(command, cwd=programs.ROOT, text=True, timeout=60, capture_output=True)
        assert done.returncode == 0 and file.read_text() == "done", f"{streams}: {done}"
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr


def test_a_pipe_of_a_lasting_program_that_breaks_elsewhere_is_told():
    code, _, said = run("raise BrokenPipeError(32, 'Broken pipe')", stdout=subprocess.PIPE)
    assert (code, said) == (1, "")
    code, _, said = closed("", LASTING.format(body="raise BrokenPipeError(32, 'Broken pipe')"))
    assert (code, said) == (1, "BrokenPipeError: [Errno 32] Broken pipe\n")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_a_number_that_is_none_is_refused_for_every_flag(value):
    code, _, said = run("pass", f"--rate={value}", stdout=subprocess.PIPE)
    assert code == 1 and said.startswith("FlagError: --rate=") and said.count("\n") == 1


def test_ports_and_hosts_that_cannot_be_listened_on_are_one_line(tmp_path, forked):
    """Of the daemon of sandboxes; serve and worker listen through the same function."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "file").write_text("x")
        daemon = "launchers.sandboxd"
        cases = {
            (daemon, f"--port={port}"): f"--port={port}: Address already in use",
            (daemon, "--port=70000"): "--port=70000",
            (daemon, "--port=-1"): "--port=-1",
            (daemon, "--host=256.1.1.1", "--port=0"): "--host=256.1.1.1",
            (daemon, "--host=" + "a" * 70, "--port=0"): "--host=aaaa",
            (daemon, f"--socket={tmp_path}/file"): "no socket",
            (daemon, f"--socket={tmp_path}/nowhere/s"): "nowhere/s",
            (daemon, f"--socket={tmp_path}/{'s' * 200}"): "AF_UNIX path too long",
            (daemon, f"--key_file={tmp_path}/nowhere"): "--key_file=",
        }
        answers = forked.run_all([(module, list(arguments)) for module, *arguments in cases], processes=1)
    for (case, words), (code, output) in zip(cases.items(), answers, strict=True):
        assert code == 1 and words in output and output.count("\n") == 1, f"{case}: {output}"

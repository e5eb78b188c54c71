"""Conformance: running commands."""

import asyncio
import errno
import re
import time

import pytest

from venusrl.core.errors import ConfigError
from venusrl.sandbox import Template

from .conftest import processes


@pytest.mark.parametrize(("script", "code"), [("true", 0), ("exit 7", 7), ("no-such-cmd", 127), ("kill -9 $$", -9)])
async def test_exit_codes(sandbox, script, code):
    assert (await sandbox.exec(script)).exit_code == code


async def test_messages_are_those_of_bash_c(sandbox):
    result = await sandbox.exec("true\nno-such-cmd")
    assert result.text == "bash: line 2: no-such-cmd: command not found\n"


async def test_a_writer_in_the_background_does_not_hide_the_other_stream(pool):
    sandbox = await pool.create(Template("writes", output_bytes=8 << 20))
    process = await sandbox.start("yes & sleep 0.5; echo reason >&2; exit 3")
    lines = aiter(process)
    assert (await anext(lines)).data.startswith(b"y\n")  # and takes no more of it
    result = await asyncio.wait_for(process.wait(), 10)
    assert result.exit_code == 3 and b"reason\n" in result.output


async def test_output_is_merged_in_order(sandbox):
    result = await sandbox.exec("for i in 1 2 3; do echo out$i; echo err$i >&2; done")
    assert result.text.split() == ["out1", "err1", "out2", "err2", "out3", "err3"]
    assert result.output_total == len(result.output)


async def test_output_need_not_be_text(sandbox):
    result = await sandbox.exec(r"printf '\xff\x00\xfe'")
    assert result.output == b"\xff\x00\xfe"
    assert result.text == "\ufffd\x00\ufffd"


async def test_script_of_one_megabyte(sandbox):
    script = ": " + "x" * (1 << 20) + "\necho done"
    assert (await sandbox.exec(script)).text == "done\n"


async def test_script_bytes_reach_bash_unchanged(sandbox):
    result = await sandbox.exec(b"printf %s 'a\xff\xe9b' | od -An -tx1")
    assert result.text.split() == ["61", "ff", "e9", "62"]


async def test_heredoc_with_quotes(sandbox):
    script = "cat <<'E OF'\nit's \"$HOME\" `x` \\\nE OF \nE OF\necho $((6 * 7))"
    assert (await sandbox.exec(script)).text == 'it\'s "$HOME" `x` \\\nE OF \n42\n'


async def test_stdin_is_empty_unless_given(sandbox):
    assert (await sandbox.exec("cat; echo end", timeout_s=5)).text == "end\n"
    data = bytes(range(256)) * 2048
    assert (await sandbox.exec("wc -c; cat", stdin=data)).text == f"{len(data)}\n"


async def test_environment_is_only_what_was_declared(pool, monkeypatch):
    monkeypatch.setenv("VENUS_HOST_SECRET", "s3cret")
    sandbox = await pool.create(Template("env", env={"A": "template", "B": "b"}))
    result = await sandbox.exec("env", user_env={"A": "call"})
    seen = dict(line.split("=", 1) for line in result.text.splitlines())
    assert seen.keys() <= {
        "A", "B", "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "PAGER", "PWD", "SHLVL", "_", "OLDPWD"
    }  # fmt: skip
    assert (seen["A"], seen["B"], seen["HOME"]) == ("call", "b", "/workspace")
    assert "A=template" in (await sandbox.exec("env")).text


async def test_no_descriptor_leaks_into_commands(sandbox):
    result = await sandbox.exec("ls -l /proc/self/fd", stdin=b"given")
    names = dict(re.findall(r" (\d+) -> (\S+)", result.text))
    assert names.keys() == {"0", "1", "2", "3"}  # 3 is the directory that ls reads
    assert "stdin" in names["0"] and names["1"] == names["2"] and "/fd" in names["3"]


async def test_python_inside(sandbox):
    assert (await sandbox.exec("python3 -I -S -c 'print(6 * 7)'")).text == "42\n"


@pytest.mark.parametrize("prefix", ["", "setsid "])
async def test_background_process_does_not_hold_the_call(sandbox, prefix):
    started = time.monotonic()
    result = await sandbox.exec(f"{prefix}sleep 30.25 & echo hi")
    assert time.monotonic() - started < 5
    assert (result.text, result.exit_code, result.timed_out) == ("hi\n", 0, False)
    assert "sleep 30.25" in (await sandbox.exec("ps ax")).text


async def test_background_writer_survives_its_call(sandbox):
    await sandbox.exec("(for i in $(seq 40); do echo noise; sleep 0.02; done; echo alive > /workspace/mark) & echo hi")
    result = await sandbox.exec("for i in $(seq 100); do [ -e mark ] && break; sleep 0.05; done; cat mark")
    assert result.text == "alive\n"


async def test_deadline_ends_the_whole_tree(sandbox):
    script = (
        "echo begun; setsid sleep 987.1 & (sleep 987.2 &); trap '' TERM INT HUP; "
        "python3 -I -S -c 'import os,time\nif os.fork() == 0: os.setsid(); time.sleep(987.3)' & "
        "sleep 0.3; sleep 987.4"
    )
    started = time.monotonic()
    result = await sandbox.exec(script, timeout_s=1.0)
    assert 0.9 < time.monotonic() - started < 3.0
    assert (result.timed_out, result.exit_code, result.text) == (True, -9, "begun\n")
    assert 0.9 < result.seconds < 3.0
    assert (await sandbox.exec("ls -d /proc/[0-9]*; true")).text.count(
        "/proc/"
    ) == 2  # agent and shell, when it expands
    assert processes("987.") == []
    assert (await sandbox.exec("echo again")).text == "again\n"


async def test_huge_output_is_bounded(pool):
    sandbox = await pool.create(Template("out", output_bytes=10_000))
    result = await sandbox.exec("echo first; head -c 100000000 /dev/zero; echo; echo last; grep VmHWM /proc/1/status")
    assert result.output_total > 100_000_000
    assert result.output.startswith(b"first\n\0") and b"\0\nlast\n" in result.output
    marker = re.search(rb"\n\[\.\.\. (\d+) bytes elided \.\.\.\]\n", result.output)
    assert int(marker[1]) == result.output_total - 10_000
    assert len(result.output) == 10_000 + len(marker[0])
    peak = re.search(rb"VmHWM:\s+(\d+) kB", result.output)  # which gVisor does not tell
    assert pool.host["mode"] == "gvisor" or int(peak[1]) < 40_000


async def test_cancelled_exec_is_stopped_and_its_answer_not_mistaken(sandbox):
    task = asyncio.create_task(sandbox.exec("echo stale; sleep 986.5"))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await sandbox.exec("echo fresh", timeout_s=5)).text == "fresh\n"
    assert processes("986.5") == []


async def test_execs_of_one_sandbox_run_beside_each_other(sandbox):
    results = await asyncio.gather(*(sandbox.exec(f"echo {i}; sleep 0.5; echo {i}") for i in range(5)))
    assert [result.text for result in results] == [f"{i}\n{i}\n" for i in range(5)]
    assert sum(result.seconds for result in results) > 2.4 and max(result.seconds for result in results) < 2.0


async def test_a_deadline_spares_other_commands(sandbox):
    """And what belongs to them; what belongs to none goes with it."""
    await sandbox.exec("setsid sleep 985.1 &")  # nobody's
    server = await sandbox.start("sleep 985.2 & sleep 985.3", follow=False)
    other = asyncio.create_task(sandbox.exec("sleep 1.2; echo done"))
    result = await sandbox.exec("setsid sleep 985.4 & (sleep 985.5 &); sleep 985.6", timeout_s=0.5)
    assert result.timed_out and not result.silent
    running = (await sandbox.exec("ps ax")).text
    assert [n for n in range(1, 7) if f"sleep 985.{n}" in running] == [2, 3]
    assert (await other).text == "done\n"
    assert (await server.kill()).exit_code == -9
    assert processes("985.") == []


async def test_a_deadline_for_output_is_another(sandbox):
    result = await sandbox.exec("for i in 1 2 3; do echo $i; sleep 0.3; done; sleep 30", timeout_s=20, silent_s=1.0)
    assert (result.text, result.timed_out, result.silent) == ("1\n2\n3\n", True, True)
    assert 1.5 < result.seconds < 5
    assert not (await sandbox.exec("sleep 0.3", silent_s=5)).timed_out


async def test_a_command_has_its_own_directory(sandbox):
    await sandbox.exec("mkdir -p 'a b/c'")
    assert (await sandbox.exec("pwd; echo $#", cwd="a b/c")).text == "/workspace/a b/c\n0\n"
    assert (await sandbox.exec("pwd", cwd="/tmp")).text == "/tmp\n"
    with pytest.raises(FileNotFoundError):
        await sandbox.exec("true", cwd="none")
    await sandbox.write("file", b"")
    with pytest.raises(NotADirectoryError):
        await sandbox.exec("true", cwd="file")


async def test_what_is_no_text_harms_nothing(sandbox):
    """A model may write half of a character into anything."""
    half = "\ud800"
    for call in (
        lambda: sandbox.read(half),
        lambda: sandbox.write(half, b""),
        lambda: sandbox.stat(half),
        lambda: sandbox.list(half),
        lambda: sandbox.exec("true", cwd=half),
        lambda: sandbox.exec("true", user_env={"A": half}),
        lambda: anext(sandbox.watch(half)),
    ):
        with pytest.raises(OSError) as error:
            await call()
        assert error.value.errno == errno.EINVAL
    assert (await sandbox.exec(f"echo {half}x")).output == b"\xed\xa0\x80x\n"


async def test_what_runs_already_cannot_write_the_next_command(sandbox):
    """Nor empty it: a shell that waits for its script is there only while nothing is that could."""
    meddler = r"""
import os, time
until = time.time() + 3
while time.time() < until:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for flags in (os.O_WRONLY | os.O_NONBLOCK, os.O_RDONLY | os.O_NONBLOCK):
            try:
                if int(pid) != os.getpid() and "pipe" in os.readlink(f"/proc/{pid}/fd/3"):
                    fd = os.open(f"/proc/{pid}/fd/3", flags)
                    os.write(fd, b"echo forged\n") if flags & os.O_WRONLY else os.read(fd, 100)
            except OSError: pass
"""
    await sandbox.write("meddler.py", meddler.encode())
    await sandbox.exec("true")
    await sandbox.exec("python3 -I -S meddler.py &")
    for i in range(30):
        assert (await sandbox.exec(f"echo true {i}")).text == f"true {i}\n"
        await asyncio.sleep(0.05)


async def test_bad_arguments_are_refused(sandbox):
    with pytest.raises(ConfigError, match="timeout_s"):
        await sandbox.exec("true", timeout_s=0)
    with pytest.raises(ConfigError, match="user_env"):
        await sandbox.exec("true", user_env={"A=B": "c"})
    with pytest.raises(ConfigError, match="letters, digits"):
        await sandbox.exec("true", user_env={"BASH_FUNC_ls%%": "() { :; }"})
    with pytest.raises(ConfigError, match="silent_s"):
        await sandbox.exec("true", silent_s=0)
    with pytest.raises(ConfigError, match="has one user, 'sandbox'"):
        await sandbox.exec("true", user="root")
    with pytest.raises(ConfigError, match="cwd"):
        await sandbox.start("true", cwd="")
    with pytest.raises(ConfigError, match="rows=0"):
        await sandbox.start("true", pty=(0, 80))

"""Conformance: commands that are started, followed, fed, signalled and found again; and watched files."""

import asyncio
import errno
import hashlib
import re
import signal
import time

import pytest

from venusrl.core.errors import ConfigError, SandboxLost
from venusrl.sandbox import Template

from .conftest import on_linux


async def collect(process):
    """All output by stream, and the end."""
    streams: dict[str, bytes] = {}
    async for output in process:
        streams[output.stream] = streams.get(output.stream, b"") + output.data
    return streams, await process.wait()


async def test_streams_come_apart_while_it_runs(sandbox):
    process = await sandbox.start("echo one; echo two >&2; sleep 30")
    seen = {}
    async for output in process:
        seen[output.stream] = output.data
        if len(seen) == 2:
            break
    assert seen == {"stdout": b"one\n", "stderr": b"two\n"} and process.result is None
    result = await process.kill()
    assert (result.exit_code, result.timed_out, result.silent) == (-9, True, False)


async def test_all_bytes_come_in_order(sandbox):
    script = "head -c 5000000 /dev/urandom > f; cat f; exit 3"
    streams, result = await collect(await sandbox.start(script))
    assert streams["stdout"] == await sandbox.read("f")
    assert (result.exit_code, result.output_total) == (3, 5_000_000)
    assert b"bytes elided" in result.output


async def test_one_that_is_not_taken_waits_and_goes_on(sandbox):
    process = await sandbox.start("for i in $(seq 300); do head -c 16384 /dev/zero; echo $i >> at; done")
    done, before = 0, -1
    while done != before:
        await asyncio.sleep(0.5)
        done, before = len((await sandbox.read("at")).split()), done
    assert 64 <= done < 100  # 1 MiB on its way, a pipe full, and no more
    streams, result = await collect(process)
    assert len(streams["stdout"]) == 300 * 16384 and result.exit_code == 0


async def test_waiting_without_reading_does_not_stop_it(sandbox):
    process = await sandbox.start("head -c 5000000 /dev/zero; echo end")
    result = await asyncio.wait_for(process.wait(), 20)
    assert result.output_total == 5_000_004 and result.output.endswith(b"end\n")
    assert result == process.result


async def test_waiting_after_reading_a_part_does_not_stop_it(sandbox):
    process = await sandbox.start("echo ready; head -c 5000000 /dev/zero; exit 3")
    async for output in process:
        if b"ready" in output.data:
            break
    assert (await asyncio.wait_for(process.wait(), 10)).exit_code == 3
    other = await sandbox.start("echo ready; sleep 0.3; head -c 5000000 /dev/zero; exit 4")
    waiting = asyncio.create_task(other.wait())  # while another reads, and then stops
    async for _ in other:
        await asyncio.sleep(0.1)
        break
    assert (await asyncio.wait_for(waiting, 10)).exit_code == 4


async def test_input_comes_as_it_is_sent(sandbox):
    process = await sandbox.start("while read line; do echo got $line; done; echo end", stdin=None)
    outputs = aiter(process)
    for word in (b"one", b"two"):
        await process.send(word + b"\n")
        assert (await anext(outputs)).data == b"got " + word + b"\n"
    await process.close_stdin()
    assert (await anext(outputs)).data == b"end\n"
    assert (await process.wait()).exit_code == 0
    with pytest.raises(ProcessLookupError):
        await process.send(b"late")


async def test_much_input_waits_for_its_reader(sandbox):
    data = bytes(range(256)) * 4096
    process = await sandbox.start("sleep 0.3; sha1sum; cat > /dev/null", stdin=None)
    sending = asyncio.create_task(process.send(data))
    await asyncio.sleep(0.1)
    assert not sending.done()
    await sending
    await process.close_stdin()
    assert (await process.wait()).text.split()[0] == hashlib.sha1(data).hexdigest()


async def test_input_that_nobody_reads_any_more(sandbox):
    process = await sandbox.start("exec 0<&-; sleep 1", stdin=None)
    await asyncio.sleep(0.3)
    with pytest.raises(OSError) as error:
        await process.send(b"x" * 200_000)
    assert error.value.errno in (errno.EPIPE, errno.ESRCH)


async def test_a_terminal(sandbox):
    process = await sandbox.start("tty; stty size; read line; echo got $line; read line; stty size; cat", pty=(24, 81))
    output = b""

    async def until(text):
        nonlocal output
        async for part in process:
            output += part.data
            assert part.stream == "pty"
            if text in output:
                return
        pytest.fail(f"{output} has no {text}")

    await until(b"24 81\r\n")
    assert re.match(rb"/dev/pts/\d+\r\n", output)
    await process.send(b"hello\n")
    await until(b"got hello\r\n")
    await process.resize(50, 132)
    await process.send(b"\n")
    await until(b"50 132\r\n")
    await process.send(b"there\n")
    await until(b"there\r\nthere\r\n")  # the terminal's echo, and cat's: it runs
    await process.send(b"\x03")  # Ctrl-C: cat ends, and so does the shell
    assert (await process.wait()).exit_code in (-signal.SIGINT, 130)
    plain = await sandbox.start("sleep 5")
    with pytest.raises(OSError) as error:
        await plain.resize(1, 1)
    assert error.value.errno == errno.ENOTTY


async def test_end_of_input_on_a_terminal(sandbox):
    process = await sandbox.start("cat; echo end", pty=(24, 80))
    await process.send(b"x\n")
    await process.close_stdin()
    streams, result = await collect(process)
    assert streams["pty"].endswith(b"end\r\n") and result.exit_code == 0


async def test_signals_reach_the_group(sandbox):
    process = await sandbox.start("trap 'echo caught; exit 4' USR1; while :; do sleep 0.1; done")
    await asyncio.sleep(0.3)
    await process.signal(signal.SIGUSR1)
    streams, result = await collect(process)
    assert (streams["stdout"], result.exit_code) == (b"caught\n", 4)
    other = await sandbox.start("sleep 977.1; echo not reached")
    await asyncio.sleep(0.2)
    await other.signal(signal.SIGTERM)
    assert (await other.wait()).exit_code == -signal.SIGTERM
    with pytest.raises(ConfigError, match="signal number=0"):
        await other.signal(0)


async def test_they_are_listed_until_they_end_and_their_end_is_kept(sandbox):
    process = await sandbox.start("sleep 1.5; echo over; exit 6", follow=False)
    await asyncio.sleep(0.5)
    [listed] = await sandbox.processes()
    assert listed.id == process.id and listed.pid == process.pid and listed.script.startswith("sleep 1.5")
    assert 0.4 < listed.seconds < 3
    again = await sandbox.connect(process.id)
    streams, result = await collect(again)
    assert (streams, result.exit_code) == ({"stdout": b"over\n"}, 6)
    assert await process.wait() == result
    assert await sandbox.processes() == []
    streams, late = await collect(await sandbox.connect(process.id))
    assert (streams, late) == ({"kept": b"over\n"}, result)
    with pytest.raises(ProcessLookupError):
        await sandbox.connect(12345)


async def test_one_who_connects_misses_nothing_and_gets_nothing_twice(sandbox):
    process = await sandbox.start("for i in $(seq 1000 1999); do echo $i; done; echo end", follow=False)
    for _ in range(5):
        again = await sandbox.connect(process.id)
    streams, _ = await collect(again)
    seen = b"".join(streams[name] for name in ("kept", "stdout") if name in streams)
    assert seen == b"".join(b"%d\n" % i for i in range(1000, 2000)) + b"end\n"


async def test_an_exec_is_its_callers(sandbox):
    call = asyncio.create_task(sandbox.exec("sleep 0.5; echo mine"))
    await asyncio.sleep(0.2)
    [listed] = await sandbox.processes()
    with pytest.raises(ProcessLookupError):
        await sandbox.connect(listed.id)
    assert (await call).text == "mine\n"


async def test_one_who_connects_takes_over(sandbox):
    first = await sandbox.start("echo early; read x; echo late", stdin=None)
    assert (await anext(aiter(first))).data == b"early\n"
    second = await sandbox.connect(first.id)
    await second.send(b"\n")
    assert (await collect(second))[0] == {"kept": b"early\n", "stdout": b"late\n"}
    assert (await collect(first))[0] == {}


async def test_started_ones_have_deadlines_too(sandbox):
    quick = await sandbox.start("sleep 30", timeout_s=0.3)
    assert (await quick.wait()).timed_out and not (await quick.wait()).silent
    quiet = await sandbox.start("echo x; sleep 30", silent_s=0.3)
    assert (await quiet.wait()).silent


async def test_a_follower_that_is_slow_is_no_silence(sandbox):
    process = await sandbox.start("head -c 3000000 /dev/zero; echo end", silent_s=0.5)
    await asyncio.sleep(1.5)
    streams, result = await collect(process)
    assert len(streams["stdout"]) == 3_000_004 and not result.timed_out


async def test_pause_holds_a_started_one(sandbox):
    process = await sandbox.start("sleep 0.3; echo x", timeout_s=1.0)
    await sandbox.pause()
    await asyncio.sleep(1.2)
    assert process.result is None
    await sandbox.resume()
    result = await process.wait()
    assert (result.exit_code, result.timed_out) == (0, False) and result.seconds < 1


async def test_the_end_of_the_sandbox_ends_them(sandbox):
    process = await sandbox.start("sleep 976.1")
    waiting = asyncio.create_task(process.wait())
    reading = asyncio.create_task(collect(process))
    await asyncio.sleep(0.1)
    await sandbox.kill()
    for task in (waiting, reading):
        with pytest.raises(SandboxLost, match="reason: killed"):
            await asyncio.wait_for(task, 2)
    with pytest.raises(SandboxLost):
        await process.signal(15)


async def test_a_started_one_may_leave_processes_behind(sandbox):
    started = time.monotonic()
    process = await sandbox.start("sleep 975.1 & echo hi")
    streams, result = await collect(process)
    assert (streams["stdout"], result.exit_code) == (b"hi\n", 0) and time.monotonic() - started < 5
    assert "sleep 975.1" in (await sandbox.exec("ps ax")).text


async def test_watched_files_tell_their_changes(sandbox):
    await sandbox.write("d/there", b"x")
    watched = sandbox.watch("d")
    first = asyncio.create_task(anext(watched))
    await asyncio.sleep(0.1)
    await sandbox.exec(r"cd d; echo > new; rm there; mv new moved; chmod 600 moved; mkdir $'\xff'")
    seen = [await first] + [await asyncio.wait_for(anext(watched), 5) for _ in range(6)]
    kinds = [(change.kind, change.name) for change in seen]
    assert kinds == [
        ("create", "new"), ("write", "new"), ("remove", "there"), ("move_from", "new"), ("move_to", "moved"),
        ("chmod", "moved"), ("create", "\udcff"),
    ]  # fmt: skip
    gone = asyncio.create_task(anext(watched))
    await sandbox.exec("rm -r d")
    assert (await asyncio.wait_for(gone, 5)).kind == "remove"
    await watched.aclose()
    with pytest.raises(FileNotFoundError):
        await anext(sandbox.watch("none"))


@on_linux
async def test_terminals_of_one_sandbox_do_not_use_up_anothers(pool):
    greedy, other = await pool.create(Template("greedy")), await pool.create(Template("other"))
    script = (
        'import os\nn=0\ntry:\n  while n < 500: os.open("/dev/ptmx", os.O_RDWR); n += 1\nexcept OSError: pass\nprint(n)'
    )
    assert int((await greedy.exec(f"python3 -I -S -c '{script}'")).text) <= 64
    assert (await (await other.start("tty", pty=(24, 80))).wait()).text.startswith("/dev/pts/")


async def test_many_at_once(pool):
    sandbox = await pool.create(Template("many", pids=200))
    processes = [await sandbox.start(f"sleep 0.0{i % 7}; echo {i}; exit {i}") for i in range(40)]
    ends = await asyncio.gather(*(collect(process) for process in processes))
    assert [(streams["stdout"], result.exit_code) for streams, result in ends] == [(b"%d\n" % i, i) for i in range(40)]

"""The agent's program and the Python agent: any bytes and any text pass through both as they are."""

import errno
import logging
import os
import random
import shutil
from datetime import UTC, datetime

import pytest

from venusrl.core.errors import SandboxUnsupported
from venusrl.sandbox import SandboxPool, Template, programs

_LETTERS = "aZ0 \"'\\/\b\t\x7fäé€\u2028\uffff𝄞🂡\ufeff"


def text(rng, most, letters=_LETTERS):
    return "".join(rng.choice(letters) for _ in range(rng.randrange(1, most)))


def name(rng):
    """Of a file: any bytes but two, as Python has them."""
    raw = bytes(rng.choice([b for b in range(1, 256) if b != ord("/")]) for _ in range(rng.randrange(1, 60)))
    return "n" + os.fsdecode(raw)


async def test_file_names_are_any_bytes(sandbox):
    rng = random.Random(1)
    names = sorted({name(rng) for _ in range(100)})
    for one in names:
        await sandbox.write(f"all/{one}", one.encode("utf-8", "surrogateescape"))
    assert [entry.name for entry in await sandbox.list("all")] == sorted(names, key=os.fsencode)
    for one in names:
        assert await sandbox.read(f"all/{one}") == os.fsencode(one)
        assert (await sandbox.stat(f"all/{one}")).name == one


async def test_variables_scripts_and_input_are_any_text(sandbox):
    rng = random.Random(2)
    for _ in range(30):
        value, word = text(rng, 200), text(rng, 200)
        quoted = "'" + word.replace("'", "'\\''") + "'"
        result = await sandbox.exec(
            f'printf %s "$V" {quoted}; cat', user_env={"V": value}, stdin=(word + value).encode()
        )
        assert result.output.decode() == value + word + word + value


async def test_words_of_a_program_that_runs_are_shown_as_they_are(sandbox):
    process = await sandbox.start(b'sleep 50 # \xff \xc3\xa4 " \\', follow=False)
    [row] = await sandbox.processes()
    assert row.script.startswith("sleep 50 # ") and row.script.endswith('ä " \\')
    await process.kill()


async def test_modification_times_are_exact(sandbox):
    await sandbox.exec("touch -d '2031-05-06 07:08:09.123456789 UTC' f")
    seconds = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC).timestamp()
    assert (await sandbox.stat("f")).modified == seconds + 0.123456789


async def test_a_name_that_is_too_long(sandbox):
    with pytest.raises(OSError) as error:
        await sandbox.exec("true", cwd="n" * 300)
    assert error.value.errno == errno.ENAMETOOLONG


# How the program comes to be


def test_it_is_compiled_once(tmp_path):
    program, why = programs.agent_program(tmp_path / "new")
    assert why == "" and os.access(program, os.X_OK) and programs.agent_key() in program
    made = os.stat(program).st_mtime_ns
    assert programs.agent_program(tmp_path / "new") == (program, "") and os.stat(program).st_mtime_ns == made
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_one_that_another_could_have_put_there_is_not_run(tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / f"agent-{programs.agent_key()}").write_text("#!/bin/sh\n")
    program, why = programs.agent_program(tmp_path)
    assert program is None and "chmod go-w" in why


def test_a_compiler_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", str(shutil.which("false")))
    program, why = programs.agent_program(tmp_path)
    assert program is None and "false failed" in why
    assert list(tmp_path.iterdir()) == []


async def test_without_a_compiler_the_agent_is_the_python_one(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(programs, "find_compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        async with SandboxPool(max_sandboxes=1) as pool:
            assert pool.host["agent"] == "python"
            assert (await (await pool.create(Template("plain"))).exec("echo yes")).text == "yes\n"
    assert "install gcc" in caplog.text
    with pytest.raises(SandboxUnsupported, match="install gcc"):
        async with SandboxPool(max_sandboxes=1, agent="native"):
            pass

"""Conformance: file calls and the file system."""

import dataclasses
import errno
import time

import pytest

from venusrl.core.errors import ConfigError
from venusrl.sandbox import FileInfo, Template

ODD = b"a\0b\r\nc\n\xff" * 3


async def test_bytes_are_exact(sandbox):
    big = bytes(range(256)) * 40_000  # more than two chunks
    for path, data in (("x/y/odd", ODD), ("/tmp/empty", b""), ("big", big)):
        await sandbox.write(path, data)
        assert await sandbox.read(path) == data
    assert (await sandbox.exec("stat -c %s:%a:%U /workspace/big")).text == f"{len(big)}:644:sandbox\n"


async def test_what_comes_in_parts_is_read_whole(sandbox):
    """A read of /proc gives a page or so at a time, and the size of such a file is 0."""
    counted = await sandbox.exec("wc -c < /proc/kallsyms")
    if counted.exit_code:
        pytest.skip("no /proc/kallsyms here")
    assert int(counted.text) > 100_000
    assert len(await sandbox.read("/proc/kallsyms")) == int(counted.text)


async def test_write_replaces_and_sets_mode(sandbox):
    await sandbox.write("f", b"long long content")
    await sandbox.write("f", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert (await sandbox.exec("./f")).text == "ran\n"


async def test_template_files(pool):
    sandbox = await pool.create(Template("files", files={"d/a.bin": ODD, "b": b""}))
    assert await sandbox.read("/workspace/d/a.bin") == ODD
    assert (await sandbox.exec("find . -type f | sort")).text == "./b\n./d/a.bin\n"


async def test_list(sandbox):
    await sandbox.exec(r"mkdir d; cd d; echo 123 > f; chmod 640 f; ln -s f l; mkfifo p; mkdir s; touch $'\xff'")
    found = {info.name: info for info in await sandbox.list("d")}
    assert dataclasses.replace(found["f"], modified=0.0) == FileInfo("f", "file", 4, 0o640)
    assert found["f"] == await sandbox.stat("d/f") and abs(found["f"].modified - time.time()) < 60
    assert (await sandbox.stat("d/l")).type == "link" and (await sandbox.stat("/")).name == "/"
    with pytest.raises(FileNotFoundError):
        await sandbox.stat("d/none")
    assert [found[name].type for name in "lps"] == ["link", "other", "dir"]
    assert "\udcff" in found


async def test_a_list_that_is_too_long_is_refused(sandbox):
    """Undecodable names take six characters a byte: 11,000 of the longest are more than a frame may have.

    So are 22,000 in Cyrillic, where text is escaped, as between a daemon and its clients.
    """
    for count, letters in ((11_000, r"b'\xff' * 250"), (22_000, "('\u044f' * 125).encode()")):
        made = await sandbox.exec(
            f"""rm -rf d; mkdir d; python3 -I -S -c "for i in range({count}): open(b'd/%05d' % i + {letters}, 'w')" """,
            timeout_s=120,
        )
        assert made.exit_code == 0, made.text
        try:
            assert len(await sandbox.list("d")) == count and letters != r"b'\xff' * 250"
        except OSError as error:
            assert error.errno == errno.EFBIG
        assert (await sandbox.exec("ls -f d | wc -l")).text == f"{count + 2}\n"


async def test_errors_carry_the_errno(sandbox):
    await sandbox.exec("mkdir d; mkfifo p; echo 12345 > five")
    for path, kind in (("none", FileNotFoundError), ("d", IsADirectoryError), ("five/x", NotADirectoryError)):
        with pytest.raises(kind):
            await sandbox.read(path)
    for path in ("five/x", "five/x/y"):
        with pytest.raises(NotADirectoryError):
            await sandbox.write(path, b"")
    with pytest.raises(FileNotFoundError):
        await sandbox.list("none")
    with pytest.raises(OSError, match="p") as fifo:
        await sandbox.read("p")
    assert fifo.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="File too large"):
        await sandbox.read("five", max_bytes=5)
    with pytest.raises(OSError, match="max_bytes=5"):
        await sandbox.read("/proc/meminfo", max_bytes=5)
    for path in ("/etc/passwd", "/usr/bin/x", "/new"):
        with pytest.raises(OSError) as refused:
            await sandbox.write(path, b"x")
        assert refused.value.errno in (errno.EACCES, errno.EROFS)


async def test_links_stay_inside(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("host")
    await sandbox.exec(f"ln -s {secret} out; ln -s ../../../../../../../{secret} up; ln -s /etc/passwd pw")
    for path in ("out", "up", str(secret), f"../../..{secret}", f"/proc/1/root{secret}"):
        with pytest.raises(OSError):
            await sandbox.read(path)
    with pytest.raises(OSError):
        await sandbox.write("out", b"overwritten")
    assert secret.read_text() == "host"
    assert b"/workspace:/bin/bash" in await sandbox.read("pw")  # the sandbox's own passwd


async def test_full_disk_is_enospc(pool):
    sandbox = await pool.create(Template("disk", disk_bytes=8 << 20))
    result = await sandbox.exec("head -c 20000000 /dev/zero > fill")
    assert result.exit_code != 0 and "No space left" in result.text and not result.oom
    with pytest.raises(OSError) as full:
        await sandbox.write("more" if pool.host["mode"] == "gvisor" else "/tmp/more", b"x" * 100_000)
    assert full.value.errno == errno.ENOSPC
    assert (await sandbox.exec("rm fill; echo ok > /dev/shm/f; cat /dev/shm/f")).text == "ok\n"


async def test_file_size_limit(pool):
    sandbox = await pool.create(Template("size", file_bytes=1 << 20))
    await sandbox.exec("head -c 3000000 /dev/zero > big")
    assert (await sandbox.exec("stat -c %s big")).text == f"{1 << 20}\n"
    with pytest.raises(OSError) as large:
        await sandbox.write("big", bytes((1 << 20) + 1))
    assert large.value.errno == errno.EFBIG


async def test_sandboxes_do_not_see_each_other(pool):
    a, b = await pool.create(Template("a")), await pool.create(Template("b"))
    await a.exec("for d in /workspace /tmp /dev/shm; do echo secret > $d/mark; done; sleep 985.5 &")
    seen = await b.exec("cat /workspace/mark /tmp/mark /dev/shm/mark; ps ax; find / -xdev -name mark 2>/dev/null")
    assert "secret" not in seen.text and "985.5" not in seen.text and seen.text.count("No such file") == 3
    assert (await a.exec("cat /tmp/mark")).text == "secret\n"


@pytest.mark.parametrize("path", ["/abs", "a/../b", "..", "", "dir/", "nul\0"])
def test_template_refuses_paths(path):
    with pytest.raises(ConfigError, match="files"):
        Template("bad", files={path: b""})


@pytest.mark.parametrize(
    "change", [{"memory_bytes": 1}, {"pids": 0}, {"disk_bytes": 1 << 40}, {"ttl_s": 0}, {"output_bytes": 1.5}]
)
def test_template_refuses_limits(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        Template("bad", **change)

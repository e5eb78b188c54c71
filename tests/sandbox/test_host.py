"""The parts that depend on the host: the report, the path without root, cgroup files, and what the spawner imports."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from venusrl.core.errors import ConfigError
from venusrl.sandbox import SandboxPool, host_report
from venusrl.sandbox.agent.output import Capture
from venusrl.sandbox.spawner.budgets import open_files
from venusrl.sandbox.spawner.limits import Hierarchy, read_oom_kills

from .conftest import needs_root

ROOT = Path(__file__).resolve().parents[2]


def test_host_report_finds_a_working_backend():
    report = host_report()
    assert report["ok"], report
    assert report["no_new_privs"] and report["no_capabilities"]
    assert report["python"] == "{}.{}".format(*sys.version_info)
    assert report["mode"] == ("range" if os.geteuid() == 0 else "single")


# Makes the interpreter and the repository reachable (they may lie below /root), becomes nobody, uses the backend.
NOBODY = """
import asyncio, ctypes, json, os, sys, tempfile
root, prefix = sys.argv[1], sys.base_prefix
libc = ctypes.CDLL(None, use_errno=True)
def mount(*a):
    if libc.mount(*a) != 0: raise OSError(ctypes.get_errno(), str(a))
if libc.unshare(0x20000) != 0: raise OSError(ctypes.get_errno(), "unshare")
kept = [(path, os.open(path, os.O_PATH)) for path in (prefix, root)]
mount(b"none", b"/", None, (1 << 18) | 16384, None)
for top in {"/" + path.split("/")[1] for path, _ in kept} - {"/usr"}:
    mount(b"none", top.encode(), b"tmpfs", 0, b"mode=755")
for path, fd in kept:
    os.makedirs(path, exist_ok=True)
    mount(b"/proc/self/fd/%d" % fd, path.encode(), None, 4096 | 16384, None)
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
libc.prctl(4, 1, 0, 0, 0)
sys.executable = os.path.realpath(sys.executable)
sys.path.insert(0, root)
from venusrl.sandbox import SandboxPool, Template
async def main():
    out = {}
    async with SandboxPool(max_sandboxes=4, templates=tempfile.mkdtemp()) as pool:
        out["host"] = pool.host
        template = Template("built", setup=("echo built > f; mkdir d",))
        a, b = await pool.create(template), await pool.create(template)
        out["built"] = (await a.exec("echo more >> f; touch d/g; cat f; ls d; stat -c %U f")).text.split()
        out["again"] = (await b.exec("cat f; ls d")).text.split()
        box = await pool.create(Template("t", files={"f": b"hello"}, pids=16, memory_bytes=128 << 20))
        out["id"] = (await box.exec("id -u; cat f; touch /etc/x /usr/x; grep CapEff /proc/self/status")).text
        out["python"] = (await box.exec("python3 -I -S -c 'print(6*7)'")).text
        bomb = "import os,time\\nn=0\\ntry:\\n  while True:\\n    if os.fork()==0: time.sleep(60)\\n    n+=1\\n"
        bomb += "except OSError: print(n)"
        out["bomb"] = (await box.exec(f"python3 -I -S -c '{bomb}'")).text
        filters = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.prctl(38, 1, 0, 0, 0);"
        filters += "print(libc.prctl(22, 2, 0, 0, 0), ctypes.get_errno())"
        many = await pool.create(Template("t", pids=2000))
        script = "cat /proc/sys/user/max_inotify_instances; ulimit -q; ulimit -Hn; python3 -I -S -c "
        out["budgets"] = (await many.exec(f"{script}'{filters}'")).text.split()
        out["timeout"] = (await box.exec("sleep 975.5", timeout_s=0.3)).timed_out
        out["hog"] = (await box.exec("python3 -I -S -c 'x = bytearray(300 << 20)'")).text[-12:]
        out["shadow"] = (await box.exec("cat /etc/shadow; kill -9 1; echo up")).text
    print(json.dumps(out))
asyncio.run(main())
"""


@needs_root
def test_without_root():
    python = os.path.realpath(sys.executable)
    done = subprocess.run([python, "-c", NOBODY, str(ROOT)], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["host"]["mode"] == "single"
    assert out["id"].startswith("1000\nhello") and out["id"].count("touch: cannot touch") == 2
    assert "CapEff:\t0000000000000000" in out["id"]
    assert out["python"] == "42\n"
    assert (out["built"], out["again"]) == (["built", "more", "g", "sandbox"], ["built"])
    assert 5 <= int(out["bomb"]) <= 16
    assert out["timeout"] is True
    instances, queued_bytes, files, *filtered = out["budgets"]
    assert int(instances) <= 64 and queued_bytes == "0" and filtered == ["-1", "22"]
    assert int(files) == open_files(2008, int(Path("/proc/sys/fs/file-max").read_text()))
    if not out["host"]["cgroups"]["memory"]:
        assert "MemoryError" in out["hog"]
    assert "No such file" in out["shadow"] and out["shadow"].endswith("up\n")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
@pytest.mark.parametrize("allowed", [0, 100])
def test_nested_in_a_user_namespace(allowed):
    """Like root in a container: its users are few. With user namespaces off, the report says what to set."""
    script = "import json, sys; sys.path.insert(0, sys.argv[1]); from venusrl.sandbox import host_report; "
    script += "print(json.dumps(host_report()))"
    shell = f'echo {allowed} > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "bash",
        "-c",
        shell,
        "-",
        sys.executable,
        "-c",
        script,
        str(ROOT),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout)
    if allowed:
        assert report["ok"] and report["mode"] == "single" and report["no_capabilities"], report
    else:
        assert not report["ok"] and "user.max_user_namespaces" in report["problem"]


def test_spawner_stays_small():
    script = "import sys; sys.path.insert(0, sys.argv[1]); import venusrl.sandbox.spawner.spawner; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script, str(ROOT)], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "venusrl.sandbox.agent.agent" in loaded
    assert not loaded & {"asyncio", "dataclasses", "subprocess", "threading", "typing", "numpy", "jax"}


def test_cgroup_files():
    v1 = Hierarchy("/d", 1, ("memory",)).limits(1 << 20, 5)
    assert v1 == [
        ("memory.limit_in_bytes", "1048576"),
        ("memory.memsw.limit_in_bytes", "1048576"),
        ("memory.kmem.tcp.limit_in_bytes", "131072"),
    ]
    v2 = Hierarchy("/d", 2, ("memory", "pids")).limits(1 << 20, 5)
    assert v2 == [("memory.max", "1048576"), ("memory.swap.max", "0"), ("pids.max", "13")]


def test_oom_counter(tmp_path):
    v1, v2 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "low 0\noom 9\noom_kill 2\n"
    for text, count in ((v1, 3), (v2, 2), ("", 0)):
        (tmp_path / "events").write_text(text)
        fd = os.open(tmp_path / "events", os.O_RDONLY)
        assert read_oom_kills(fd) == count
        os.close(fd)
    assert read_oom_kills(None) == 0


@pytest.mark.parametrize("sizes", [[1] * 100, [1000], [3, 500, 2], [70_000] * 5, [99, 1], []])
def test_capture_agrees_with_the_plain_form(sizes):
    capture, whole = Capture(100), b""
    for index, size in enumerate(sizes):
        part = bytes([index % 251]) * size
        capture.add(part)
        whole += part
    expected = whole
    if len(whole) > 100:
        expected = whole[:50] + b"\n[... %d bytes elided ...]\n" % (len(whole) - 100) + whole[-50:]
    assert capture.result() == expected and capture.total == len(whole)


def test_pool_arguments():
    with pytest.raises(ConfigError, match="max_sandboxes"):
        SandboxPool(max_sandboxes=0)

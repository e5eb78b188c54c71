"""Conformance: what a sandbox cannot see, reach or use up."""

import asyncio
import os
import platform
import re
import socket
import time

import pytest

from venusrl.core.errors import SandboxLost
from venusrl.sandbox import Template

from .conftest import in_process, on_linux


@on_linux
async def test_not_root_and_no_privileges(sandbox):
    result = await sandbox.exec("id -u; id -g; id -G; cat /proc/self/status")
    assert result.text.split()[:3] == ["1000", "1000", "1000"]
    status = dict(re.findall(r"^(\w+):\s*(.*)$", result.text, re.M))
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0
    assert status["NoNewPrivs"] == "1"
    if platform.machine() in ("x86_64", "aarch64"):
        assert status["Seccomp"] == "2"


async def test_host_files_are_not_there(pool, sandbox, tmp_path):
    (tmp_path / "mark").write_text("host")
    third = "/proc/1/mem" if pool.host["mode"] == "gvisor" else "/proc/1/environ"  # there it has what it was given
    result = await sandbox.exec(
        f"cat /etc/shadow {tmp_path}/mark {third}; ls -A /home /root /sys /var /run /mnt; ls /proc/1/root"
    )
    lines = [line for line in result.text.splitlines() if not line.startswith(("cat:", "ls:"))]
    # The interpreter's old place, a link to /opt/python, is all that may exist of /root or /home.
    assert set(lines) <= {"/var:", "tmp", "", "/root:", ".pyenv", "/home:", "/run:", "disk", "/sys:"}
    assert result.text.count("cat:") == 3
    assert "root" not in (await sandbox.exec("ls -A /root/.ssh /root/.bashrc /root/.cache 2>/dev/null")).text


async def test_system_is_read_only(sandbox):
    paths = "/x /etc/x /usr/x /usr/bin/x /dev/x /opt/x /proc/sys/kernel/hostname"
    script = f"for f in {paths}; do echo 1 > $f; done; rm -f /etc/passwd"
    result = await sandbox.exec(script)
    assert result.text.count("Read-only file system") + result.text.count("Permission denied") == 8


async def test_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0venus-test-{os.getpid()}")
        abstract.listen()
        script = f"""
import socket
def attempt(family, address):
    try:
        with socket.socket(family) as s:
            s.settimeout(2); s.connect(address)
        print("connected", address)
    except OSError as e:
        print("refused", type(e).__name__)
attempt(socket.AF_INET, ("127.0.0.1", {port}))
attempt(socket.AF_INET, ("169.254.169.254", 80))
attempt(socket.AF_INET, ("1.1.1.1", 53))
attempt(socket.AF_UNIX, "\\0venus-test-{os.getpid()}")
if hasattr(socket, "AF_VSOCK"): attempt(socket.AF_VSOCK, (2, 1024))
try:
    print(socket.getaddrinfo("example.com", 80), "connected")
except OSError as e:
    print("refused", type(e).__name__)
"""
        result = await sandbox.exec(f"python3 -I -S - <<'EOF'\n{script}\nEOF", timeout_s=20)
        abstract.close()
    assert "connected" not in result.text and result.text.count("refused") == 6, result.text


CALLS = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def name(result):
    return "done" if result >= 0 else errno.errorcode[ctypes.get_errno()]
x86 = os.uname().machine == "x86_64"
call = lambda *a: name(libc.syscall(*[ctypes.c_long(x) for x in a]))
print("mount", name(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)))
print("unshare", name(libc.unshare(0x10000000)))
print("clone", call(56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0))
print("ptrace", name(libc.ptrace(0, 0, 0, 0)))
print("bpf", call(321 if x86 else 280, 0, 0, 0))
print("io_uring", call(425, 1, 0))
print("keyctl", call(250 if x86 else 219, 0, -3, 0))
print("userfaultfd", call(323 if x86 else 282, 0))
print("perf", call(298 if x86 else 241, 0, 0, -1, -1, 0))
print("prlimit", call(302 if x86 else 261, 1, 7, 0, 0))
for number in (142, 144, 203, 314) if x86 else (118, 119, 122, 274):
    print(f"sched{number}", call(number, 1, 0, 0))
for which in (0, 1, 2):
    print(f"setpriority{which}", call(141 if x86 else 140, which, 1 if which == 0 else 0, 19))
print("ioprio", call(251 if x86 else 30, 1, 1, 0))
print("open_tree", call(428, -100, 0, 0))
print("clone3", call(435, 0, 0))
print("mknod", name(libc.mknod(b"/tmp/sda", 0o60666, 0x800)))
"""


@on_linux
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no seccomp filter for this machine")
async def test_dangerous_calls_are_denied(sandbox):
    await sandbox.write("calls.py", CALLS.encode())
    result = await sandbox.exec("python3 -I -S calls.py")
    seen = dict(line.split() for line in result.text.splitlines())
    assert seen.pop("clone3") == "ENOSYS"
    assert len(seen) == 20 and set(seen.values()) == {"EPERM"}, result.text


# Prints what of process 1 can be opened, of everything that could read or change it; nothing in it waits.
REACH = """
import ctypes, os
found = []
names = ["mem", "environ", "maps", "auxv", "stack", "syscall", "map_files", "task/1/mem", "root/etc", "cwd/x", "exe"]
for name in names + [f"fd/{i}" for i in range(64)]:
    for how, flags in (("read", os.O_RDONLY), ("write", os.O_WRONLY)):
        try:
            os.close(os.open(f"/proc/1/{name}", flags | os.O_NONBLOCK))
            found.append(f"{how}:{name}")
        except OSError:
            pass
libc = ctypes.CDLL(None, use_errno=True)
class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
here = ctypes.create_string_buffer(8)
with open("/proc/self/maps") as maps:
    there = int(maps.readline().split("-")[0], 16)
mine, other = Vec(ctypes.addressof(here), 8), Vec(there, 8)
for how, call in (("read", libc.process_vm_readv), ("write", libc.process_vm_writev)):
    result = call(1, ctypes.byref(mine), 1, ctypes.byref(other), 1, 0)
    if result >= 0 or ctypes.get_errno() != 1:  # EPERM
        found.append(f"{how}:process_vm:{result}:{ctypes.get_errno()}")
print(*found)
print("tried")
"""


async def test_agent_is_out_of_reach(pool, sandbox):
    signals = "kill -9 1; kill -STOP 1; kill -TERM 1; kill -INT 1; kill -CHLD 1"
    result = await sandbox.exec(f"{signals}; cat /proc/1/maps; ls /proc/1/fd; echo 5 > /proc/1/oom_score_adj")
    # Within gVisor it can be looked at, and no more.
    assert result.text.count("Permission denied") == (1 if pool.host["mode"] == "gvisor" else 3)
    await sandbox.write("reach.py", REACH.encode())
    reached = await sandbox.exec("python3 -I -S reach.py", timeout_s=20)
    assert not reached.timed_out and reached.exit_code == 0, reached.text
    opened = set(reached.text.split("\n", 1)[0].split())
    if pool.host["mode"] == "gvisor":  # it opens the descriptors of any process to all; see docs/sandbox.md
        opened = {name for name in opened if name.startswith("write:") and not name.startswith("write:fd/")}
    assert opened == set() and reached.text.endswith("tried\n"), reached.text
    assert (await sandbox.exec("echo alive", timeout_s=5)).text == "alive\n"


async def test_fork_bomb_is_bounded_and_survived(pool):
    sandbox = await pool.create(Template("bomb", pids=32))
    other = await pool.create(Template("other"))
    bomb = "import os,time\nn=0\ntry:\n  while True:\n    if os.fork()==0: time.sleep(600)\n    n+=1\n"
    bomb += "except OSError as e: print(n, e.errno)"
    result = await sandbox.exec(f"python3 -I -S -c '{bomb}' & wait")
    count, error = map(int, result.text.split())
    assert (error, 20 <= count <= 32) == (11, True)
    assert (await sandbox.exec("echo usable", timeout_s=5)).text == "usable\n"  # with the bomb still there
    assert (await sandbox.exec(":(){ :|:& };: ; sleep 30", timeout_s=1)).timed_out
    assert (await other.exec("echo other", timeout_s=5)).text == "other\n"
    assert (await sandbox.exec("ls -d /proc/[0-9]* | cat")).text.count("/proc/") <= 4


async def test_memory_hog_is_reported_as_oom(pool, needs_memory_cgroup):
    sandbox = await pool.create(Template("hog", memory_bytes=64 << 20, disk_bytes=8 << 20))
    hog = "python3 -I -S -c 'x = bytearray(300 << 20)'"
    result = await sandbox.exec(f"exec {hog}")
    assert (result.exit_code, result.oom) == (-9, True)
    result = await sandbox.exec(f"{hog}; echo code $?")
    assert result.oom and "code 137" in result.text
    after = await sandbox.exec("echo ok")
    assert (after.text, after.oom) == ("ok\n", False)


@in_process
async def test_agent_out_of_memory_is_reported_as_oom(pool, needs_memory_cgroup):
    sandbox = await pool.create(Template("tiny", memory_bytes=24 << 20, disk_bytes=23 << 20))
    with pytest.raises(SandboxLost, match="reason: oom"):
        for name in range(8):  # files are memory: nothing is left to kill but the agent
            await sandbox.write(f"/dev/shm/{name}", bytes(4 << 20))
    assert pool.stats().ended == {"oom": 1}


async def test_open_files_are_limited(sandbox):
    script = "python3 -I -S -c 'import os\ntry:\n  while True: os.dup(0)\nexcept OSError as e: print(e.errno)'"
    assert (await sandbox.exec(script)).text == "24\n"


async def test_hostname_is_nobodys_and_randomness_its_own(pool):
    a, b = await pool.create(Template("a")), await pool.create(Template("b"))
    seen = [(await box.exec("hostname; head -c8 /dev/urandom | od -An -tx1")).text.split("\n") for box in (a, b)]
    assert seen[0][0] == seen[1][0] == "sandbox"  # the same for all, so that what runs does not depend on it
    assert seen[0][1] != seen[1][1]
    assert abs(int((await a.exec("date +%s")).text) - time.time()) < 2


BUSY = "import threading\ndef spin():\n  while True: pass\nfor _ in range(3): threading.Thread(target=spin).start()"
ALLOWED = "cat /proc/[0-9]*/task/*/status | grep -E '^(Name|Cpus_allowed_list)' | cut -f2 | paste - - | sort -u"


@in_process
async def test_who_keeps_a_processor_busy_leaves_one_free(pool):
    """Its processes and threads are confined to the others while it does, its agent is not; and it is let go."""
    count = len(os.sched_getaffinity(0))
    if count < 2 or None in pool.host["cgroups"].values():
        pytest.skip("needs two processors, and cgroups")
    busy, calm = await pool.create(Template("busy")), await pool.create(Template("calm"))
    everywhere = (await calm.exec("grep Cpus_allowed_list /proc/self/status | cut -f2")).text.strip()
    hog = await busy.start(f"exec python3 -I -S -c '{BUSY}'", follow=False)

    async def seen(sandbox):
        lines = (await sandbox.exec(ALLOWED)).text.splitlines()
        return {tuple(line.split("\t")) for line in lines}

    async def until(name, holds):
        for _ in range(100):
            places = {allowed for command, allowed in await seen(busy) if command == name}
            if holds(places):
                return places
            await asyncio.sleep(0.1)
        raise AssertionError(places)

    confined = await until("python3", lambda places: len(places) == 1 and everywhere not in places)
    assert len(_cpus(*confined)) < count and {allowed for _, allowed in await seen(calm)} == {everywhere}
    assert ("agent", everywhere) in await seen(busy)
    await hog.signal(19)  # calm, and not gone
    await until("python3", lambda places: places == {everywhere})
    await hog.signal(18)
    await until("python3", lambda places: everywhere not in places)


def _cpus(text: str) -> set[int]:
    """Of a list such as 0-2,5."""
    parts = [part.partition("-") for part in text.split(",")]
    return {cpu for low, _, high in parts for cpu in range(int(low), int(high or low) + 1)}

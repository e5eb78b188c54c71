"""Fixtures of the sandbox tests: one pool and sandbox a test, in this process and in a daemon."""

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from venusrl.core.errors import SandboxUnsupported
from venusrl.sandbox import SandboxPool, Template
from venusrl.sandbox.daemon.client import Node
from venusrl.sandbox.machines.pool import BACKENDS, MachinePool
from venusrl.sandbox.programs import find_criu

ROOT = Path(__file__).resolve().parents[2]


def start_daemon(*flags: str, before: str = "") -> tuple[subprocess.Popen, str]:
    """A daemon that answers, and its address. `before` is code that it runs first."""
    command = [
        sys.executable,
        "-c",
        f"{before}\nfrom absl import app\nfrom launchers import sandboxd\napp.run(sandboxd.main)",
    ]
    given = {flag.partition("=")[0] for flag in flags}
    command += ["--port=0"] if "--socket" not in given else []
    command += ["--no_key"] if not given & {"--socket", "--key_file"} else []
    command += flags
    daemon = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return daemon, daemon.stdout.readline().split()[-1]


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def end(daemon: subprocess.Popen) -> int:
    """Asks it to end, and its exit status."""
    daemon.terminate()
    try:
        return daemon.wait(20)
    finally:
        daemon.kill()
        daemon.stdout.close()


def processes(marker: str) -> list[int]:
    """Pids on this host whose command line contains `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if marker.encode() in line:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="session")
def daemon_address():
    daemon, address = start_daemon("--max_sandboxes=20", "--wait_s=10")
    yield address
    assert end(daemon) == 0


@pytest.fixture(scope="session")
def machines(tmp_path_factory):
    """Folder of saved machines, which all tests share."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield folder


MACHINES = [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.machine]) for name in BACKENDS]


@asynccontextmanager
async def machine_pool(backend: str, **options):
    """Skips the test where this host has none of that kind."""
    pool = MachinePool(backend, **{"max_sandboxes": 4, "wait_s": 10.0, **options})
    try:
        await pool.open()
    except SandboxUnsupported as error:
        pytest.skip(str(error))
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture(params=["process", "python", "daemon", *MACHINES])
async def pool(request, tmp_path):
    """With the agent's program, with the Python agent, behind a daemon, and as machines of each kind."""
    if request.param in BACKENDS:
        folders = {"templates": request.getfixturevalue("machines"), "snapshots": tmp_path / "snapshots"}
        async with machine_pool(request.param, **folders) as pool:
            yield pool
        return
    if request.param != "daemon":
        agent = "python" if request.param == "python" else "native"
        async with SandboxPool(max_sandboxes=4, wait_s=10.0, agent=agent, snapshots=tmp_path / "snapshots") as pool:
            yield pool
        return
    async with Node(request.getfixturevalue("daemon_address"), lease_s=1.0) as node:
        node.host = await node.health()
        yield node
        for sandbox in await node.list():
            await node.end(sandbox["id"], "killed")


# For tests that see a sandbox's processes from the host.
on_host = pytest.mark.parametrize("pool", ["process", "python", "daemon"], indirect=True)
# For tests of what the host's own kernel, or a guest's, keeps sandboxes from; gVisor is another kernel.
on_linux = pytest.mark.parametrize("pool", ["process", "python", "daemon", *MACHINES[:2]], indirect=True)
# For tests that look behind a pool.
in_process = pytest.mark.parametrize("pool", ["process"], indirect=True)


@pytest.fixture
async def sandbox(pool):
    return await pool.create(Template("test"))


@pytest.fixture
def needs_memory_cgroup(pool):
    if not pool.host["cgroups"]["memory"]:
        pytest.skip("no writable memory cgroup on this host")


needs_criu = pytest.mark.skipif(
    os.geteuid() != 0 or find_criu()[0] is None, reason="saves sandboxes; needs root, and launchers.install criu"
)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="sets up another user, needs root")


def cgroup_paths(pattern: str) -> list[Path]:
    """Paths under the mounts of cgroups; asked for again where some are removed at that moment."""
    while True:
        try:
            return [path for top in Path("/sys/fs/cgroup").iterdir() for path in top.rglob(pattern)]
        except FileNotFoundError:
            continue

"""Fixtures of the sandbox tests: one pool and sandbox a test, for every backend."""

import os
from pathlib import Path

import pytest

from venusrl.sandbox import SandboxPool, Template

BACKENDS = {"process": SandboxPool}


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


@pytest.fixture(params=sorted(BACKENDS))
async def pool(request):
    async with BACKENDS[request.param](max_sandboxes=4, wait_s=10.0) as pool:
        yield pool


@pytest.fixture
async def sandbox(pool):
    return await pool.create(Template("test"))


@pytest.fixture
def needs_memory_cgroup(pool):
    if not pool.host["cgroups"]["memory"]:
        pytest.skip("no writable memory cgroup on this host")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="sets up another user, needs root")

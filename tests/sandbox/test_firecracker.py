"""The driver of Firecracker, against a stand-in that checks every request as Firecracker's own API does."""

import shutil
import sys
import textwrap

import pytest

from tests.sandbox.conftest import ROOT, needs_root
from tests.sandbox.test_life import until
from venusrl.core.errors import SandboxError, SandboxUnsupported
from venusrl.sandbox import Template
from venusrl.sandbox.machines import firecracker, image
from venusrl.sandbox.machines.pool import MachinePool
from venusrl.sandbox.programs import default_folder

SMALL = Template("small", memory_bytes=96 << 20, disk_bytes=32 << 20, env={"MINE": "yes"})


@pytest.fixture
def standin(tmp_path, monkeypatch):
    """A program `firecracker` on the search path."""
    try:
        image.find_vmlinux(image.find_kernel(default_folder()))
    except SandboxUnsupported as error:
        pytest.skip(str(error))
    program = tmp_path / "bin/firecracker"
    program.parent.mkdir()
    script = f"""\
        #!/bin/sh
        exec {sys.executable} {ROOT}/tests/sandbox/firecracker_standin.py "$@"
        """
    program.write_text(textwrap.dedent(script))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return program


def pool_of(tmp_path, **options):
    backend = firecracker.Firecracker(needs_kvm=False)
    folders = {"folder": tmp_path / "m", "templates": tmp_path / "t", "snapshots": tmp_path / "s"}
    return MachinePool(backend, max_sandboxes=4, **folders, **options)


def requests(pool, sandbox):
    said = (pool._machines[sandbox.id].folder / "requests").read_text()
    return [line.split(" ", 2)[:2] for line in said.splitlines()]


@needs_root
async def test_machines_are_cloned_and_speak_over_vsock(standin, tmp_path):
    async with pool_of(tmp_path) as pool:
        sandbox = await pool.create(SMALL)
        result = await sandbox.exec("echo $MINE; id -u; pwd", timeout_s=10)
        assert result.text == "yes\n1000\n/workspace\n"
        assert requests(pool, sandbox) == [["PUT", "/snapshot/load"], ["PATCH", "/vm"]]
        await sandbox.write("f", b"bytes\0")
        assert await sandbox.read("f") == b"bytes\0"
        other = await pool.create(SMALL)
        assert len(list((tmp_path / "t").iterdir())) == 1
        await sandbox.kill()
        assert (await other.exec("echo on")).text == "on\n"
    await until(lambda: list((tmp_path / "m").iterdir()) == [])


@needs_root
async def test_one_is_saved_and_goes_on(standin, tmp_path):
    async with pool_of(tmp_path) as pool:
        sandbox = await pool.create(SMALL)
        await sandbox.write("f", b"x")
        lines = await sandbox.start("while read x; do echo got $x; done", stdin=None)
        saved = await sandbox.snapshot()
        assert requests(pool, sandbox)[2:] == [["PATCH", "/vm"], ["PUT", "/snapshot/create"], ["PATCH", "/vm"]]
        assert await sandbox.read("f") == b"x"  # over other connections than before
        await lines.send(b"1\n")
        assert (await anext(aiter(lines))).data == b"got 1\n"
        copy = await pool.restore(saved)
        assert (await copy.exec("echo copy", timeout_s=10)).text == "copy\n"
        [record] = await pool.snapshots()
        assert record.kind == "firecracker" and set(record.files) == {"state", "pages"}
        assert record.files["pages"][0] == 8 + 8 + 4096  # one page that it has written


@needs_root
async def test_what_it_refuses_is_said(standin, tmp_path, monkeypatch):
    monkeypatch.setattr(firecracker, "_ARGUMENTS", "")
    monkeypatch.setattr(firecracker, "find_vmlinux", lambda kernel: kernel)
    async with pool_of(tmp_path) as pool:
        with pytest.raises(SandboxError, match=r"refuses /boot-source: .*ELF magic"):
            await pool.create(SMALL)
        assert pool.alive == 0
    await until(lambda: list((tmp_path / "m").iterdir()) == [])


async def test_a_host_without_it_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, **options: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SandboxUnsupported, match="firecracker-microvm/firecracker/releases"):
        firecracker.find_firecracker()


async def test_a_host_without_kvm_is_told_so(standin, monkeypatch):
    monkeypatch.setattr(firecracker, "find_accelerator", lambda: "tcg")
    with pytest.raises(SandboxUnsupported, match="/dev/kvm"):
        async with MachinePool("firecracker", max_sandboxes=1):
            pass


async def test_an_old_one_is_refused(standin):
    standin.write_text("#!/bin/sh\necho Firecracker v1.4.1\n")
    with pytest.raises(SandboxUnsupported, match=r"1\.4; 1\.8 or newer"):
        firecracker.find_firecracker()

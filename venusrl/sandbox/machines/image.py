"""What a guest boots: a Linux kernel of Debian's, and a file system with the host's own programs, made once.

The file system is an initramfs: bash, the usual tools and Python of this host with the libraries that they need, the
kernel's modules for its ports, the first process (`guest.c`) and the agent. It is not compressed, for a guest without
hardware virtualization unpacks slowly.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from venusrl.core.errors import SandboxUnsupported
from venusrl.sandbox.programs import agent_program, compile_program, default_folder
from venusrl.sandbox.spawner import seccomp
from venusrl.sandbox.spawner.rootfs import ETC

QEMU = "qemu-system-x86_64"
# What kernels are packed with, and what unpacks that.
_PACKED = {
    b"\x02\x21\x4c\x18": ("lz4", "-dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "-dc"),
    b"\xfd7zXZ\0": ("xz", "-dc"),
    b"\x1f\x8b\x08": ("gzip", "-dc"),
}
# What the guest loads for its ports, of QEMU's kind and of Firecracker's, besides what that needs.
_MODULES = {
    "serial": ("virtio_pci", "virtio_console"),
    "vsock": ("virtio_mmio", "vmw_vsock_virtio_transport"),
}
_PROGRAMS = (
    "bash sh ls cat head tail wc sort cut tr mkdir rmdir rm mv cp ln chmod touch stat sleep seq true false echo "
    "printf date id env du df dd od md5sum sha1sum sha256sum mktemp readlink realpath basename dirname tee uniq "
    "xargs find grep sed awk tar gzip ps kill pgrep pkill hostname stty tty timeout setsid nohup expr test diff "
    "comm paste fold rev yes nproc uname whoami pwd mkfifo truncate split shuf cmp which python3 git patch make"
).split()
_PYTHON_LEAVES_OUT = ("test", "idlelib", "tkinter", "ensurepip", "dist-packages", "site-packages", "__pycache__")


@dataclass(frozen=True)
class Image:
    """Attributes:
    kernel, initramfs: paths of what is booted.
    key: names this version of both.
    """

    kernel: Path
    initramfs: Path
    key: str


def find_image(folder: Path | None = None) -> Image:
    """The image of this host, made where it is not there yet, which takes seconds.

    Raises:
      SandboxUnsupported: something that it takes is missing; the message says what would bring it.
    """
    if platform.machine() != "x86_64":
        raise SandboxUnsupported(f"guests are built for x86_64 only, this is {platform.machine()}")
    folder = default_folder() if folder is None else folder
    kernel = find_kernel(folder)
    agent, why = agent_program(folder)
    if agent is None:
        raise SandboxUnsupported(f"a guest needs the agent's program: {why}")
    guest, why = compile_program("guest", [Path(__file__).parent / "guest.c"], folder)
    if guest is None:
        raise SandboxUnsupported(f"a guest needs its first process: {why}")
    parts = [kernel.name, Path(agent).name, Path(guest).name, sys.version, Path(__file__).read_text()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = folder / f"guest-{key}.cpio"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            root = Path(scratch) / "root"
            _fill(root, kernel, Path(agent), Path(guest))
            made = Path(scratch) / "image"
            with open(made, "wb") as f:
                f.writelines(cpio(root))
            made.rename(path)
    return Image(kernel, path, key)


def find_kernel(folder: Path) -> Path:
    """A kernel with its modules beside it: below the folder of programs, or the newest of the host's own."""
    for top in (folder / "kernel", Path("/")):
        kernels = sorted((top / "boot").glob("vmlinuz-*"))
        for kernel in reversed(kernels):
            if (_modules_of(kernel) / "kernel/drivers/char/virtio_console.ko").exists():
                return kernel
    raise SandboxUnsupported("no kernel for guests: python -m launchers.install kernel")


def _modules_of(kernel: Path) -> Path:
    return kernel.parent.parent / "lib/modules" / kernel.name.removeprefix("vmlinuz-")


def _fill(root: Path, kernel: Path, agent: Path, guest: Path) -> None:
    for name in ("bin", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "tmp", "usr/bin", "var"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("workspace", "disk", "modules", "dev/shm"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, text in ETC.items():
        (root / "etc" / name).write_text(text)
    shutil.copy2(guest, root / "init")
    shutil.copy2(agent, root / "opt/agent")
    found = {path.stem.replace("-", "_"): path for path in (_modules_of(kernel)).rglob("*.ko")}
    for ports, names in _MODULES.items():
        loaded = in_order(found, names)
        for module in loaded:
            shutil.copy2(module, root / "modules" / module.name)
        (root / "modules" / ports).write_text("".join(f"{module.name}\n" for module in loaded))
    (root / "filter").write_bytes(seccomp.program(platform.machine()))
    for name in _PROGRAMS:
        program = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")
        if program is not None:
            _copy_program(root, Path(program))
            link = root / "bin" / name
            if not link.exists():
                link.symlink_to(f"/usr/bin/{name}")
    _copy_python(root)


def in_order(found: dict[str, Path], names: Iterable[str]) -> list[Path]:
    """Modules of a kernel and all that they need, each after what it needs itself.

    What needs what differs from one release of a kernel to the next; every module says it ("depends=").

    Args:
      found: files by the names of their modules. What is not among them is part of the kernel.
    """
    order: dict[Path, None] = {}

    def add(name: str) -> None:
        module = found.get(name.replace("-", "_"))
        if module is None or module in order:
            return
        said = re.search(rb"\0depends=([^\0]*)\0", module.read_bytes())
        for needed in said[1].decode().split(",") if said else ():
            add(needed)
        order[module] = None

    for name in names:
        add(name)
    return list(order)


def _copy_program(root: Path, program: Path) -> None:
    """A program under the name that it is called by, and every library that it takes."""
    source = program.resolve()
    target = root / "usr/bin" / program.name
    if not target.exists():
        shutil.copy2(source, target)
    _copy_libraries(root, source)


def _copy_libraries(root: Path, program: Path) -> None:
    for library in libraries(program):
        place = root / library.relative_to("/")
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library.resolve(), place)


def libraries(program: Path) -> list[Path]:
    """Paths of the shared libraries that a program loads, as it names them."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True)
    return [Path(path) for path in re.findall(r"(?:=> |^\s*)(/\S+) \(0x", said.stdout, re.M)]


def _copy_python(root: Path) -> None:
    """The standard library of the system's own Python, where it has one, and the libraries of its modules."""
    python = shutil.which("python3", path="/usr/bin")
    if python is None:
        return
    version = Path(python).resolve().name
    library = Path("/usr/lib") / version
    ignored = shutil.ignore_patterns(*_PYTHON_LEAVES_OUT)
    shutil.copytree(library, root / "usr/lib" / version, ignore=ignored, symlinks=False, dirs_exist_ok=True)
    for module in (root / "usr/lib" / version).rglob("*.so"):
        _copy_libraries(root, module)


def cpio(root: Path) -> Iterator[bytes]:
    """The files below a directory as an archive of the kind that Linux unpacks when it starts ("newc"), all root's."""
    number = 0
    for folder, folders, files in os.walk(root):
        for name in sorted([*folders, *files]):
            path = Path(folder) / name
            info = path.lstat()
            data = b""
            if stat.S_ISLNK(info.st_mode):
                data = os.readlink(path).encode()
            elif stat.S_ISREG(info.st_mode):
                data = path.read_bytes()
            number += 1
            yield _entry(str(path.relative_to(root)), info.st_mode, number, data)
    yield _entry("TRAILER!!!", 0, 0, b"")


def _entry(name: str, mode: int, number: int, data: bytes) -> bytes:
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def find_vmlinux(kernel: Path) -> Path:
    """The kernel as an ELF file, beside the packed one. SandboxUnsupported where what unpacks it is missing."""
    folder = default_folder()
    target = folder / kernel.name.replace("vmlinuz", "vmlinux")
    if target.exists():
        return target
    data = kernel.read_bytes()
    for magic, program in _PACKED.items():
        at = data.find(magic)
        while at >= 0:
            if shutil.which(program[0]) is None:
                raise SandboxUnsupported(f"{kernel.name} is packed with {program[0]}: apt-get install {program[0]}")
            unpacked = subprocess.run(program, input=data[at:], capture_output=True).stdout
            if unpacked.startswith(b"\x7fELF"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile(dir=folder, delete=False) as made:
                    made.write(unpacked)
                os.rename(made.name, target)
                return target
            at = data.find(magic, at + 1)
    raise SandboxUnsupported(f"{kernel} is packed in a way that is not known here")


def find_qemu() -> str:
    """Its path. SandboxUnsupported where it is not installed."""
    path = shutil.which(QEMU)
    if path is None:
        raise SandboxUnsupported(f"{QEMU} is not installed: apt-get install --no-install-recommends qemu-system-x86")
    return path

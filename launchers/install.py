"""Puts programs that sandboxes need where they look for them, on Debian and its like.

    python -m launchers.install                       # all of them
    python -m launchers.install criu kernel runsc     # or some

criu: saves, forks and moves process sandboxes. Debian 12 has version 3.17, which cannot save anything on today's
kernels; this is the one of Debian 13, with every library that it needs, started through its own loader (30 MB).
kernel: for the guests of virtual machines, Debian's for clouds, with its modules (26 MB to download).
runsc: gVisor, of Debian 12's backports (7 MB to download).

Each goes into a folder of this user's; nothing of the system changes. Needs apt-get and dpkg-deb, not root. QEMU
itself: apt-get install --no-install-recommends qemu-system-x86. Elsewhere, install them with the system's means.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import flags, logging

from launchers import program
from venusrl.core.errors import ConfigError, SandboxUnsupported
from venusrl.sandbox import programs
from venusrl.sandbox.machines.gvisor import RUNSC, find_runsc
from venusrl.sandbox.machines.image import find_kernel

_MIRROR = flags.DEFINE_string(
    "mirror", "", "Address of a Debian mirror, for criu and runsc; empty: the one that this system's sources name."
)
_FORCE = flags.DEFINE_bool("force", False, "Also where there is one that will do.")

_RELEASES = {"criu": "trixie", "runsc": "bookworm-backports"}
_KERNEL = "linux-image-cloud-amd64"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_WRAPPER = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
exec "$here/{loader}" --library-path "$here/{libraries}" "$here/{program}" "$@"
"""


def mirror() -> str:
    """Where packages come from: --mirror, else the first of this system's sources that has Debian's releases.

    Raises:
      ConfigError: --mirror is no address.
      SandboxUnsupported: the system's sources name none.
    """
    given = _MIRROR.value
    if given:
        if not re.fullmatch(r"(https?|file|ftp|copy|cdrom|mirror\+\w+):/\S+", given):
            raise ConfigError(f"--mirror={given!r} is no address; give one such as http://HOST/debian")
        return given.rstrip("/")
    said = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"], capture_output=True, text=True
    )
    sites = [line.rstrip("/") for line in said.stdout.splitlines()]
    found = next((site for site in sites if site.endswith("/debian")), None)
    if found is None:
        raise SandboxUnsupported(
            "this system's sources name no mirror of Debian; give one, --mirror=http://HOST/debian, or install the "
            "program with this system's means"
        )
    return found


def fetch(package: str, release: str, folder: Path) -> Path:
    """The files of a package of a release, and of all that it needs, as if nothing were installed."""
    source = f"deb [signed-by={_KEYRING}] {mirror()} {release} main\n"
    (folder / "sources.list").write_text(source)
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    options = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "true",
    }
    apt = ["apt-get", "-qq", *(part for name, value in options.items() for part in ("-o", f"{name}={value}"))]
    for command in (["update"], ["install", "--download-only", "-y", package]):
        subprocess.run([*apt, *command], check=True, stdout=subprocess.DEVNULL)
    for archive in sorted((folder / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive, folder / "files"], check=True)
    return folder / "files"


def criu(folder: Path) -> Path:
    """A folder with a program `criu` that starts with its own libraries."""
    files = fetch("criu", _RELEASES["criu"], folder)
    [program] = files.glob("usr/sbin/criu")
    loader = next(path for path in sorted(files.glob("usr/lib/*/ld-linux*.so*")))
    parts = {"loader": loader, "libraries": loader.parent, "program": program}
    (files / "criu").write_text(_WRAPPER.format(**{name: path.relative_to(files) for name, path in parts.items()}))
    (files / "criu").chmod(0o755)
    return files


def runsc(folder: Path) -> Path:
    """A folder with the program, which is one file."""
    files = fetch("runsc", _RELEASES["runsc"], folder)
    (folder / "runsc").mkdir()
    (files / "usr/bin/runsc").rename(folder / "runsc/runsc")
    return folder / "runsc"


def kernel(folder: Path) -> Path:
    """A folder with the kernel's boot/ and lib/modules/."""
    depends = subprocess.run(["apt-cache", "depends", _KERNEL], capture_output=True, text=True).stdout
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise SandboxUnsupported(f"apt knows no package {_KERNEL}; run apt-get update, or put a kernel's files there")
    subprocess.run(["apt-get", "-qq", "download", found[1]], cwd=folder, check=True)
    [package] = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder / "files"], check=True)
    return folder / "files"


def _found_kernel() -> tuple[str | None, str]:
    try:
        return str(find_kernel(programs.default_folder())), ""
    except SandboxUnsupported as error:
        return None, str(error)


# Of each: what brings it, the folder that it goes to, and (path or None, why there is none that will do).
_WANTED = {
    "criu": (criu, Path(programs.CRIU).parent, programs.find_criu),
    "kernel": (kernel, Path("kernel"), _found_kernel),
    "runsc": (runsc, Path(RUNSC).parent, lambda: find_runsc()[:2]),
}


def install(name: str) -> bool:
    """Says where it is, having brought it where it was not."""
    bring, place, find = _WANTED[name]
    path, _ = find()
    if path is not None and not _FORCE.value:
        print(f"{name}: there is one already: {path}")
        return True
    home = programs.default_folder()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=home) as folder:
            made = bring(Path(folder))
            shutil.rmtree(home / place, ignore_errors=True)
            os.rename(made, home / place)
    except subprocess.CalledProcessError as error:
        logging.error(
            "%s: %s: it ended with %d; see above", name, " ".join(map(str, error.cmd))[:200], error.returncode
        )
        return False
    except SandboxUnsupported as error:
        logging.error("%s: %s", name, error)
        return False
    for cached in (programs.find_criu, find_runsc):
        cached.cache_clear()
    path, why = find()
    print(f"{name}: {path or why}")
    return path is not None


def main(argv) -> None:
    names = argv[1:] or list(_WANTED)
    unknown = [name for name in names if name not in _WANTED]
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: unknown; give some of {', '.join(_WANTED)}")
    if missing:
        raise SandboxUnsupported(
            f"{', '.join(missing)}: not found; install {', '.join(names)} with this system's means"
        )
    if _MIRROR.value:
        mirror()  # refused before anything is fetched
    if not all([install(name) for name in names]):
        sys.exit(1)


if __name__ == "__main__":
    program.run(main, arguments=True)

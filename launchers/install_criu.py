"""Puts a CRIU that can save sandboxes where they look for one, on Debian and its like.

    python -m launchers.install_criu

Debian 12 has version 3.17, which cannot save anything on today's kernels. This takes the one of Debian 13, with every
library that it needs, into a folder of this user's (30 MB), and starts it through its own loader, so that nothing of
the system changes. Needs apt-get and dpkg-deb, not root. Elsewhere install CRIU 4.1 or newer with the system's means.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags, logging

from venusrl.sandbox import programs

_RELEASE = flags.DEFINE_string("release", "trixie", "Debian's release to take it from.")
_MIRROR = flags.DEFINE_string("mirror", "", "Address of a Debian mirror; empty: the one that this system uses.")
_FORCE = flags.DEFINE_bool("force", False, "Also where there is one that will do.")

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_WRAPPER = """#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
exec "$here/{loader}" --library-path "$here/{libraries}" "$here/{program}" "$@"
"""


def mirror() -> str:
    """The first of this system's sources that is Debian's own."""
    said = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"], capture_output=True, text=True
    )
    sites = [line.rstrip("/") for line in said.stdout.splitlines()]
    return next((site for site in sites if site.endswith("/debian")), "http://deb.debian.org/debian")


def download(folder: Path) -> None:
    """CRIU's packages, as if nothing were installed, into `folder`/archives."""
    source = f"deb [signed-by={_KEYRING}] {_MIRROR.value or mirror()} {_RELEASE.value} main\n"
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
    for command in (["update"], ["install", "--download-only", "-y", "criu"]):
        subprocess.run([*apt, *command], check=True, stdout=subprocess.DEVNULL)


def unpack(folder: Path, target: Path) -> None:
    """The packages' files, and a program `criu` that starts with its own libraries."""
    for package in sorted((folder / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, target], check=True)
    [program] = target.glob("usr/sbin/criu")
    loader = next(path for path in sorted(target.glob("usr/lib/*/ld-linux*.so*")))
    parts = {"loader": loader, "libraries": loader.parent, "program": program}
    text = _WRAPPER.format(**{name: path.relative_to(target) for name, path in parts.items()})
    (target / "criu").write_text(text)
    (target / "criu").chmod(0o755)


def main(argv) -> None:
    del argv
    path, _ = programs.find_criu()
    if path is not None and not _FORCE.value:
        print(f"there is one already: {path}")
        return
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if missing:
        logging.error("%s: not found; install CRIU 4.1 or newer with this system's means", ", ".join(missing))
        sys.exit(1)
    home = programs.default_folder()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = home / Path(programs.CRIU).parent
    try:
        with tempfile.TemporaryDirectory(dir=home) as folder:
            download(Path(folder))
            made = Path(folder) / "criu"
            unpack(Path(folder), made)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(made, target)
    except subprocess.CalledProcessError as error:
        logging.error("%s: it ended with %d; see above", " ".join(map(str, error.cmd))[:200], error.returncode)
        sys.exit(1)
    programs.find_criu.cache_clear()
    path, why = programs.find_criu()
    print(path or why)
    sys.exit(0 if path is not None else 1)


if __name__ == "__main__":
    app.run(main)

"""Puts a Linux kernel for the guests of virtual machines where they look for one, on Debian and its like.

    python -m launchers.install_kernel

Debian's cloud kernel, 26 MB to download, with its modules, into a folder of this user's. Nothing of the system changes;
needs apt-get and dpkg-deb, not root. QEMU itself: apt-get install --no-install-recommends qemu-system-x86.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, logging

from venusrl.core.errors import SandboxUnsupported
from venusrl.sandbox.microvm.image import find_kernel
from venusrl.sandbox.programs import default_folder

_PACKAGE = "linux-image-cloud-amd64"


def main(argv) -> None:
    del argv
    home = default_folder()
    try:
        print(f"there is one already: {find_kernel(home)}")
        return
    except SandboxUnsupported:
        pass
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        logging.error(
            "apt-get or dpkg-deb is not there; put a kernel's boot/ and lib/modules/ into %s", home / "kernel"
        )
        sys.exit(1)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    depends = subprocess.run(["apt-cache", "depends", _PACKAGE], capture_output=True, text=True).stdout
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        logging.error("apt knows no package %s; run apt-get update, or see --help", _PACKAGE)
        sys.exit(1)
    try:
        with tempfile.TemporaryDirectory(dir=home) as folder:
            subprocess.run(["apt-get", "-qq", "download", found[1]], cwd=folder, check=True)
            [package] = Path(folder).glob("*.deb")
            subprocess.run(["dpkg-deb", "-x", package, Path(folder) / "kernel"], check=True)
            shutil.rmtree(home / "kernel", ignore_errors=True)
            (Path(folder) / "kernel").rename(home / "kernel")
    except subprocess.CalledProcessError as error:
        logging.error("%s: it ended with %d; see above", " ".join(map(str, error.cmd))[:200], error.returncode)
        sys.exit(1)
    print(find_kernel(home))


if __name__ == "__main__":
    app.run(main)

"""Makes the agent's program from its source in `native/`, once for a host and a version of the source.

Any C compiler will do: $CC, cc, gcc, clang, or that of the `ziglang` package. Without one the agent is the Python one:
the same, except that each sandbox has 2 MB more of its own, its commands start a little later, and it cannot be saved.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")
_WAIT_S = 120.0


def find_compiler() -> list[str] | None:
    """The command that compiles C, or None."""
    given = os.environ.get("CC", "").split()
    if given and shutil.which(given[0]):
        return given
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"] if importlib.util.find_spec("ziglang") else None


def default_folder() -> Path:
    """Where programs are kept: `$XDG_CACHE_HOME/venusrl`, below ~/.cache else."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "venusrl"


@functools.cache
def key() -> str:
    """Names a version of the source, on this kind of machine."""
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def agent_program(folder: Path | None = None) -> tuple[str | None, str]:
    """(path of the program or None, why there is none). Takes two seconds where it is not there yet.

    A program that somebody else could have put there is not used.
    """
    folder = default_folder() if folder is None else folder
    path = folder / f"agent-{key()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder) and path.exists() and _is_ours(path):
            return str(path), ""
        compiler = find_compiler()
        if compiler is None:
            return None, "no C compiler: install gcc, or the Python package ziglang"
        if not _is_ours(folder):
            return None, f"{folder} can be written by others: chmod go-w it"
        return _compile(compiler, path)
    except OSError as error:
        return None, f"{folder}: {error.strerror}; give XDG_CACHE_HOME a folder that can be written"


def _is_ours(path: Path) -> bool:
    info = path.stat()
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: list[str], path: Path) -> tuple[str | None, str]:
    """Linked statically where the host has what that takes: it starts sooner."""
    sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    said = ""
    for link in (["-static"], []):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "agent"
            command = [*compiler, *_FLAGS, *link, "-o", str(made), *sources, "-lm"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S)
            except subprocess.TimeoutExpired:
                return None, f"{compiler[0]} took more than {_WAIT_S} s"
            if done.returncode == 0:
                made.chmod(0o755)
                made.replace(path)
                return str(path), ""
            said = done.stderr.strip()[-500:]
    return None, f"{' '.join(compiler)} failed: {said}"

"""The programs that sandboxes need: the agent's, which is made here, and CRIU, which is found.

The agent's is compiled from its source in `agent/native/`, once for a host and a version of the source. Any C compiler
will do: $CC, cc, gcc, clang, or that of the `ziglang` package. Without one the agent is the Python one: the same, but
each sandbox has 2 MB more of its own, its commands start a little later, and it cannot be saved.

CRIU saves and restores process trees. It has to be version 4.1 or newer (Debian 12 has 3.17, which cannot save anything
on today's kernels); `launchers.install criu` puts one into a folder of the user's, where it is found unless the search
path has one that will do.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "agent/native"
_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")
_WAIT_S = 120.0
CRIU = "criu/criu"  # below the folder of programs
LEAST_CRIU = (4, 1)


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


def _digest(sources: list[Path]) -> str:
    digest = hashlib.sha256(platform.machine().encode())
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def agent_key() -> str:
    """Names a version of the agent's source, on this kind of machine."""
    return _digest(sorted(SOURCES.iterdir()))


def agent_program(folder: Path | None = None) -> tuple[str | None, str]:
    """(path of the agent's program or None, why there is none). Takes two seconds where it is not there yet."""
    return compile_program("agent", sorted(SOURCES.iterdir()), folder)


def compile_program(name: str, sources: list[Path], folder: Path | None = None) -> tuple[str | None, str]:
    """(path of a program or None, why there is none).

    A program that somebody else could have put there is not used.

    Args:
      sources: files in C, and headers.
      folder: of programs; by default that of this user's.
    """
    folder = default_folder() if folder is None else folder
    path = folder / f"{name}-{_digest(sources)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder) and path.exists() and _is_ours(path):
            return str(path), ""
        compiler = find_compiler()
        if compiler is None:
            return None, "no C compiler: install gcc, or the Python package ziglang"
        if not _is_ours(folder):
            return None, f"{folder} can be written by others: chmod go-w it"
        return _compile(compiler, [str(source) for source in sources if source.suffix == ".c"], path)
    except OSError as error:
        return None, f"{folder}: {error.strerror}; give XDG_CACHE_HOME a folder that can be written"


def _is_ours(path: Path) -> bool:
    info = path.stat()
    return info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compile(compiler: list[str], sources: list[str], path: Path) -> tuple[str | None, str]:
    """Linked statically where the host has what that takes: it starts sooner."""
    said = ""
    for link in (["-static"], []):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / "program"
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


@functools.cache
def find_criu() -> tuple[str | None, str]:
    """(its path or None, why there is none that will do)."""
    why = "CRIU is not installed: python -m launchers.install criu"
    for path in filter(None, (shutil.which("criu"), str(default_folder() / CRIU))):
        if Path(path).exists():
            version = _criu_version(path)
            if version >= LEAST_CRIU:
                return path, ""
            why = f"{path} is version {'.'.join(map(str, version))}, older than 4.1: python -m launchers.install criu"
    return None, why


def _criu_version(path: str) -> tuple[int, ...]:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"Version: (\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()

"""The name of a run, by which workers in other processes know whose they are."""

import os
import re
import socket
from pathlib import Path


def run_id(workdir: Path) -> str:
    """A word drawn once for a folder and kept there in `run_id`, with the host and the folder: a copy elsewhere is
    another run."""
    path = workdir / "run_id"
    word = path.read_text("ascii", "replace").strip() if path.is_file() else ""
    if not re.fullmatch("[0-9a-f]{16}", word):
        word, fresh = os.urandom(8).hex(), path.with_suffix(".tmp")
        fresh.write_text(word + "\n")
        os.replace(fresh, path)
    return named(word, str(workdir.resolve()))


def named(word: str, what: str) -> str:
    """`word`, with what a reader can make something of."""
    return f"{word}@{socket.gethostname()}:{what[-500:]}".encode("ascii", "backslashreplace").decode()

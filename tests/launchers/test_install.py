"""Where the installer of programs takes packages from: this system's sources, or --mirror; no address of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import programs

APT = """#!/bin/sh
[ "$1" = indextargets ] && printf '%s' "$SITES"
exit 0
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The installer, with an apt-get whose sources are given and that fetches nothing."""
    for name in ("apt-get", "apt-cache", "dpkg-deb"):
        (tmp_path / name).write_text(APT)
        (tmp_path / name).chmod(0o755)

    def call(*arguments: str, sites: str = "") -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "launchers.install", *arguments],
            cwd=programs.ROOT, capture_output=True, text=True, timeout=60,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "SITES": sites},
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return call


def test_without_a_mirror_in_the_sources_it_asks_for_one(run):
    code, output = run("runsc", "--force", sites="http://other.invalid/ubuntu\n")
    assert code == 1 and "Traceback" not in output
    assert "this system's sources name no mirror of Debian; give one, --mirror=http://HOST/debian" in output


@pytest.mark.parametrize("mirror", ["x", "http//a", "http://a b", "deb http://a", "http://a\nb"])
def test_a_mirror_that_is_no_address_is_refused(run, mirror):
    code, output = run("runsc", "--force", f"--mirror={mirror}")
    assert code == 1 and output.startswith("ConfigError: --mirror=") and output.count("\n") == 1


def test_the_mirror_of_the_systems_sources_is_used(monkeypatch):
    from absl import flags

    from launchers import install

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    done = subprocess.CompletedProcess([], 0, stdout="http://a.invalid/ubuntu\nhttp://b.invalid/debian/\n")
    monkeypatch.setattr(install.subprocess, "run", lambda *args, **kwargs: done)
    assert install.mirror() == "http://b.invalid/debian"


def test_an_unknown_program_is_one_line(run):
    assert run("criuu") == (1, "ConfigError: criuu: unknown; give some of criu, kernel, runsc\n")


def test_no_host_of_a_registry_is_anywhere_in_the_repository():
    """Packages come from where a machine is told to take them, so that it can be a mirror of one's own."""
    kinds = "deb|security|archive|ports|py[p]i|registry|index|files|mirrors?|proxy|repo|packages|dl|download|hub"
    host = re.compile(rf"(?<![\w./-])((?:{kinds})[\w-]*(?:\.[\w-]+)*\.(?:org|com|net|io|dev|cn|co))(?![\w-])", re.I)
    listed = subprocess.run(["git", "ls-files"], cwd=programs.ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    for name in listed.stdout.split("\n"):
        path = Path(programs.ROOT / name)
        if not name or not path.is_file() or path.samefile(__file__):
            continue
        text = path.read_bytes().decode(errors="ignore")
        found = [match.group() for match in host.finditer(text)]
        assert not found, f"{name}: {found}"

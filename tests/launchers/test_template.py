"""The template program, as a process."""

import subprocess
import sys

import pytest

from .programs import ROOT


@pytest.fixture
def template(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "launchers.template", *arguments, f"--store={tmp_path / 'store'}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    return run


def test_build_list_inspect_delete(template, tmp_path):
    (tmp_path / "lower").mkdir()
    (tmp_path / "lower/x").write_text("12345")
    file = tmp_path / "t.toml"
    lines = ['name = "mine"', 'setup = ["cat x x > y"]', f'lowers = ["{tmp_path / "lower"}"]', "pids = 9"]
    file.write_text("\n".join(lines))
    assert template("list") == (0, "")
    code, said = template("build", str(file))
    assert code == 0 and said.startswith("mine ") and said.endswith(": 2 files, 15 bytes\n")
    assert template("build", str(file)) == (0, said)
    code, listed = template("list")
    assert listed.split() == [said.split()[1].rstrip(":"), "15", "bytes", "2", "files", "mine"]
    code, shown = template("inspect", "mine")
    assert code == 0 and '"setup": [\n  "cat x x > y"\n ]' in shown and "every file is as it was built" in shown
    [tree] = (tmp_path / "store").glob("*/tree")
    (tree / "y").write_text("0123456789")
    code, damaged = template("inspect", "mine")
    assert code == 1 and "damaged" in damaged and "Traceback" not in damaged
    assert template("delete", listed.split()[0])[0] == 0
    assert template("list") == (0, "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "x"\nsetup = ["exit 3"]', "'exit 3' ended with 3"),
        ('name = "x"', "nothing to build"),
        ('name = "x"\ncolour = 1', "unknown: colour; a template has"),
        ('setup = ["true"]', "no name"),
        ("name = ", "give a TOML file"),
        ('name = "x"\npids = 1', "Template.pids=1"),
    ],
)
def test_a_bad_file_is_told_from_a_good_one(template, tmp_path, text, says):
    (tmp_path / "t.toml").write_text(text)
    code, said = template("build", str(tmp_path / "t.toml"))
    assert code == 1 and says in said and "Traceback" not in said


def test_what_is_not_there(template, tmp_path):
    assert "no template is called 'x'" in template("delete", "x")[1]
    assert "none.toml" in template("build", str(tmp_path / "none.toml"))[1]
    assert "usage: " in template("frobnicate")[1]

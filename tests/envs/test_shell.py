"""How a reply becomes a command, and a result an observation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs import shell
from venusrl.sandbox import ExecResult


def result(text: str = "", exit_code: int = 0, timed_out: bool = False, seconds: float = 0.5) -> ExecResult:
    return ExecResult(exit_code, text.encode(), len(text), timed_out, seconds)


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("```bash\nls -l\n```", "ls -l"),
        ("```sh\nls\n```", "ls"),
        ("\n  ```bash\nls\n```  \n", "ls"),
        ("```bash\ncd a\n\n  ls\n```", "cd a\n\n  ls"),
        ("```bash\necho 'a`b`'\n```", "echo 'a`b`'"),
        ("```bash\nls```", "ls"),
        ("```bash\n  ls\n```", "  ls"),
    ],
)
def test_one_block_is_a_command(reply, command):
    assert shell.parse_command(reply) == command


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "ls",
        "```\nls\n```",  # no language
        "```python\nls\n```",
        "```bash\n```",
        "```bash\n\n```",
        "```bash\n  \t\n```",
        "```bash ls\n```",
        "```bash\nls",  # cut by max_tokens
        "```bash\nls\n``",
        "ls\n```",
        "I look first.\n```bash\nls\n```",
        "```bash\nls\n```\nThat should do.",
        "```bash\nls\n```\n```bash\npwd\n```",  # two
        "```bash\ncat <<E\n```bash\nls\n```\nE\n```",  # nested
        "```BASH\nls\n```",
        '{"command": "ls"',  # verifiers#1763, #960: cut or quoted JSON
    ],
)
def test_anything_else_is_none(reply):
    assert shell.parse_command(reply) is None


@given(st.text(alphabet=st.characters(exclude_characters="`", exclude_categories=["Cs"]), min_size=1))
def test_block_and_parse_are_inverse(command):
    if command.strip():
        again = shell.parse_command(shell.block(command))
        assert again == command or again + "\n" == command  # one line break before the fence is the fence's


@given(st.text())
def test_no_reply_raises(reply):
    command = shell.parse_command(reply)
    assert command is None or (command.strip() and "```" not in command)


def test_show_output():
    assert shell.show(result("a\nb\n")) == "a\nb"
    assert shell.show(result("  a\n\n\n")) == "  a"
    assert shell.show(result("")) == "[done]"
    assert shell.show(result("\n")) == "[done]"


def test_show_failure():
    assert shell.show(result("no such file\n", exit_code=2)) == "no such file\n[exit 2]"
    assert shell.show(result("", exit_code=1)) == "[exit 1]"
    assert shell.show(result("", exit_code=-9)) == "[exit -9]"


def test_show_timeout():
    """ROCK#374: a timeout is never shown as success."""
    assert shell.show(result("part", timed_out=True, exit_code=-9, seconds=10.02)) == "part\n[timed out after 10 s]"
    assert shell.show(result("", timed_out=True, exit_code=0, seconds=9.7)) == "[timed out after 10 s]"


def test_the_middle_of_long_output_is_cut():
    text = "".join(chr(97 + i % 26) for i in range(5000))
    shown = shell.show(result(text), limit_chars=100)
    assert shown == f"{text[:50]}\n[4900 characters cut]\n{text[-50:]}"
    assert shell.show(result(text[:100]), limit_chars=100) == text[:100]
    assert "[4901 characters cut]" not in shown


@given(st.text(alphabet="ab\n", max_size=300), st.integers(2, 50))
def test_what_is_cut_and_what_is_shown_add_up(text, limit):
    kept = text.rstrip("\n")
    shown = shell.show(result(text), limit_chars=limit)
    if len(kept) <= limit:
        assert shown == (kept or "[done]")
        return
    half = limit // 2
    head, note, tail = shown[:half], shown[half : len(shown) - half].strip("\n"), shown[-half:]
    assert (head, tail) == (kept[:half], kept[-half:])
    assert f"[{len(kept) - 2 * half} characters cut]" in note


def test_undecodable_output_is_shown():
    assert shell.show(ExecResult(0, b"\xff\xfeok", 4, False, 0.1)).endswith("ok")


def test_malformed_goes_on():
    observation = shell.malformed("hm")
    assert observation.text == shell.FORMAT_HELP and not observation.done
    assert observation.info == {"command": None, "reply": "hm"}
    assert shell.parse_command(shell.FORMAT_HELP) is None

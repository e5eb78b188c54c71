"""One shell command a turn: how a reply becomes a command and a result becomes an observation.

The reply must be exactly one fenced bash block. Shared by the environments whose tool is a shell.
"""

import re

from venusrl.core.env import Observation
from venusrl.sandbox import ExecResult

_BLOCK = re.compile(r"\A\s*```(?:bash|sh)\n(.*?)\n?```\s*\Z", re.DOTALL)
FORMAT_HELP = "Reply with exactly one ```bash code block."


def block(command: str) -> str:
    """The reply that runs `command`."""
    return f"```bash\n{command}\n```"


def parse_command(reply: str) -> str | None:
    """The command of a reply; None where the reply is not exactly one block with something in it."""
    match = _BLOCK.match(reply)
    if not match or "```" in match[1] or not match[1].strip():
        return None
    return match[1]


def show(result: ExecResult, limit_chars: int = 2000) -> str:
    """What the policy sees of a finished command; the middle of long output is cut.

    Args:
      result: of Sandbox.exec.
      limit_chars: characters of output kept, half from each end.
    """
    text = result.text.rstrip("\n")
    if len(text) > limit_chars:
        half = limit_chars // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"
    if result.timed_out:
        note = f"[timed out after {result.seconds:.0f} s]"
    elif result.exit_code:
        note = f"[exit {result.exit_code}]"
    else:
        note = "" if text else "[done]"
    return "\n".join(part for part in (text, note) if part)


def malformed(reply: str) -> Observation:
    """The answer to a reply without a command; the episode goes on."""
    return Observation(FORMAT_HELP, info={"command": None, "reply": reply})

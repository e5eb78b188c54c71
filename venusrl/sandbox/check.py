"""What the process backend can do on this host, found by doing it once."""

import asyncio

from venusrl.core.errors import SandboxUnsupported
from venusrl.sandbox.contract import Template
from venusrl.sandbox.pool import SandboxPool

_PROBE = r"""
awk '/^(CapEff|NoNewPrivs|Seccomp):/ {print $1 $2}' /proc/self/status
python3 -I -S -c 'import sys; print("Python:%d.%d" % sys.version_info[:2])'
"""


def host_report() -> dict:
    """Makes one sandbox and reports what holds in it. Call it outside of an event loop; takes about 0.2 s.

    Returns:
      ok: sandboxes can be made; then also
      mode: "range" (65536 users a sandbox, needs root) or "single" (one user, any host user);
      memory, pids: "v1" or "v2" where a cgroup limits the sandbox as a whole, None where only each process is
        limited (memory) or the kernel's per-user count is used (pids);
      seccomp, no_new_privs, no_capabilities: bool, read inside;
      python: version of `python3` inside, or None.
      Where ok is False, `problem` says why and what would help.
    """
    return asyncio.run(_report())


async def _report() -> dict:
    try:
        async with SandboxPool(max_sandboxes=1) as pool:
            host = pool.host
            sandbox = await pool.create(Template("probe"))
            result = await sandbox.exec(_PROBE, timeout_s=20.0)
    except SandboxUnsupported as error:
        return {"ok": False, "problem": str(error)}
    seen = dict(line.split(":", 1) for line in result.text.splitlines() if ":" in line)
    return {
        "ok": True,
        "mode": host["mode"],
        **host["cgroups"],
        "seccomp": seen.get("Seccomp") == "2",
        "no_new_privs": seen.get("NoNewPrivs") == "1",
        "no_capabilities": set(seen.get("CapEff", "x")) == {"0"},
        "python": seen.get("Python"),
    }

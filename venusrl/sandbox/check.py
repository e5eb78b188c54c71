"""What the backends can do on this host; for processes, found by doing it once."""

import asyncio

from venusrl.core.errors import SandboxUnsupported
from venusrl.sandbox.contract import Template
from venusrl.sandbox.machines.pool import BACKENDS, MachinePool
from venusrl.sandbox.pool import SandboxPool
from venusrl.sandbox.programs import find_criu

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
      agent: "native" or "python";
      python: version of `python3` inside, or None.
      Where ok is False, `problem` says why and what would help.
    """
    return asyncio.run(_report())


def backends() -> dict[str, dict]:
    """What of each backend works on this host: {"ok": bool, ...}, with `problem` where it does not.

    Call it outside of an event loop. A virtual machine is not booted for it, which takes seconds.
    """
    process = host_report()
    if process["ok"]:
        criu, why = find_criu()
        process["saves"] = criu is not None and process["mode"] == "range" and process["agent"] == "native"
        if not process["saves"]:
            process["saves_problem"] = why or "it needs root, and a C compiler"
    return {"process": process} | {name: asyncio.run(_machines(name)) for name in BACKENDS}


async def _machines(backend: str) -> dict:
    try:
        async with MachinePool(backend, max_sandboxes=1) as pool:
            return {"ok": True, **pool.host}
    except SandboxUnsupported as error:
        return {"ok": False, "problem": str(error)}


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
        "agent": host["agent"],
        **host["cgroups"],
        "seccomp": seen.get("Seccomp") == "2",
        "no_new_privs": seen.get("NoNewPrivs") == "1",
        "no_capabilities": set(seen.get("CapEff", "x")) == {"0"},
        "python": seen.get("Python"),
    }

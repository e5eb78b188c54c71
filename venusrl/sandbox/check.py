"""What the backends can do on this host, found by making a sandbox of each."""

import asyncio

from venusrl.core.errors import SandboxError
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
      seccomp, no_new_privs, no_capabilities: bool, read inside; None where the kernel there does not say (gVisor);
      agent: "native" or "python";
      python: version of `python3` inside, or None.
      Where ok is False, `problem` says why and what would help.
    """
    return asyncio.run(_report(SandboxPool(max_sandboxes=1)))


def backends() -> dict[str, dict]:
    """What of each backend works on this host: {"ok": bool, ...}, with `problem` where it does not.

    Call it outside of an event loop. Boots a virtual machine, which takes about ten seconds without hardware
    virtualization. See `host_report` for what is in an entry; the mode is "machine" or "gvisor" for these.
    """
    process = host_report()
    if process["ok"]:
        criu, why = find_criu()
        can = process["mode"] == "range" and process["agent"] == "native" and process["freezer"] is not None
        process["saves"] = criu is not None and can
        if not process["saves"]:
            process["saves_problem"] = why or "it needs root, a C compiler, and a freezer cgroup"
    return {"process": process} | {name: asyncio.run(_report(MachinePool(name, max_sandboxes=1))) for name in BACKENDS}


async def _report(pool: SandboxPool | MachinePool) -> dict:
    try:
        async with pool:
            host = dict(pool.host)
            sandbox = await pool.create(Template("probe"))
            result = await sandbox.exec(_PROBE, timeout_s=20.0)
    except SandboxError as error:
        return {"ok": False, "problem": str(error)}
    seen = dict(line.split(":", 1) for line in result.text.splitlines() if ":" in line)
    return {
        "ok": True,
        **host.pop("cgroups"),
        **host,
        "seccomp": seen["Seccomp"] == "2" if "Seccomp" in seen else None,
        "no_new_privs": seen["NoNewPrivs"] == "1" if "NoNewPrivs" in seen else None,
        "no_capabilities": set(seen.get("CapEff", "x")) == {"0"},
        "python": seen.get("Python"),
    }

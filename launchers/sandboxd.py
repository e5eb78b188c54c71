"""A node's sandboxes as a service, for programs in other processes or on other machines.

    python -m launchers.sandboxd --port=7700
    python -m launchers.sandboxd --socket=/run/venusrl.sock      # only this user can connect
    python -m launchers.sandboxd --backend=gvisor                # or qemu, firecracker: machines of their own
    python -m launchers.sandboxd --check                         # what works on this host, and why the rest does not

In Python, with Node from venusrl.sandbox.daemon.client:
    async with Node("http://127.0.0.1:7700") as node: sandbox = await node.create(Template("mine"))

Nobody is asked who they are: whoever can connect can make sandboxes, and read what is below --lowers. The address is
printed when it answers; it ends, and its sandboxes with it, at SIGTERM, SIGINT or SIGHUP. A sandbox whose client
has gone ends when its lease does.
"""

import asyncio
import json
import logging as std_logging
import sys

from absl import flags, logging

from launchers import program
from venusrl.core.door import read_key
from venusrl.core.listening import answer, listen, listen_at
from venusrl.sandbox import SandboxPool
from venusrl.sandbox.check import backends
from venusrl.sandbox.daemon.app import Daemon
from venusrl.sandbox.layers import default_folder
from venusrl.sandbox.machines.pool import BACKENDS, MachinePool

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on. There is no authentication: keep it private.")
_PORT = flags.DEFINE_integer("port", 7700, "Port to listen on; 0 takes a free one.", 0, 65535)
_SOCKET = flags.DEFINE_string("socket", "", "Path of a socket file to listen on, in place of host and port.")
_MAX_SANDBOXES = flags.DEFINE_integer("max_sandboxes", 500, "Sandboxes at once.", lower_bound=1)
_BACKEND = flags.DEFINE_enum("backend", "process", ["process", *BACKENDS], "Kind of sandboxes.")
_WAIT_S = flags.DEFINE_float("wait_s", 60.0, "Seconds that creation waits for a place.", lower_bound=0.0)
_TEMPLATES = flags.DEFINE_string("templates", "", "Folder of built templates; empty: one of this user's.")
_SNAPSHOTS = flags.DEFINE_string("snapshots", "", "Folder of saved sandboxes; empty: one of this user's.")
_KEY_FILE = flags.DEFINE_string(
    "key_file", "", "File with the key of the nodes that sandboxes may move between; empty: none come here."
)
_PEERS = flags.DEFINE_list(
    "peers", [], "Daemons that sandboxes (of templates with oom=hold) move to for want of memory."
)
_LOWERS = flags.DEFINE_list("lowers", [], "Directories below which templates' lower directories may be.")
_CHECK = flags.DEFINE_bool("check", False, "Says what works here, and ends.")


async def serve() -> None:
    """Until it is told to stop."""
    listener, address = listen_at(_SOCKET.value) if _SOCKET.value else listen(_HOST.value, _PORT.value)
    templates = _TEMPLATES.value or default_folder()
    snapshots = _SNAPSHOTS.value or None
    key = read_key(_KEY_FILE.value) if _KEY_FILE.value else ""
    folders = {"templates": templates, "snapshots": snapshots, "key": key}
    options = {"max_sandboxes": _MAX_SANDBOXES.value, "wait_s": _WAIT_S.value, **folders}
    if _BACKEND.value == "process":
        pool = SandboxPool(**options, on_pressure=lambda sandbox: daemon.pressed(sandbox))
    else:
        pool = MachinePool(_BACKEND.value, **options)
    async with pool:
        daemon = Daemon(pool, tuple(_LOWERS.value), tuple(_PEERS.value), key)
        if pool.host["mode"] == "single":
            logging.warning("not root: sandboxes are of one user, without cgroups of their own where the host has none")
        if pool.host["cgroups"]["freezer"] is None:
            logging.warning("no freezer cgroup: commands can escape pauses, and process sandboxes cannot be saved")
        print(f"sandboxes at {address}", flush=True)
        await answer(daemon.application, listener)


def main(argv) -> None:
    del argv
    std_logging.getLogger("httpx").setLevel(std_logging.WARNING)  # a line for each request otherwise
    if _CHECK.value:
        report = backends()
        print(json.dumps(report, indent=1))
        sys.exit(0 if report["process"]["ok"] else 1)
    asyncio.run(serve())


if __name__ == "__main__":
    program.run(main, lasting=True)

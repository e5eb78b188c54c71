"""A node's sandboxes as a service, for programs in other processes or on other machines.

    python -m launchers.sandboxd                                 # at a socket file that only this user can connect to
    python -m launchers.sandboxd --port=7700                     # over TCP; makes a key, and says where it is
    python -m launchers.sandboxd --backend=gvisor                # or qemu, firecracker: machines of their own
    python -m launchers.sandboxd --check                         # what works on this host, and why the rest does not

In Python, with Node from venusrl.sandbox.daemon.client:
    async with Node() as node: sandbox = await node.create(Template("mine"))
    async with Node("http://127.0.0.1:7700", key=...) as node: ...

Whoever has the key, or can connect where there is none, can make sandboxes, and read what is below --lowers. Web pages
are refused. The address is printed when it answers; it ends, and its sandboxes with it, at SIGTERM, SIGINT or SIGHUP. A
sandbox that nobody uses ends when its lease does.
"""

import asyncio
import json
import logging as std_logging
import os
import secrets
import socket
import sys
from pathlib import Path

from absl import flags, logging

from launchers import program
from venusrl.core.door import Door, check_exposure, read_key
from venusrl.core.errors import ConfigError
from venusrl.core.listening import answer, listen, listen_at
from venusrl.sandbox import SandboxPool
from venusrl.sandbox.check import backends
from venusrl.sandbox.daemon.app import Daemon
from venusrl.sandbox.daemon.client import default_socket
from venusrl.sandbox.daemon.peers import parse_peers
from venusrl.sandbox.layers import default_folder
from venusrl.sandbox.machines.pool import BACKENDS, MachinePool

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on, with --port.")
_PORT = flags.DEFINE_integer("port", None, "Port to listen on, not at a socket file; 0 takes a free one.", 0, 65535)
_SOCKET = flags.DEFINE_string("socket", "", "Path of a socket file to listen on; empty: one of this user's.")
_KEY_FILE = flags.DEFINE_string(
    "key_file", "", "File with the key that clients show; empty: with --port one is made, and named."
)
_NO_KEY = flags.DEFINE_bool("no_key", False, "Everybody of this machine may call; on the loopback alone.")
_MAX_SANDBOXES = flags.DEFINE_integer("max_sandboxes", 500, "Sandboxes at once.", lower_bound=1)
_BACKEND = flags.DEFINE_enum("backend", "process", ["process", *BACKENDS], "Kind of sandboxes.")
_WAIT_S = flags.DEFINE_float("wait_s", 60.0, "Seconds that creation waits for a place.", lower_bound=0.0)
_TEMPLATES = flags.DEFINE_string("templates", "", "Folder of built templates; empty: one of this user's.")
_SNAPSHOTS = flags.DEFINE_string("snapshots", "", "Folder of saved sandboxes; empty: one of this user's.")
_PEER_KEY_FILE = flags.DEFINE_string(
    "peer_key_file", "", "File with the key of the nodes that sandboxes move between; empty: none come here."
)
_PEERS = flags.DEFINE_list(
    "peers", [], "NAME=ADDRESS of the daemons that sandboxes may move to, also (with oom=hold) for want of memory."
)
_LOWERS = flags.DEFINE_list("lowers", [], "Directories below which templates' lower directories may be.")
_CHECK = flags.DEFINE_bool("check", False, "Says what works here, and ends.")


def _private_folder(path: Path) -> None:
    """Makes a folder that only this user can enter."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _listen() -> tuple[socket.socket, str, str | None, str]:
    """The socket, its address, the key of clients, and what to say of that.

    Raises:
      ConfigError: it cannot be bound, or a key is missing or cannot be read.
    """
    if _PORT.value is not None and _SOCKET.value:
        raise ConfigError("--port and --socket: give one of them")
    if _NO_KEY.value and _KEY_FILE.value:
        raise ConfigError("--no_key and --key_file: give one of them")
    key = read_key(_KEY_FILE.value) if _KEY_FILE.value else None
    if _PORT.value is None:
        path = _SOCKET.value or default_socket()
        if not _SOCKET.value:
            _private_folder(Path(path).parent)
        return *listen_at(path), key, ""
    if _NO_KEY.value:
        check_exposure(_HOST.value, None)
    listener, address = listen(_HOST.value, _PORT.value)
    if key is not None or _NO_KEY.value:
        return listener, address, key, ""
    file = Path(default_folder()).parent / f"sandboxd-{listener.getsockname()[1]}.key"
    _private_folder(file.parent)
    key = secrets.token_hex(32)
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as f:
        f.write(key + "\n")
    return listener, address, key, f"the key of its clients is in {file}"


async def serve() -> None:
    """Until it is told to stop."""
    peers = parse_peers(_PEERS.value)
    peer_key = read_key(_PEER_KEY_FILE.value, "--peer_key_file") if _PEER_KEY_FILE.value else ""
    if peers and not peer_key:
        raise ConfigError("--peers needs --peer_key_file, a file with the key that all these nodes have")
    listener, address, key, said = _listen()
    folders = {"templates": _TEMPLATES.value or default_folder(), "snapshots": _SNAPSHOTS.value or None}
    options = {"max_sandboxes": _MAX_SANDBOXES.value, "wait_s": _WAIT_S.value, "key": peer_key, **folders}
    if _BACKEND.value == "process":
        pool = SandboxPool(**options, on_pressure=lambda sandbox: daemon.pressed(sandbox))
    else:
        pool = MachinePool(_BACKEND.value, **options)
    async with pool:
        daemon = Daemon(pool, tuple(_LOWERS.value), peers, peer_key)
        host = "" if address.startswith("unix:") else _HOST.value
        door = Door(daemon.application, host, key, also=daemon.gatekeeper.admits_scope)
        if pool.host["mode"] == "single":
            logging.warning("not root: sandboxes are of one user, without cgroups of their own where the host has none")
        if pool.host["cgroups"]["freezer"] is None:
            logging.warning("no freezer cgroup: commands can escape pauses, and process sandboxes cannot be saved")
        print(f"sandboxes at {address}", flush=True)
        if said:
            print(said, flush=True)
        await answer(door, listener)


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

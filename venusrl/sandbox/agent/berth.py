"""Where an agent waits while its sandbox is saved, moved, or restored: it holds nothing then that is outside of it.

The agent listens on a socket of the sandbox's own network, under a name that the kernel picks. The spawner enters that
network, connects, and passes what the agent needs of the outside. Nobody in the sandbox can pass for it: of a process
that is outside of the sandbox's process namespace, the kernel says that its pid is 0.
"""

import errno
import os
import socket
import struct

from venusrl.sandbox.spawner.namespaces import set_namespace

_CREDENTIALS = struct.Struct("iII")
# What the agent is told: its owner is as before, or another, who knows nothing of commands that run.
KEPT, ADOPTED = b"1", b"2"


class Berth:
    """Attributes: name: of the socket, for `meet`."""

    def __init__(self):
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(b"")
        self._listener.listen(1)
        self.name = self._listener.getsockname()

    def wait(self) -> tuple[socket.socket, bytes, list[int]]:
        """The connection to the owner, KEPT or ADOPTED, and descriptors: of the spawner's life, three of the freezer,
        and, where there is one, of the cgroup's kills."""
        with self._listener:
            while True:
                connection, _ = self._listener.accept()
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(peer)[0] == 0:
                    greeting, fds, _, _ = socket.recv_fds(connection, 1, 5)
                    if greeting:
                        return connection, greeting, fds
                connection.close()


def meet(pid: int, name: bytes, greeting: bytes, fds: list[int]) -> socket.socket:
    """Connects to the agent, process `pid`, that waits under `name`, and passes it descriptors.

    For the spawner, as root. OSError where it does not wait.
    """
    if not name.startswith(b"\0"):
        raise OSError(errno.EINVAL, "it is no place where an agent waits")
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    network, connection = -1, None
    try:
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        set_namespace(network)
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        finally:
            set_namespace(own)
        connection.connect(name)
        socket.send_fds(connection, [greeting], fds)
        return connection
    except OSError as error:
        if connection is not None:
            connection.close()
        raise OSError(errno.EIO, f"it does not wait: {error}") from error  # and the caller's own connection is well
    finally:
        os.close(own)
        if network >= 0:
            os.close(network)

"""Stands in for Firecracker where there is no KVM: its API as swagger/firecracker.yaml (1.8) has it, and vsock's
handshake. The guest is the real agent in a directory of this host; what a snapshot holds is how it was started.

    firecracker --api-sock PATH --id ID
"""

import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

from venusrl.sandbox.programs import agent_program
from venusrl.sandbox.spawner import rootfs
from venusrl.sandbox.wire import pack

# Of each request: what it must have, and what it may have besides.
FIELDS = {
    ("PUT", "/machine-config"): ({"vcpu_count", "mem_size_mib"}, {"smt", "track_dirty_pages", "huge_pages"}),
    ("PUT", "/boot-source"): ({"kernel_image_path"}, {"initrd_path", "boot_args"}),
    ("PUT", "/vsock"): ({"guest_cid", "uds_path"}, {"vsock_id"}),
    ("PUT", "/actions"): ({"action_type"}, set()),
    ("PATCH", "/vm"): ({"state"}, set()),
    ("PUT", "/snapshot/create"): ({"snapshot_path", "mem_file_path"}, {"snapshot_type"}),
    ("PUT", "/snapshot/load"): ({"snapshot_path", "mem_backend"}, {"enable_diff_snapshots", "resume_vm"}),
}
_ENTER = """
set -e
top=$1 root=$1/root python=$2 agent=$3
shift 3
mount -t tmpfs none "$top"
mkdir "$root"
"$python" -c "from tests.sandbox.firecracker_standin import fill; fill('$root')"
for name in workspace tmp dev/shm; do mount -t tmpfs -o mode=1777 none "$root/$name"; done
mount --rbind /usr "$root/usr"
mount -t proc none "$root/proc"
touch "$root/opt/agent"
mount --bind "$agent" "$root/opt/agent"
for name in null zero full random urandom; do touch "$root/dev/$name"; mount --bind /dev/$name "$root/dev/$name"; done
unset PYTHONPATH
exec /usr/sbin/chroot "$root" /opt/agent "$@"
"""


def fill(root: str) -> None:
    """The directories of a sandbox's root, without what the host has."""
    rootfs.fill(root, rootfs.Host(None, None), [("/usr", "/usr", 0)])


class Guest:
    """What the machine runs."""

    def __init__(self):
        self.files: dict[str, dict] = {}
        self.state = "Not started"
        self.texts: list[str] = []
        self.said_up = False
        self.open: list[socket.socket] = []
        self.listener: socket.socket | None = None

    # The API

    def ask(self, method: str, path: str, body: dict) -> str:
        """What is wrong with a request, or nothing."""
        if (method, path) not in FIELDS:
            return f"Invalid request method and/or path: {method} {path}."
        must, may = FIELDS[method, path]
        if must - body.keys() or body.keys() - must - may:
            return f"The {path} request was malformed: has {sorted(body)}, wants {sorted(must)}"
        first = path in ("/machine-config", "/boot-source", "/vsock", "/snapshot/load", "/actions")
        if first != (self.state == "Not started"):
            return "The requested operation is not supported in the current state"
        return getattr(self, "_" + path.strip("/").replace("/", "_").replace("-", "_"))(body) or ""

    def _machine_config(self, body):
        self.files["machine"] = body

    def _boot_source(self, body):
        for name in ("kernel_image_path", "initrd_path"):
            if not os.path.exists(body[name]):
                return f"Invalid {name}: {body[name]}"
        if Path(body["kernel_image_path"]).read_bytes()[:4] != b"\x7fELF":
            return "Cannot load kernel: Invalid ELF magic number"
        self.files["boot"] = body

    def _vsock(self, body):
        self.files["vsock"] = body

    def _actions(self, body):
        if self.state != "Not started" or not {"machine", "boot", "vsock"} <= self.files.keys():
            return "Microvm cannot be started"
        self.state = "Running"
        self.serve_vsock()

    def _vm(self, body):
        self.state = "Paused" if body["state"] == "Paused" else "Running"

    def _snapshot_create(self, body):
        if self.state != "Paused":
            return "Cannot create a snapshot: the microVM must be paused"
        Path(body["snapshot_path"]).write_text(json.dumps([self.files, self.texts]))
        with open(body["mem_file_path"], "wb") as f:
            f.truncate(self.files["machine"]["mem_size_mib"] << 20)
        for connection in self.open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _snapshot_load(self, body):
        if body["mem_backend"]["backend_type"] != "File" or not os.path.exists(body["mem_backend"]["backend_path"]):
            return "Cannot load the memory"
        with open(body["mem_backend"]["backend_path"], "r+b") as f:
            self.memory = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.memory[7 * mmap.PAGESIZE] = 1  # what a guest does at once
        self.files, self.texts = json.loads(Path(body["snapshot_path"]).read_text())
        self.state, self.said_up = "Running" if body.get("resume_vm") else "Paused", True
        self.start_agent()
        owner = socket.socket(socket.AF_UNIX)
        owner.connect(self.listener.getsockname())
        _frame(owner)
        owner.sendall(pack({"op": "park", "stays": True, "id": 1}, b""))
        _frame(owner), _frame(owner)
        owner.close()
        self.serve_vsock()

    # The guest

    def serve_vsock(self) -> None:
        server = socket.socket(socket.AF_UNIX)
        server.bind(self.files["vsock"]["uds_path"])
        server.listen()
        threading.Thread(target=self._accept, args=[server], daemon=True).start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self._connect, args=[connection], daemon=True).start()

    def _connect(self, connection: socket.socket) -> None:
        word, port = _line(connection).split()
        if word != "CONNECT" or (port == "2" and self.listener is None):
            connection.close()
            return
        self.open.append(connection)
        connection.sendall(b"OK 1073741824\n")
        if port == "1":
            self._control(connection)
            return
        agent = socket.socket(socket.AF_UNIX)
        agent.connect(self.listener.getsockname())
        for one, other in ((connection, agent), (agent, connection)):
            threading.Thread(target=_copy, args=[one, other], daemon=True).start()

    def _control(self, connection: socket.socket) -> None:
        if not self.said_up:
            connection.sendall(b"up")
            (size,) = struct.unpack("<I", _exactly(connection, 4))
            self.texts = _exactly(connection, size).decode().split("\0")[:-1]
            self.said_up = True
            self.start_agent()
        while True:
            _exactly(connection, 40)
            connection.sendall(b"ok")

    def start_agent(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind("guest")
        self.listener.listen()
        root = Path("guest-root")
        root.mkdir()
        _disk, pids, _file, output, *env = self.texts
        life, self.life = os.pipe()
        command = ["unshare", "-mpf", "bash", "-c", _ENTER, "guest", str(root.resolve()), sys.executable]
        command += [agent_program()[0], str(self.listener.fileno()), str(life), *["-1"] * 4, pids, output]
        variables = dict(text.split("=", 1) for text in env) | {"PYTHONPATH": os.environ["PYTHONPATH"]}
        subprocess.Popen(command, pass_fds=[self.listener.fileno(), life], env=variables)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            sys.exit()
        data += part
    return data


def _line(connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        line += _exactly(connection, 1)
    return line.decode()


def _frame(connection: socket.socket) -> None:
    head, body = struct.unpack(">II", _exactly(connection, 8))
    _exactly(connection, head + body)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


GUEST = Guest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wrong = GUEST.ask(self.command, self.path, body)
        with open("requests", "a") as f:
            f.write(f"{self.command} {self.path} {wrong}\n")
        data = json.dumps({"fault_message": wrong}).encode() if wrong else b""
        self.send_response(400 if wrong else 204)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_PATCH = do_PUT

    def address_string(self):
        return "client"

    def log_message(self, *arguments):
        pass


if __name__ == "__main__":
    if sys.argv[1] == "--version":
        print("Firecracker v1.10.1 (stand-in)")
    else:
        ThreadingUnixStreamServer(sys.argv[sys.argv.index("--api-sock") + 1], Handler).serve_forever()

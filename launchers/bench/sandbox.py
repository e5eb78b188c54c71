"""What sandboxes cost on this host: time to make one and to run a command, memory, and how many fit.

    python -m launchers.bench.sandbox

Times are medians of sandboxes and commands one after another; a command comes `--think_s` after the last one ended,
and for `exec_at_once_p50_ms` at once. `idle_mb` is what the kernel charges a sandbox that has run one command, its own
pages and the kernel's for it (MB = 10^6 bytes). Sharing: a process in every sandbox reads 50 MiB of warm state, once as
its own memory, once as a file of a template that it maps; how many fit into a GiB is computed from what is charged, the
template's one copy among it. `accounting_share` is the part of a core that measuring 500 sandboxes once a second takes.
`checkpoint_s` and `restore_s` are of a
sandbox with 25 MB of processes, whole calls; `image_over_dirty` is the bytes of the snapshot to those of its own memory
(without the kernel's); `blackout_s` is the longest that a process in it stood still while it moved to another daemon.
`clone_first_command_ms` is from the call that makes a
virtual machine, a clone, to the end of its first `true`; `clone_private_ratio` its private memory then to that of one
that has just booted (QEMU's own among both). Then, of each kind of machine that the host has, the same as of processes,
for a small sandbox (BACKEND_create_p50_ms, ..., BACKEND_restore_s). The last line is one JSON object.
"""

import asyncio
import itertools
import json
import logging
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import flags

from launchers import program
from venusrl.core.errors import SandboxError, SandboxUnsupported
from venusrl.sandbox import Process, SandboxPool, Template
from venusrl.sandbox.machines.pool import BACKENDS, MachinePool
from venusrl.sandbox.programs import find_criu

_ALIVE = flags.DEFINE_integer("alive", 500, "Sandboxes at once.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 100, "Sandboxes that are made one after another.", lower_bound=1)
_THINK_S = flags.DEFINE_float("think_s", 0.01, "Seconds between the commands of a sandbox.", lower_bound=0.0)
_SHARED = flags.DEFINE_integer("shared", 200, "Sandboxes of the template with warm state.", lower_bound=1)
_CLONES = flags.DEFINE_integer("clones", 8, "Virtual machines that are cloned.", lower_bound=1)
_SAVES = flags.DEFINE_integer("saves", 10, "Sandboxes that are saved, restored and moved.", lower_bound=1)
_PRIVATE = flags.DEFINE_integer("private", 20, "Sandboxes with warm state of their own.", lower_bound=1)

# A system's own interpreter where there is one: those with a shared library write 1 MB when they start.
_PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else "python3"
WARM_BYTES = 50 << 20
GIB, MB = 1 << 30, 1_000_000
TREE_BYTES = 22_000_000  # of the tree of processes that is saved; shells and interpreters make it 25 MB
EXECS = 5  # of each of those that are made one after another
# One process each with the warm state, all of it touched; it says so, and waits.
_TOUCH = "for at in range(0, len(warm), 4096): warm[at]"
_OWN = f"import os; warm = bytearray(os.urandom({WARM_BYTES})); print(1, flush=True); input()"
_MAPPED = (
    "import mmap; f = open('warm', 'rb'); "
    "warm = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)\n"
    f"{_TOUCH}\nprint(1, flush=True); input()"
)
_SETUP = f"head -c {WARM_BYTES} /dev/urandom > warm"


async def times(pool: SandboxPool) -> dict[str, float]:
    """Milliseconds to make a sandbox, and to run `true` in it."""
    made, ran, at_once = [], [], []
    for _ in range(_REPEATS.value):
        started = time.perf_counter()
        sandbox = await pool.create(Template("timed"))
        made.append(time.perf_counter() - started)
        for think_s, times in ((_THINK_S.value, ran), (0.0, at_once)):
            for _ in range(EXECS):
                await asyncio.sleep(think_s)
                started = time.perf_counter()
                await sandbox.exec("true")
                times.append(time.perf_counter() - started)
        await sandbox.kill()
    return {
        "create_p50_ms": 1e3 * statistics.median(made),
        "create_min_ms": 1e3 * min(made),
        "exec_p50_ms": 1e3 * statistics.median(ran),
        "exec_min_ms": 1e3 * min(ran),
        "exec_at_once_p50_ms": 1e3 * statistics.median(at_once),
    }


async def crowd(pool: SandboxPool) -> dict[str, float]:
    """Many at once: how fast they come, what each is charged, and what it costs to ask."""
    started = time.perf_counter()
    sandboxes = [await pool.create(Template("crowd")) for _ in range(_ALIVE.value)]
    rate = _ALIVE.value / (time.perf_counter() - started)
    for sandbox in sandboxes:
        await sandbox.exec("true")
        await sandbox.write("id", f"{sandbox.id}\n".encode())
    usage = await pool.usage()
    before = _cpu_s(pool.spawner_pid) + time.process_time()
    for _ in range(20):
        await pool.usage()
    asked = (_cpu_s(pool.spawner_pid) + time.process_time() - before) / 20
    charged = [u.private for u in usage.values()]
    answers = await asyncio.gather(*(sandbox.exec("cat id") for sandbox in sandboxes))
    alive = sum(answer.text == f"{sandbox.id}\n" for answer, sandbox in zip(answers, sandboxes, strict=True))
    return {
        "alive": alive,
        "creates_per_s": rate,
        "idle_mb": statistics.mean(charged) / MB if charged else float("nan"),
        "accounting_share": asked * 500 / _ALIVE.value,
    }


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def charged(template: Template, script: str, count: int, templates: str) -> float:
    """Bytes charged for each of `count` sandboxes with a process that has its warm state."""
    async with SandboxPool(max_sandboxes=count, templates=templates) as pool:
        for _ in range(count):
            sandbox = await pool.create(template)
            process = await sandbox.start(f'exec {_PYTHON} -I -S -c "{script}"', stdin=None)
            if (await anext(aiter(process))).data != b"1\n":
                raise SandboxError(f"the process with the warm state failed: {(await process.wait()).text}")
        usage = await pool.usage()
        return statistics.mean(used.private for used in usage.values()) if usage else float("nan")


_HELD = f"import os; held = os.urandom({TREE_BYTES}); print(1, flush=True); input()"
# Says when it is awake, every two milliseconds.
_TICKS = "import time\nwhile True: print(time.time(), flush=True); time.sleep(0.002)"


async def saved(templates: str) -> dict[str, float]:
    """Seconds to save and to restore a tree of processes, and to move it; what is saved, to what was its own."""
    taken, restored, stills, ratios = [], [], [], []
    key = secrets.token_hex(32)
    with open(os.open(f"{templates}/key", os.O_WRONLY | os.O_CREAT, 0o600), "w") as f:
        f.write(key)
    command = [sys.executable, "-m", "launchers.sandboxd", "--port=0", f"--templates={templates}/layers"]
    command += ["--no_key", f"--peer_key_file={templates}/key"]
    daemon = subprocess.Popen([*command, f"--snapshots={templates}/there"], stdout=subprocess.PIPE, text=True)
    try:
        address = daemon.stdout.readline().split()[-1]
        options = {"templates": f"{templates}/layers", "snapshots": f"{templates}/here", "key": key}
        async with SandboxPool(max_sandboxes=4, **options) as pool:
            for _ in range(_SAVES.value):
                sandbox = await pool.create(Template("tree"))
                held = await sandbox.start(f'exec {_PYTHON} -I -S -c "{_HELD}"', stdin=None)
                await anext(aiter(held))
                ticks = await sandbox.start(f'exec {_PYTHON} -I -S -c "{_TICKS}"')
                own = (await pool.usage())[sandbox.id]
                started = time.perf_counter()
                snapshot = await sandbox.snapshot()
                taken.append(time.perf_counter() - started)
                [record] = await pool.snapshots()
                ratios.append(record.bytes / (own.private - own.kernel))
                started = time.perf_counter()
                copy = await pool.restore(snapshot)
                restored.append(time.perf_counter() - started)
                await copy.kill()
                await pool.delete_snapshot(snapshot)
                moving = asyncio.create_task(sandbox.migrate(address))
                stills.append(await longest_gap(ticks, moving))
                await sandbox.kill()
    finally:
        daemon.terminate()
        daemon.wait()
        daemon.stdout.close()
    return {
        "checkpoint_s": statistics.median(taken),
        "restore_s": statistics.median(restored),
        "blackout_s": statistics.median(stills),
        "image_over_dirty": statistics.median(ratios),
    }


async def cloned() -> dict[str, float]:
    """Milliseconds to the end of a clone's first command, and its memory to that of a machine that has booted."""
    first, shares = [], []
    template = Template("machine", memory_bytes=96 << 20, disk_bytes=32 << 20)
    async with MachinePool("qemu", max_sandboxes=_CLONES.value + 1) as pool:
        await (await pool.create(template)).kill()  # the template is saved from here on
        cold, end_cold = await pool.boot(template)
        for _ in range(_CLONES.value):
            started = time.perf_counter()
            sandbox = await pool.create(template)
            await sandbox.exec("true")
            first.append(time.perf_counter() - started)
            shares.append((await pool.usage())[sandbox.id].private / cold.private_bytes())
        await end_cold()
    return {
        "clone_first_command_ms": 1e3 * statistics.median(first),
        "clone_private_ratio": statistics.median(shares),
    }


async def machines(backend: str) -> dict[str, float]:
    """What sandboxes of a kind of machine cost; nothing where this host has none. Templates' machines are there."""
    made, ran, own, taken, restored = [], [], [], [], []
    template = Template("machine", memory_bytes=96 << 20, disk_bytes=32 << 20)
    with tempfile.TemporaryDirectory() as folder:
        async with MachinePool(backend, max_sandboxes=4, snapshots=folder) as pool:
            await (await pool.create(template)).kill()
            for _ in range(_CLONES.value):
                started = time.perf_counter()
                sandbox = await pool.create(template)
                made.append(time.perf_counter() - started)
                for _ in range(EXECS):
                    await asyncio.sleep(_THINK_S.value)
                    started = time.perf_counter()
                    await sandbox.exec("true")
                    ran.append(time.perf_counter() - started)
                own.append((await pool.usage())[sandbox.id].private)
                started = time.perf_counter()
                saved = await sandbox.snapshot()
                taken.append(time.perf_counter() - started)
                started = time.perf_counter()
                copy = await pool.restore(saved)
                restored.append(time.perf_counter() - started)
                await asyncio.gather(copy.kill(), sandbox.kill())
                await pool.delete_snapshot(saved)
    return {
        f"{backend}_create_p50_ms": 1e3 * statistics.median(made),
        f"{backend}_exec_p50_ms": 1e3 * statistics.median(ran),
        f"{backend}_private_mb": statistics.median(own) / MB,
        f"{backend}_checkpoint_s": statistics.median(taken),
        f"{backend}_restore_s": statistics.median(restored),
    }


async def longest_gap(ticks: Process, moving: asyncio.Task) -> float:
    """Seconds that the process that ticks stood still at most, while it moved."""
    began, until, rest, times = time.time(), None, b"", []
    async for output in ticks:
        *lines, rest = (rest + output.data).split(b"\n")
        times += [float(line) for line in lines]
        if moving.done():
            moving.result()
            until = until or time.time() + 0.1
            if times and times[-1] > until:
                break
    return max(after - before for before, after in itertools.pairwise(at for at in times if at > began))


def say(text: str, result: dict) -> None:
    print(text.format(**result), flush=True)


async def run(templates: str) -> dict:
    """The figures, printed as they come."""
    result: dict = {}
    async with SandboxPool(max_sandboxes=_ALIVE.value, templates=templates) as pool:
        host = {"mode": pool.host["mode"], "cgroups": pool.host["cgroups"]}
        await (await pool.create(Template("first"))).kill()
        result |= await times(pool)
        say("create {create_p50_ms:.2f} ms ({create_min_ms:.2f} at best)", result)
        say("exec {exec_p50_ms:.2f} ms ({exec_min_ms:.2f} at best), at once {exec_at_once_p50_ms:.2f} ms", result)
        result |= await crowd(pool)
        say("{alive} alive, {creates_per_s:.0f} created a second, {idle_mb:.2f} MB each when idle", result)
        say("to ask for the memory of 500 once a second takes {accounting_share:.1%} of a core", result)
    own = await charged(Template("own"), _OWN, _PRIVATE.value, templates)
    warm = await charged(Template("warm", setup=(_SETUP,)), _MAPPED, _SHARED.value, templates)
    result |= {"per_gib_private": GIB / own, "per_gib_shared": (GIB - WARM_BYTES) / warm}
    result |= {"private_mb": own / MB, "shared_mb": warm / MB}
    say("50 MiB of warm state: {private_mb:.1f} MB each as their own, {shared_mb:.2f} MB as a template's", result)
    say("in a GiB: {per_gib_private:.0f} and {per_gib_shared:.0f}", result)
    if find_criu()[0] is None:
        print(f"not saved: {find_criu()[1]}")
    else:
        result |= await saved(templates)
        say("25 MB of processes: saved in {checkpoint_s:.3f} s, restored in {restore_s:.3f} s", result)
        say("what is saved is {image_over_dirty:.2f} of what was its own", result)
        say("moved to another daemon: it stood still for {blackout_s:.3f} s", result)
    try:
        result |= await cloned()
        say("a clone of a virtual machine: first command after {clone_first_command_ms:.0f} ms", result)
        say("its own memory is {clone_private_ratio:.2f} of that of one that has booted", result)
    except SandboxUnsupported as error:
        print(error)
    for backend in BACKENDS:
        try:
            result |= await machines(backend)
        except SandboxUnsupported as error:
            print(error)
            continue
        at, ran = result[f"{backend}_create_p50_ms"], result[f"{backend}_exec_p50_ms"]
        print(f"{backend}: create {at:.0f} ms, exec {ran:.1f} ms, {result[f'{backend}_private_mb']:.1f} MB of its own")
        print(f"saved in {result[f'{backend}_checkpoint_s']:.3f} s, restored in {result[f'{backend}_restore_s']:.3f} s")
    return {key: round(value, 4) for key, value in result.items()} | host


def main(argv) -> None:
    del argv
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request otherwise
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(run(folder))))


if __name__ == "__main__":
    program.run(main)

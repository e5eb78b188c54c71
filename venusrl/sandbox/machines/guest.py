"""What the guests of virtual machines have in common (guest.c), whatever runs them."""

import asyncio
import os
import struct
import time
from typing import Protocol

from venusrl.core.errors import SandboxError
from venusrl.sandbox.contract import MIB, Template
from venusrl.sandbox.machines.backend import Streams
from venusrl.sandbox.places import variables

ENTROPY_BYTES = 32
GUEST_MIB = 288  # what the guest's kernel and its file system take of its memory
# The guest's kernel limits all of it together.
CGROUPS = {"memory": "guest", "pids": "guest", "cpu": None, "freezer": "guest"}
WAIT_S = 120.0  # for a boot; without hardware virtualization it takes seconds
_PATH = "/usr/local/bin:/usr/bin:/bin"


def memory_mib(template: Template) -> int:
    """Of the guest."""
    return template.memory_bytes // MIB + GUEST_MIB


def find_accelerator() -> str:
    """It is "kvm" where this host lets machines have it, else "tcg", which runs them in software.

    KVM that is itself within a virtual machine of the PVM kind runs kernels that are made for it alone.
    """
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK) and not os.path.isdir("/sys/module/kvm_pvm")
    return "kvm" if usable else "tcg"


def configuration(template: Template) -> list[str]:
    """What a guest is told of the sandbox that it is to be; see guest.c."""
    numbers = (template.disk_bytes, template.pids, template.file_bytes, template.output_bytes)
    return [*map(str, numbers), *(f"{key}={value}" for key, value in variables(template, _PATH).items())]


class Guest(Protocol):
    """A machine, to what is in it. Attributes: control: reader and writer of guest.c's port."""

    control: Streams

    def complaint(self) -> str:
        """See Machine.complaint."""


async def introduce(guest: Guest, template: Template) -> None:
    """Tells a guest that has come up what it is to be. SandboxError where it does not come up."""
    await _hear(guest, b"up")
    data = b"".join(text.encode() + b"\0" for text in configuration(template))
    guest.control[1].write(struct.pack("<I", len(data)) + data)


async def refresh(guest: Guest) -> None:
    """Gives a guest the time, and entropy of its own. SandboxError where it does not take them."""
    guest.control[1].write(struct.pack("<Q", time.time_ns()) + os.urandom(ENTROPY_BYTES))
    await _hear(guest, b"ok")


async def _hear(guest: Guest, word: bytes) -> None:
    try:
        async with asyncio.timeout(WAIT_S):  # not wait_for, which in Python 3.11 can swallow a caller's giving up
            said = await guest.control[0].readexactly(len(word))
    except TimeoutError:
        said = f"nothing for {WAIT_S:.0f} s"
    except (asyncio.IncompleteReadError, ConnectionError):
        said = "nothing, and ended"
    if said != word:
        raise SandboxError(f"the guest says {said} where it should say {word}: {guest.complaint()}")

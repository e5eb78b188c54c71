"""Who the other nodes are, and how two nodes know each other without showing their key.

Nodes of a cluster have one key. A node that calls another first asks for a challenge; both put a number nobody has used
before into it, and the one that is called proves first that it has the key. Then every call carries a proof of its own:

    session = HMAC-SHA256(key, "session" + what both sent);  proof = HMAC-SHA256(session, METHOD, path, number)

So nothing that goes over the network opens anything: not the key, and not a call that was seen (a number holds once,
a session for `SESSION_S`). What is sent is neither secret nor kept from being changed on the way: keep the network
between nodes private.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

import httpx
from starlette.datastructures import Headers
from starlette.types import Scope

from venusrl.core.door import target_of
from venusrl.core.errors import ConfigError, SandboxError, SandboxUnsupported

CHALLENGE = "/challenge"
SESSION_S = 600.0  # that a challenge holds
_MOST_SESSIONS = 1000
_MOST_CALLS = 100_000  # of a session
_NONCE = re.compile(r"[0-9a-f]{32}")
_PROOF = re.compile(r"([0-9a-f]{32}):(\d{1,9}):([0-9a-f]{64})")
HEADER = "x-venusrl-proof"
_NODE = "venusrl.node"
# What nodes ask of one another; the rest is for clients.
_ALLOWED = re.compile(r"/health|/arrivals/[^/]+(/commit)?|/templates/[^/]+|/sandboxes/[^/]+(/agent)?")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ADDRESS = re.compile(r"https?://[^/\s@?#]+|unix:/\S+")


def _mac(key: bytes, *parts: str) -> bytes:
    """Of parts none of which holds a NUL."""
    return hmac.new(key, "\0".join(parts).encode("utf-8", "surrogateescape"), hashlib.sha256).digest()


def parse_peers(entries: list[str]) -> dict[str, str]:
    """Addresses by name, from NAME=ADDRESS each.

    Raises:
      ConfigError: an entry is something else, or a name comes twice.
    """
    peers: dict[str, str] = {}
    for entry in entries:
        name, _, address = entry.partition("=")
        if not _NAME.fullmatch(name) or not _ADDRESS.fullmatch(address) or name in peers:
            raise ConfigError(
                f"--peers: {entry[:80]!r} is none; give NAME=http://HOST:PORT or NAME=unix:/PATH, each name once"
            )
        peers[name] = address
    return peers


@dataclass
class _Session:
    """One that was begun here; `used` are numbers of calls."""

    key: bytes
    until: float
    used: set[int] = field(default_factory=set)


class Gatekeeper:
    """The side that is called.

    Args:
      key: of the nodes; empty: none may call.
      clock: seconds.
    """

    def __init__(self, key: str, clock: Callable[[], float] = time.monotonic):
        self._key = key.encode()
        self._clock = clock
        self._sessions: dict[str, _Session] = {}

    def challenge(self, theirs: str) -> dict:
        """What a node is told that has sent 32 hexadecimal digits of its own.

        Raises:
          ConfigError: it has sent something else.
          SandboxUnsupported: this node has no key.
        """
        if not _NONCE.fullmatch(theirs):
            raise ConfigError("nonce: give 32 hexadecimal digits")
        if not self._key:
            raise SandboxUnsupported(
                "that node takes no sandboxes of others: start it with this node's --peer_key_file"
            )
        ours, now = secrets.token_hex(16), self._clock()
        self._sessions = {name: one for name, one in self._sessions.items() if one.until > now}
        while len(self._sessions) >= _MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[ours] = _Session(_mac(self._key, "session", theirs, ours), now + SESSION_S)
        return {"nonce": ours, "proof": _mac(self._key, "called", theirs, ours).hex()}

    def admits_scope(self, scope: Scope) -> bool:
        """Whether a call (its ASGI scope) is another node's, or the challenge before that; a proof holds once."""
        if scope["path"] == CHALLENGE:
            return True
        if _NODE not in scope:
            scope[_NODE] = self.admits(scope.get("method", "GET"), target_of(scope), Headers(scope=scope))
        return scope[_NODE]

    def admits(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a call is another node's, and one that nodes make."""
        found = _PROOF.fullmatch(headers.get(HEADER, ""))
        session = self._sessions.get(found[1]) if found else None
        if session is None or session.until <= self._clock() or not _ALLOWED.fullmatch(path.partition("?")[0]):
            return False
        number = int(found[2])
        proof = _mac(session.key, method, path, str(number)).hex()
        if not hmac.compare_digest(proof, found[3]) or number in session.used or len(session.used) >= _MOST_CALLS:
            return False
        session.used.add(number)
        return True


class Caller(httpx.Auth):
    """The side that calls: proves each call, and begins a session where there is none, or it is not known any more."""

    def __init__(self, key: str):
        self._key = key.encode()
        self._session: tuple[str, bytes] | None = None
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """See httpx.Auth. SandboxError where the other side has not this key."""
        for is_last in (False, True):
            async with self._lock:
                if self._session is None:
                    theirs = secrets.token_hex(16)
                    target = request.url.copy_with(raw_path=f"{CHALLENGE}?nonce={theirs}".encode())
                    answer = yield httpx.Request("GET", target)
                    await answer.aread()
                    self._session = self._checked(theirs, answer)
            request.headers[HEADER] = self.proof(request.method, request.url.raw_path.decode())
            response = yield request
            if response.status_code != 401:
                return
            self._session = None  # that node has begun anew
            if is_last or "transfer-encoding" in request.headers:  # what was sent in parts is not there any more
                return
            await response.aread()

    def proof(self, method: str, path: str) -> str:
        """Of one call, once a session has begun."""
        if self._session is None:
            raise SandboxError("no session with that node has begun")
        name, key = self._session
        number = next(self._numbers)
        return f"{name}:{number}:{_mac(key, method, path, str(number)).hex()}"

    def _checked(self, ours: str, answer: httpx.Response) -> tuple[str, bytes]:
        try:
            said = answer.json() if answer.is_success else {}
            theirs, proof = str(said["nonce"]), str(said["proof"])
        except (ValueError, KeyError, TypeError):
            theirs, proof = "", ""
        if not _NONCE.fullmatch(theirs) or not hmac.compare_digest(
            _mac(self._key, "called", ours, theirs).hex(), proof
        ):
            raise SandboxUnsupported("that node has not this node's --peer_key_file; nothing was sent there")
        return theirs, _mac(self._key, "session", ours, theirs)

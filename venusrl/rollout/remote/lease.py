"""Who a worker belongs to. A pure state machine: the time comes with each call.

A run claims a worker under a session, a word that it draws anew whenever it begins with the worker; every call of that
session renews the claim. Weights, requests and KV of one session never meet those of another. A run that is started
again need not wait for the lease of its old process; the old process, if it still lives, then has to.
"""

import math

from venusrl.core.errors import VenusError

LEASE_S = 15.0  # of silence, after which another run may claim the worker


class Held(VenusError):
    """The worker belongs to another run, or to another session of this one."""


class Lease:
    """Attributes:
    run: whose the worker is, or was last; "" where nobody has claimed it yet.
    session: of that run, the one that may call.
    """

    def __init__(self, seconds: float = LEASE_S):
        self.run = self.session = self._process = ""
        self._seconds = seconds
        self._until = -math.inf

    def left(self, now: float) -> float:
        """Seconds until another run may claim the worker; 0 where it may already."""
        return max(0.0, self._until - now)

    def claim(self, now: float, run: str, process: str, session: str, start: bool, first: bool = False) -> bool:
        """Takes or renews the lease; whether the session is a new one.

        Args:
          process: of the run.
          start: the session begins. Only then may it be another than the last.
          first: the process has had none with this worker.

        Raises:
          Held: another run has it, or the session is one that has ended.
        """
        if self.left(now) and (run != self.run or (process != self._process and not (start and first))):
            raise self._held(now)
        changed = session != self.session
        if changed and not start:
            raise Held(f"session {session} of run {run} has ended here; begin another one")
        self.run, self._process, self.session, self._until = run, process, session, now + self._seconds
        return changed

    def check(self, now: float, session: str) -> None:
        """Lets a call of `session` pass ("" is a caller without one), and renews its lease.

        Raises:
          Held: the worker belongs to somebody else.
        """
        if session and session == self.session:
            self._until = now + self._seconds
        elif session and not self.left(now):
            raise Held(f"session {session} has no lease here; claim one")
        elif self.left(now):
            raise self._held(now)

    def leave(self, session: str) -> None:
        """The session is over; others need not wait."""
        if session == self.session:
            self._until = -math.inf

    def _held(self, now: float) -> Held:
        return Held(
            f"the worker belongs to run {self.run} for {self.left(now):.0f} s more; stop that run, wait until it is "
            "over, or give another worker"
        )

"""What a client may think of its worker: a pure state machine. Time and what was heard come as events.

AWAY -> JOINING -> CONNECTED <-> UNREACHABLE
  ^________|___________|______________|
"""

import enum


class State(enum.StrEnum):
    AWAY = "away"  # never there yet, or lost: it has no requests
    JOINING = "joining"  # it answers, and gets weights before it gets requests
    CONNECTED = "connected"
    UNREACHABLE = "unreachable"  # it does not answer; its requests wait for it


class Link:
    """Attributes:
    state: see State.
    reason: why it is AWAY or UNREACHABLE.
    """

    def __init__(self, reconnect_s: float):
        """Args:
        reconnect_s: seconds for which requests wait for a worker that does not answer.
        """
        self.state = State.AWAY
        self.reason = "nobody has asked yet"
        self._reconnect_s = reconnect_s
        self._since = 0.0
        self._instance: str | None = None

    def answered(self, instance: str) -> None:
        """It answers, as this process."""
        if self.state is State.AWAY:
            self.state, self._instance = State.JOINING, instance
        elif instance != self._instance:
            self.lost("it was started again")
        elif self.state is State.UNREACHABLE:
            self.state = State.CONNECTED

    def joined(self) -> None:
        """It has weights, and takes requests."""
        if self.state is State.JOINING:
            self.state = State.CONNECTED

    def left(self, now: float) -> float:
        """Seconds for which requests still wait for it, where it is UNREACHABLE."""
        return self._since + self._reconnect_s - now

    def silent(self, now: float, why: str, since: float | None = None) -> None:
        """A call came to nothing. `since`: when it was made; it is `now`."""
        if self.state is State.CONNECTED:
            self.state, self._since = State.UNREACHABLE, now if since is None else since
        elif self.state is State.JOINING:
            self.state = State.AWAY
        self.reason = why
        self.passed(now)

    def passed(self, now: float) -> None:
        """It is `now`."""
        if self.state is State.UNREACHABLE and self.left(now) <= 0:
            self.state = State.AWAY

    def lost(self, why: str) -> None:
        """It cannot go on where it was: it is gone, was started again, or is somebody else's."""
        self.state, self.reason = State.AWAY, why

"""Every error VenusRL raises on purpose. A message names the field, the value and the fix."""


class VenusError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(VenusError):
    """A configuration field is unknown, of the wrong type or out of range. Raised before anything starts."""


class ContractError(VenusError):
    """A caller broke the contract of a core type (for example tokens and logprobs of different lengths)."""


class CheckpointError(VenusError):
    """A checkpoint is missing, corrupt, or belongs to another model."""


class NonFiniteError(VenusError):
    """Too many consecutive optimizer steps had a non-finite loss or gradient."""


class WorkerError(VenusError):
    """A rollout worker lost a request; the trajectory can be generated again elsewhere."""


class WorkerLost(WorkerError):
    """A worker in another process is away; its requests can go on elsewhere, or here once it is back."""


class TaskError(VenusError):
    """An environment failed in reset, step or grade; the trajectory is refilled, never given reward 0."""


class SandboxError(VenusError):
    """Base of sandbox failures."""


class SandboxLost(SandboxError):
    """The sandbox is gone.

    Attributes:
      reason: one of "killed", "oom", "ttl", "node-lost", "closed", "lease" (its owner was away for too long), "start"
        (it was not there within Template.start_s), "protocol" (its agent said what no agent says), or "unknown" where a
        daemon has never heard of it.
    """

    def __init__(self, sandbox_id: str, reason: str):
        super().__init__(f"sandbox {sandbox_id} is gone (reason: {reason}); create a new one from its template")
        self.sandbox_id = sandbox_id
        self.reason = reason


class SandboxUnsupported(SandboxError):
    """This host or backend cannot do what was asked; the message says why and what would make it work."""


class SandboxCapacity(SandboxError):
    """The pool refuses a new sandbox for now; ask again later."""

"""Isolated places where model-written commands run: the contract, the pool, and the process backend.

Names are resolved on first use (PEP 562): the spawner process imports this package too, and must stay a few
megabytes small because every sandbox is a fork of it.
"""

TYPE_CHECKING = False  # what typing.TYPE_CHECKING is, without its 5 ms import
if TYPE_CHECKING:
    from venusrl.sandbox.check import host_report
    from venusrl.sandbox.contract import (
        ExecResult,
        FileChange,
        FileInfo,
        Output,
        Process,
        ProcessInfo,
        Sandbox,
        Template,
    )
    from venusrl.sandbox.pool import PoolStats, SandboxPool

__all__ = [
    "ExecResult",
    "FileChange",
    "FileInfo",
    "Output",
    "PoolStats",
    "Process",
    "ProcessInfo",
    "Sandbox",
    "SandboxPool",
    "Template",
    "host_report",
]


def __getattr__(name: str):
    if name == "host_report":
        from venusrl.sandbox import check as module
    elif name in ("SandboxPool", "PoolStats"):
        from venusrl.sandbox import pool as module
    elif name in __all__:
        from venusrl.sandbox import contract as module
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)

"""Stands in for SGLang's compiled kernels, which exist for CUDA only. On a CPU without AMX none is called."""

__version__ = "0.0.0+stub"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_, **__):
        raise RuntimeError(f"sgl_kernel.{name} was called, and there is none for this CPU")

    return kernel

"""Stands in for torchvision, which serving text imports and does not call: any name, and any module below it."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0+stub"


class _Kind(type):
    """Classes whose every attribute is a string, as enumerations' members are compared."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _name(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kind(name, (), {})


__getattr__ = _name


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _name
        return module

    def exec_module(self, module): ...


sys.meta_path.insert(0, _Modules())

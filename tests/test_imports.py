"""Every module imports, under every supported Python: the two pin different JAX and Flax releases."""

import importlib
import pkgutil

import pytest
from absl import flags

import configs
import envs
import launchers
import venusrl

MODULES = sorted(
    module.name
    for package in (venusrl, envs, configs, launchers)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


@pytest.mark.parametrize("name", MODULES)
def test_imports(name):
    # Programs define flags of the same names; each is alone in its own process, but not here.
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        for flag in list(defined) if module.startswith("launchers.") else ():
            delattr(flags.FLAGS, flag.name)
    importlib.import_module(name)


def test_modules_were_found():
    assert len(MODULES) > 50

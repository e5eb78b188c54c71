"""Two sets of weights, made once."""

import pytest

from . import tiny


@pytest.fixture(scope="session")
def weights():
    return tiny.params(0)


@pytest.fixture(scope="session")
def newer():
    return tiny.params(1)

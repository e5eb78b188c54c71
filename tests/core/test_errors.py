import inspect

import pytest

from venusrl.core import errors


def test_every_error_is_a_venus_error():
    found = [e for _, e in inspect.getmembers(errors, inspect.isclass) if issubclass(e, Exception)]
    assert len(found) >= 9
    assert all(issubclass(e, errors.VenusError) for e in found)
    assert all(inspect.getdoc(e) for e in found)


@pytest.mark.parametrize("kind", [errors.SandboxLost, errors.SandboxUnsupported, errors.SandboxCapacity])
def test_sandbox_errors_are_one_family(kind):
    assert issubclass(kind, errors.SandboxError)


def test_a_lost_sandbox_names_itself_the_reason_and_the_fix():
    error = errors.SandboxLost("sb-1", "oom")
    assert (error.sandbox_id, error.reason) == ("sb-1", "oom")
    assert str(error) == "sandbox sb-1 is gone (reason: oom); create a new one from its template"

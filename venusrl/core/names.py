"""A name that selects one of several things: known, or refused with those that are."""

import difflib
from collections.abc import Iterable

from venusrl.core.errors import ConfigError


def check_name(field: str, name: object, known: Iterable[str]) -> None:
    """Raises:
    ConfigError: `name` is not one of `known`; lists them, and the nearest first.
    """
    known = list(known)
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1) if isinstance(name, str) else []
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{field}={name!r} is unknown; one of {', '.join(known)}{meant}")

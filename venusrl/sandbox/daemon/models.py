"""What the bodies of requests hold, as pydantic models; numbers within the bounds of sandbox/bounds.py."""

import base64
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from venusrl.core.errors import ConfigError
from venusrl.sandbox import bounds

T = TypeVar("T", bound=BaseModel)


def _bytes(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("give bytes as base64")
    return base64.b64decode(value, validate=True)


def _no_flag(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("give a number")
    return value


def _seconds(value: float) -> float:
    if not bounds.SHORTEST_S <= value <= bounds.LONGEST_S:
        raise ValueError(f"give a positive number of seconds, {bounds.SHORTEST_S:g} to {bounds.LONGEST_S:g}")
    return value


Seconds = Annotated[float, BeforeValidator(_no_flag), AfterValidator(_seconds)]
Bytes = Annotated[bytes, BeforeValidator(_bytes)]
_LEAST, _MOST = bounds.WHOLE["memory_bytes"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Lease(_Body):
    """lease_s: seconds that the sandbox outlives the last call that names it."""

    lease_s: Seconds = 60.0


class Create(Lease):
    """One of a template (its fields, checked by Template itself) and a snapshot's id."""

    template: dict[str, Any] = Field(default_factory=dict)
    snapshot: Annotated[str, Field(max_length=bounds.MOST_NAME)] | None = None


class Migrate(_Body):
    """node: name of a peer, or its address as it is configured."""

    node: Annotated[str, Field(min_length=1, max_length=bounds.MOST_PATH)]


class Resize(_Body):
    """memory_bytes: see Template."""

    memory_bytes: Annotated[int, BeforeValidator(_no_flag), Field(ge=_LEAST, le=_MOST)]


class Exec(_Body):
    """See Sandbox.exec."""

    script: Annotated[str, Field(max_length=bounds.MOST_BODY)]
    timeout_s: Seconds = 30.0
    silent_s: Seconds | None = None
    user: Annotated[str, Field(max_length=bounds.MOST_NAME)] = ""
    cwd: Annotated[str, Field(max_length=bounds.MOST_PATH)] | None = None
    user_env: dict[str, str] | None = None
    stdin: Bytes = b""


def parsed(kind: type[T], body: Any) -> T:
    """The body of a request.

    Raises:
      ConfigError: in one line, the first field that is wrong, its value, and why.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part)[:80] for part in first["loc"]) or "the body"
        why = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}={bounds.shown(first['input'])}: {why}") from None

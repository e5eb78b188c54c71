"""What a worker's HTTP door takes: the bodies, checked, and how long either side waits."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from venusrl.core.errors import ContractError
from venusrl.rollout.worker import LONGEST_ID, MOST_TOP, Chunk

SESSION_HEADER = "venus-session"  # whose call it is; see lease.py
BEAT_S = 5.0  # seconds after which a stream in which nothing happens says so, with an empty line

_LONG = 2**63
Id = Annotated[str, Field(max_length=LONGEST_ID)]  # pydantic takes no lone surrogates in text
Int32 = Annotated[int, Field(ge=0, lt=2**31)]
Int64 = Annotated[int, Field(ge=-_LONG, lt=_LONG)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class GenerateBody(Body):
    """A venusrl.rollout.worker.Request."""

    trajectory: Id
    tokens: Annotated[list[Int32], Field(fail_fast=True)]
    max_tokens: Int64
    temperature: Annotated[float, Field(ge=0)] = 1.0
    seed: Int64 = 0
    namespace: Id = ""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] = 0


class TrajectoryBody(Body):
    trajectory: Id


class Order(Body):
    trajectory: Id
    priority: Int64
    resident: bool


class PrioritiseBody(Body):
    orders: list[Order]


class ReleaseBody(Body):
    trajectories: list[Id]


class ClaimBody(Body):
    """Attributes:
    run: whose lease it is; it is told to others who ask for the worker.
    session: drawn anew for each time that the run begins with this worker.
    process: of the run, a word that it has drawn.
    start: the session begins now.
    first: the process has had none with this worker before.
    """

    run: Annotated[str, Field(min_length=1, max_length=1024)]
    process: Annotated[str, Field(min_length=1, max_length=128)]
    session: Annotated[str, Field(min_length=1, max_length=128)]
    start: bool = False
    first: bool = False


class Answer(BaseModel):
    """What a client reads; it takes what it does not know."""

    model_config = ConfigDict(strict=True)


class Failure(Answer):
    message: str


class ChunkAnswer(Answer):
    """A venusrl.rollout.worker.Chunk; or, with `error`, what ended the turn and the status it would have had."""

    tokens: list[int] = []
    logprobs: list[float] = []
    version: int = 0
    stop: str | None = None
    top: list[list[tuple[int, float]]] | None = None
    error: Failure | None = None
    status: int = 503

    def chunk(self) -> Chunk:
        return Chunk(self.tokens, self.logprobs, self.version, self.stop, self.top)


class Description(Answer):
    """Attributes:
    instance: a word drawn by the process at its start.
    weights_of: the session that gave it its weights.
    """

    slots: int
    max_length: int
    kv_tokens: int
    version: int
    failure: str | None
    instance: str
    weights_of: str | None = None
    load: dict[str, int | float]
    model: dict[str, Any] = {}


class Applied(Answer):
    version: int


class Taken(Answer):
    tokens: int


def parse(kind: type[Body] | type[Answer], data: bytes | str) -> Any:
    """A body of `kind`.

    Raises:
      ContractError: what is wrong with the first field that is.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        given = "" if first["type"] in ("missing", "json_invalid") else f"={_short(first['input'])}"
        said = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise ContractError(f"{where or 'the body'}{given}: {said}") from None


def _short(value: Any) -> str:
    text = repr(value)[:80]
    return text.encode("ascii", "backslashreplace").decode()

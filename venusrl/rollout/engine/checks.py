"""What of a request can be run: every field is looked at before any of it reaches the engine.

Requests come from other programs, too. One that passes here cannot fail for what it says.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from venusrl.core.errors import ContractError
from venusrl.rollout.worker import MOST_TOP, Request

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)  # a smaller one is 0 on a device that flushes subnormal numbers


def check_text(what: str, value: Any) -> None:
    """Raises ContractError where `value` is no text that can be written as UTF-8."""
    if not isinstance(value, str):
        raise ContractError(f"{what} is {_shown(value)}; give text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ContractError(f"{what}: character {error.start} of {_shown(value)} is half a surrogate pair") from error


def check_standing(trajectory: Any, priority: Any, resident: Any) -> None:
    """Raises ContractError where these are no arguments of `prioritise`."""
    check_text("trajectory", trajectory)
    if type(priority) is not int or not isinstance(resident, bool):
        raise ContractError(
            f"{trajectory}: priority={_shown(priority)}, resident={_shown(resident)}; give an int and a bool"
        )


def check_fields(request: Request, vocab: int) -> None:
    """Types and ranges of all fields; what depends on the size of the engine is its own to check.

    Args:
      vocab: number of tokens of the model.

    Raises:
      ContractError: names the field, its value and what it may be; of a token also the position.
    """
    check_text("trajectory", request.trajectory)
    where = f"request of {request.trajectory}"
    check_text(f"{where}: namespace", request.namespace)
    _check_int(where, "max_tokens", request.max_tokens, 1, None)
    _check_int(where, "seed", request.seed, 0, 2**31 - 1)
    _check_int(where, "top_logprobs", request.top_logprobs, 0, MOST_TOP)
    _check_temperature(where, request.temperature)
    _check_tokens(where, request.tokens, vocab)


def check_params(params: Any, present: Any) -> None:
    """Raises ContractError where new weights are not of the names and shapes of the present ones; names the first."""
    given, wanted = (
        {jax.tree_util.keystr(path): np.shape(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (params, present)
    )
    for name in sorted(given.keys() | wanted.keys()):
        if given.get(name) != wanted.get(name):
            raise ContractError(
                f"new weights: {name} has shape {given.get(name)}, the model of this worker {wanted.get(name)}; "
                "they are of another model"
            )


def first_wrong(tokens: Sequence[Any], vocab: int) -> tuple[int, Any] | None:
    """(place, value) of the first that is no id of a vocabulary of so many; None where all are. At least one token."""
    # Three passes in C; a context may have tens of thousands of tokens, and the loop that serves everybody waits.
    if set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < vocab:
        return None
    return next((i, t) for i, t in enumerate(tokens) if type(t) is not int or not 0 <= t < vocab)


def device_temperature(temperature: float) -> float:
    """The temperature as a float32 that no device takes for 0 unless it is 0.

    Below the smallest normal float32 the next tokens are what they are at it: two logits that differ, differ by more.
    """
    return max(float(temperature), SMALLEST) if temperature > 0 else 0.0


def _check_int(where: str, name: str, value: Any, least: int, most: int | None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        end = "or more" if most is None else f"to {most}"
        raise ContractError(f"{where}: {name}={_shown(value)}; give a whole number, {least} {end}")


def _check_temperature(where: str, value: Any) -> None:
    number = isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
    if not number or not 0 <= value <= LARGEST:  # false of nan, too; an int may be too large for a float
        raise ContractError(f"{where}: temperature={_shown(value)}; give a number from 0 (greedy) to {LARGEST:.3g}")


def _check_tokens(where: str, tokens: Any, vocab: int) -> None:
    if not isinstance(tokens, (list, tuple)) or not tokens:
        raise ContractError(f"{where}: 0 context tokens, or no list of them ({_shown(tokens)}); give at least one id")
    wrong = first_wrong(tokens, vocab)
    if wrong is None:
        return
    at, bad = wrong
    raise ContractError(
        f"{where}: token {at} of the context is {_shown(bad)}; the model's vocabulary has {vocab} tokens, "
        f"give ids from 0 to {vocab - 1}"
    )


def _shown(value: Any) -> str:
    """`value` for a message: short, and of characters that any log can hold."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"  # Python refuses to print one of more than some thousand digits
    if isinstance(value, (str, bytes, int, float, type(None), np.generic)):
        text = ascii(value)
        return text if len(text) <= 80 else text[:77] + "..."
    return f"a {type(value).__name__}"

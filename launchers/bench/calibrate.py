"""Measures what an engine's steps cost, and what a turn costs around them, for the simulator."""

import statistics
import time

import numpy as np

from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.worker import Request
from venusrl.sim.cost import Measured


def measured_cost(engine: Engine, kv_tokens: int, repeats: int = 9) -> Measured:
    """Times decode at 1, half of and all slots, and prefill of short and long prompts. The engine must be idle."""
    slots, length = engine.options.slots, engine.options.max_length
    decode = []
    for requests in sorted({1, max(1, slots // 2), slots}):
        steps = [_decode_step_s(engine, requests) for _ in range(repeats + 1)][1:]  # the first compiles
        decode.append((requests, statistics.median(steps)))
    step_s = min(seconds for _, seconds in decode) * engine.options.decode_steps
    # Many lengths, so that what buckets pad is a part of the cost.
    lengths = np.linspace(17, 0.6 * length, 9).astype(int)
    times = [statistics.median([_first_chunk_s(engine, int(n)) for _ in range(repeats + 1)][1:]) for n in lengths]
    token_s, fixed_s = np.polyfit(lengths, np.array(times) - step_s, 1)
    return Measured(kv_tokens, tuple(decode), max(0.0, float(fixed_s)), max(0.0, float(token_s)))


def admit_s(turn_s: float, cost: Measured, engine: Engine, output: int, observation: int) -> float:
    """Seconds from admission until the engine has a request.

    What a turn of `turn_s` without a tool, measured on an idle service, has beyond its steps, and half a host turn: in
    a busy engine a request waits for the one under way.

    Args:
      turn_s: seconds of a turn that generates `output` tokens after an observation of `observation` tokens.
    """
    steps = cost.prefill_s([(observation, 0)]) + output * cost.decode_s(1, 0)
    return max(0.0, turn_s - steps) + engine.options.decode_steps * cost.decode_s(engine.options.slots, 0) / 2


def _decode_step_s(engine: Engine, requests: int) -> float:
    """Seconds of a token for each of `requests`."""
    chunks = 4
    for i in range(requests):
        engine.submit(Request(f"decode/{i}", _fresh(engine, 3), (chunks + 1) * engine.options.decode_steps, seed=i))
    engine.step()
    began = time.perf_counter()
    for _ in range(chunks):
        engine.step()
    took = time.perf_counter() - began
    for i in range(requests):
        engine.cancel(f"decode/{i}")
        engine.release(f"decode/{i}")
    return took / (chunks * engine.options.decode_steps)


def _first_chunk_s(engine: Engine, tokens: int) -> float:
    """Seconds of one prefill and one chunk."""
    engine.submit(Request("prefill/0", _fresh(engine, tokens), engine.options.decode_steps))
    began = time.perf_counter()
    while engine.busy:
        engine.step()
    took = time.perf_counter() - began
    engine.release("prefill/0")
    return took


def _fresh(engine: Engine, tokens: int) -> list[int]:
    """A prompt whose KV is not cached: it differs with what the engine has done so far."""
    rng = np.random.default_rng(engine.load().generated_tokens)
    return rng.integers(1, 20, tokens).tolist()

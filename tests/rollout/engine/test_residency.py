"""Whose row is taken and who starts first: what a policy's priority does in the JAX engine."""

import flax.linen as nn
import jax

from venusrl.models.config import ModelConfig
from venusrl.models.decoder import init_params
from venusrl.rollout.engine.engine import Engine
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.worker import Request


def test_requests_of_higher_priority_start_first_and_equals_in_order():
    config = ModelConfig(24, 16, 1, 2, 1, 8, 24, rope_theta=1e4, max_length=64)
    options = EngineOptions(
        slots=1, max_length=32, decode_steps=4, prefill_rows=(1,), prefill_tokens=(8,), read_lengths=()
    )
    engine = Engine(config, nn.unbox(init_params(config, jax.random.key(0))), 0, (99,), options)
    for name in ("low", "first", "second", "high"):
        engine.submit(Request(name, [1, 2], 4))
    engine.prioritise("high", 2, True)
    engine.prioritise("first", 1, False)
    engine.prioritise("second", 1, False)
    started = []
    while engine.busy:
        started += [request.trajectory for request, _ in engine.step()]
    assert started == ["high", "first", "second", "low"]
    engine.release("high")
    engine.prioritise("unknown", 1, True)  # it may have ended meanwhile

"""Whose row is taken and who starts first: what a policy's priority does in the JAX engine."""

import flax.linen as nn
import jax

from venusrl.models.config import ModelConfig
from venusrl.models.decoder import init_params
from venusrl.rollout.engine.engine import Engine, EngineOptions
from venusrl.rollout.engine.rows import RowTable
from venusrl.rollout.worker import Request


def idle_table(*names: str) -> RowTable:
    table = RowTable(len(names))
    for name in names:
        table.idle(table.acquire(name, [1, 2, 3]))
    return table


def test_rows_that_are_not_to_be_kept_go_first_then_the_least_recently_used():
    table = idle_table("a", "b", "c")
    table.kept |= {"a", "c"}
    order = []
    for name in ("x", "y", "z"):
        index = table.acquire(name, [1])
        order.append(index)
    homes = {"a": 0, "b": 1, "c": 2}
    assert order == [homes["b"], homes["a"], homes["c"]]
    assert table.evictions == 3 and table.acquire("w", [1]) is None


def test_a_released_trajectory_is_no_longer_kept():
    table = idle_table("a", "b")
    table.kept |= {"a"}
    table.release("a")
    assert table.kept == set()


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

"""KV that is no number spoils whoever's row or page it lies in, for 0 times it is none: it must not stay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from . import tiny
from .tiny import ask, run


def spike(weights):
    """Finite values that overflow on the way, as after a step that went wrong."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x * 1e25 if "mlp" in jax.tree_util.keystr(path) else x, weights
    )


def test_weights_that_overflow_fail_their_requests_and_good_ones_make_the_engine_whole(weights):
    for on_update in ("recompute", "keep"):
        engine = tiny.engine(weights, version=0, on_update=on_update)
        engine.set_weights(spike(weights), 1)
        requests = [ask(f"bad{i}", tiny.tokens(i, 9), 6) for i in range(9)]
        assert {c.stop for c in run(engine, requests).values()} == {"nan"}
        engine.submit(ask("left", tiny.tokens(99, 20), 6))  # its KV is computed and nobody ever asks for a logit
        engine._begin()
        engine._kv.fill_rows()
        engine._prefill(float("inf"))
        engine.cancel("left")
        engine.set_weights(weights, 2)
        done = run(engine, [ask(f"good{i}", tiny.tokens(50 + i, 5 + i), 6) for i in range(24)])
        for i in range(24):
            assert done[f"good{i}"].tokens == tiny.greedy(weights, tiny.tokens(50 + i, 5 + i), 6), on_update
        engine.check()


def test_kv_from_elsewhere_that_overflows_is_computed_again_and_spoils_nobody(weights):
    source, engine = tiny.engine(weights), tiny.engine(weights)
    context = tiny.tokens(1, 13)
    right = run(source, [ask("t", context, 4)])["t"].tokens
    prefix = source.export("t")
    huge = [jax.tree.map(lambda x: jnp.full_like(x, 3e38), block) for block in prefix.blocks]
    assert engine.bring(dataclasses.replace(prefix, blocks=huge)) > 0
    others = [ask(f"o{i}", tiny.tokens(20 + i, 7), 6) for i in range(6)]
    done = run(engine, [ask("t", [*context, *right], 6), *others])
    assert done["t"].tokens == tiny.greedy(weights, [*context, *right], 6)
    for i in range(6):
        assert done[f"o{i}"].tokens == tiny.greedy(weights, tiny.tokens(20 + i, 7), 6)
        assert np.isfinite(done[f"o{i}"].logprobs).all()
    engine.check()

"""Every attention against the reference, alone and inside the engine; one that is wrong is not used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from venusrl.core.errors import ConfigError
from venusrl.models.config import ModelConfig
from venusrl.rollout.engine import attention
from venusrl.rollout.engine.attention import Fused, Ragged, Reference, choose, disagreement
from venusrl.rollout.engine.engine import Engine

from . import tiny
from .tiny import ask, run


def paged(q_QNH, pages, lengths_R, table, starts, count, *, sm_scale):
    """What `ragged_paged_attention` computes for one query a sequence; its kernel runs on TPUs alone."""
    del starts, count
    rows = pages[table].reshape(len(lengths_R), -1, *pages.shape[2:])
    keys, values = rows[:, :, 0::2], rows[:, :, 1::2]
    group = q_QNH.shape[1] // keys.shape[2]
    keys, values = jnp.repeat(keys, group, 2), jnp.repeat(values, group, 2)
    scores = jnp.einsum("rnh,rsnh->rns", q_QNH, keys) * sm_scale
    scores = jnp.where(jnp.arange(rows.shape[1]) < lengths_R[:, None, None], scores, -1e30)
    return jnp.einsum("rns,rsnh->rnh", jax.nn.softmax(scores, -1), values)


OTHERS = [Fused("xla"), Ragged(paged)]


@pytest.mark.parametrize("other", OTHERS, ids=lambda a: a.name)
@pytest.mark.parametrize(("heads", "kv_heads", "width", "dtype"), [(4, 2, 8, "float32"), (6, 1, 16, "bfloat16")])
def test_it_computes_what_the_reference_does(other, heads, kv_heads, width, dtype):
    config = ModelConfig(64, 32, 2, heads, kv_heads, width, 48, rope_theta=1e4, max_length=128, dtype=dtype)
    assert disagreement(other, config) == ""


@pytest.mark.parametrize("other", OTHERS, ids=lambda a: a.name)
def test_an_engine_generates_the_same_with_it(other, weights, monkeypatch):
    monkeypatch.setattr("venusrl.rollout.engine.engine.choose", lambda name, config: (other, ""))
    engine = tiny.engine(weights, kv_tokens=60)
    contexts = {f"t{i}": tiny.tokens(i, 5 + 4 * i) for i in range(6)}
    for _ in range(2):
        done = run(engine, [ask(name, context, 6) for name, context in contexts.items()])
        for name, context in contexts.items():
            assert done[name].tokens == tiny.greedy(weights, context, 6)
        contexts = {name: context + done[name].tokens[:-1] + [9, 10] for name, context in contexts.items()}
    assert engine.attention == other.name


def test_the_plain_kernel_is_the_one_of_jax():
    rng = np.random.default_rng(0)
    q, pages = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 4, 8), (12, 16, 4, 8)))
    args = (jnp.array([1, 33, 64]), jnp.arange(12).reshape(3, 4), jnp.arange(4), jnp.array([3]))
    args = tuple(x.astype(jnp.int32) for x in args)
    expected = ref_ragged_paged_attention(q, pages, *args, sm_scale=0.3)
    np.testing.assert_allclose(paged(q, pages, *args, sm_scale=0.3), expected, atol=1e-5)


def test_what_cannot_run_here_is_said_and_not_used():
    config = tiny.CONFIG
    assert isinstance(choose("auto", config)[0], Reference)
    with pytest.raises(ConfigError, match=r"rollout.attention='flash' is unknown; one of auto, xla, cudnn, tpu"):
        dataclasses.replace(tiny.OPTIONS, attention="flash")
    for name in ("cudnn", "tpu"):
        with pytest.raises(ConfigError, match=rf"rollout.attention='{name}' cannot be used: it needs another device"):
            choose(name, config)
    assert "failed with" in disagreement(Fused("cudnn"), config)


@dataclasses.dataclass(frozen=True)
class OffByOne(Reference):
    """Sees one position too few."""

    def decode(self, start_R, step):
        return super().decode(start_R - 1, step)


@dataclasses.dataclass(frozen=True)
class Forgets(Reference):
    """Writes nothing back."""

    def end(self, cache, rows_R, start_R, count_R, written, steps):
        return cache


@pytest.mark.parametrize("wrong", [OffByOne(), Forgets()], ids=lambda a: type(a).__name__)
def test_an_attention_that_is_wrong_is_found_out(wrong, weights, monkeypatch, caplog):
    assert "differ from the reference" in disagreement(wrong, tiny.CONFIG)
    monkeypatch.setattr(attention.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(attention, "_unfit", lambda *args: "")
    monkeypatch.setattr(attention, "Fused", lambda implementation: wrong)
    engine = Engine(tiny.CONFIG, weights, 0, (), tiny.OPTIONS)
    assert engine.attention == "xla"
    assert "cudnn attention is not used: its numbers differ" in caplog.text


def test_kernels_that_the_model_does_not_fit_are_not_tried():
    def why(wanted, **shape):
        return attention._unfit(wanted, wanted, dataclasses.replace(tiny.CONFIG, **shape))

    assert "not in float32" in why("cudnn", head_dim=64)
    assert "head_dim=12" in why("cudnn", head_dim=12, dtype="bfloat16")
    assert why("cudnn", head_dim=64, dtype="bfloat16") == ""
    assert "head_dim=64" in why("tpu", head_dim=64)
    assert why("tpu", head_dim=128) == ""

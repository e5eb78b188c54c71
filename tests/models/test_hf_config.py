"""config.json: the published sizes, everything that changes the computation, and what is refused."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.core.errors import CheckpointError
from venusrl.models import hf_config
from venusrl.models.config import SIZES, ModelConfig
from venusrl.models.rope import LinearRope, Llama3Rope, YarnRope, rope_frequencies, yarn_attention_factor

CONFIG = ModelConfig(96, 32, 2, 4, 2, 8, 48, rope_theta=1e5, norm_eps=1e-5, qk_norm=False, max_length=8192)
LLAMA3 = dict(factor=32.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
REMOVED = object()


def read(folder: Path, change: dict, config: ModelConfig = CONFIG, **options) -> ModelConfig:
    described = hf_config.describe(config, "float32") | change
    described = {key: value for key, value in described.items() if value is not REMOVED}
    (folder / "config.json").write_text(json.dumps(described))
    return hf_config.read_config(folder, **options)[0]


def dense(kind, embed, layers, heads, kv_heads, mlp, vocab, tied, **more) -> dict:
    """A config.json as it is published: fields that its family leaves out are left out."""
    return {
        "architectures": [
            {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]
        ],
        "model_type": kind,
        "hidden_size": embed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        **more,
    }


def qwen3(*sizes, tied):
    window = dict(use_sliding_window=False, sliding_window=None, max_window_layers=sizes[1], attention_bias=False)
    rope = dict(rope_theta=1000000, rope_scaling=None, max_position_embeddings=40960, rms_norm_eps=1e-06)
    return dense("qwen3", *sizes, 151936, tied, head_dim=128, **window, **rope)


def qwen2(*sizes, tied):
    window = dict(use_sliding_window=False, sliding_window=32768, max_window_layers=21)
    rope = dict(rope_theta=1000000.0, max_position_embeddings=32768, rms_norm_eps=1e-06)
    return dense("qwen2", *sizes, tied, **window, **rope)


def llama(*sizes, tied=False, theta=500000.0, length=131072, scaling=None, **more):
    rope = dict(rope_theta=theta, rope_scaling=scaling, max_position_embeddings=length, rms_norm_eps=1e-05)
    return dense("llama", *sizes, tied, attention_bias=False, mlp_bias=False, pretraining_tp=1, **rope, **more)


EIGHT = dict(LLAMA3, rope_type="llama3", factor=8.0)
THIRTY_TWO = dict(LLAMA3, rope_type="llama3")
PUBLISHED = {  # name -> (config.json, billions of parameters from the model card)
    "Qwen3-0.6B": (qwen3(1024, 28, 16, 8, 3072, tied=True), 0.596),
    "Qwen3-1.7B": (qwen3(2048, 28, 16, 8, 6144, tied=True), 1.72),
    "Qwen3-4B": (qwen3(2560, 36, 32, 8, 9728, tied=True), 4.02),
    "Qwen3-8B": (qwen3(4096, 36, 32, 8, 12288, tied=False), 8.19),
    "Qwen3-14B": (qwen3(5120, 40, 40, 8, 17408, tied=False), 14.77),
    "Qwen3-32B": (qwen3(5120, 64, 64, 8, 25600, tied=False), 32.76),
    "Qwen2.5-0.5B": (qwen2(896, 24, 14, 2, 4864, 151936, tied=True), 0.494),
    "Qwen2.5-1.5B": (qwen2(1536, 28, 12, 2, 8960, 151936, tied=True), 1.54),
    "Qwen2.5-3B": (qwen2(2048, 36, 16, 2, 11008, 151936, tied=True), 3.09),
    "Qwen2.5-7B": (qwen2(3584, 28, 28, 4, 18944, 152064, tied=False), 7.62),
    "Qwen2.5-14B": (qwen2(5120, 48, 40, 8, 13824, 152064, tied=False), 14.77),
    "Qwen2.5-32B": (qwen2(5120, 64, 40, 8, 27648, 152064, tied=False), 32.76),
    "Qwen2.5-72B": (qwen2(8192, 80, 64, 8, 29568, 152064, tied=False), 72.7),
    "Llama-3.2-1B": (llama(2048, 16, 32, 8, 8192, 128256, tied=True, scaling=THIRTY_TWO, head_dim=64), 1.236),
    "Llama-3.2-3B": (llama(3072, 28, 24, 8, 8192, 128256, tied=True, scaling=THIRTY_TWO, head_dim=128), 3.21),
    "Llama-3.1-8B": (llama(4096, 32, 32, 8, 14336, 128256, scaling=EIGHT), 8.03),
    "Llama-3-8B": (llama(4096, 32, 32, 8, 14336, 128256, length=8192), 8.03),
    "Llama-3.3-70B": (llama(8192, 80, 64, 8, 28672, 128256, scaling=EIGHT, head_dim=128), 70.6),
    "Llama-3.1-405B": (llama(16384, 126, 128, 8, 53248, 128256, scaling=EIGHT), 405.9),
    "SmolLM2-135M": (
        llama(
            *(576, 30, 9, 3, 1536, 49152),
            tied=True,
            theta=100000,
            length=8192,
            is_llama_config=True,
            rope_interleaved=False,
            **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
        ),
        0.1345,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_read_from_their_config(tmp_path, name):
    described, billions = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(described))
    config, raw = hf_config.read_config(tmp_path, dtype="bfloat16", remat=True)
    assert raw == described
    assert config.num_params / 1e9 == pytest.approx(billions, rel=0.01)
    assert (config.dtype, config.remat) == ("bfloat16", True)
    assert config.attention_bias == ("qkv" if name.startswith("Qwen2.5") else "")
    assert isinstance(config.rope_scaling, Llama3Rope) == (described.get("rope_scaling") is not None)
    if name.lower() in SIZES:
        assert dataclasses.replace(config, dtype="float32") == dataclasses.replace(
            SIZES[name.lower()], dtype="float32", remat=True
        )


def test_what_is_written_is_read_as_it_was(tmp_path):
    for change in (
        {},
        dict(qk_norm=True),
        dict(qk_norm=True, attention_bias="qkvo", tied=False),
        dict(attention_bias="qkv"),
        dict(attention_bias="qkvo"),
        dict(rope_scaling=LinearRope(2.0)),
        dict(rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 4096)),
        dict(rope_scaling=YarnRope(2.0, 4096, 1.07, 16.0, 2.0, truncate=False)),
    ):
        config = dataclasses.replace(CONFIG, **change)
        assert read(tmp_path, {}, config) == config


SAME = {
    "type for rope_type": dict(rope_scaling=dict(LLAMA3, type="llama3")),
    "both, equal": dict(rope_scaling=dict(LLAMA3, type="llama3", rope_type="llama3")),
    "transformers 5": dict(rope_theta=REMOVED, rope_parameters=dict(LLAMA3, rope_type="llama3", rope_theta=1e5)),
    "transformers 5, theta outside": dict(rope_parameters=dict(LLAMA3, rope_type="llama3")),
    "one kind of layer": dict(
        layer_types=["full_attention"] * 2,
        rope_parameters={"full_attention": dict(LLAMA3, rope_type="llama3", rope_theta=1e5)},
    ),
    "both groups, equal": dict(
        rope_scaling=dict(LLAMA3, rope_type="llama3"), rope_parameters=dict(LLAMA3, rope_type="llama3", rope_theta=1e5)
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_every_way_to_write_a_rope_is_read(tmp_path, name):
    config = read(tmp_path, {"rope_scaling": REMOVED} | SAME[name])
    assert config.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)
    assert (config.rope_theta, config.max_length) == (1e5, 8192)


def test_yarn_takes_the_defaults_of_transformers_and_reaches_further(tmp_path):
    config = read(tmp_path, dict(rope_scaling=YARN, max_position_embeddings=40960))
    assert config.rope_scaling == YarnRope(4.0, 32768, yarn_attention_factor(4.0), 32.0, 1.0)
    assert config.max_length == 131072
    given = read(tmp_path, dict(rope_scaling=YARN | dict(attention_factor=1.5, beta_fast=None, beta_slow=2)))
    assert given.rope_scaling == YarnRope(4.0, 32768, 1.5, 32.0, 2.0)
    derived = read(tmp_path, dict(rope_scaling=YARN | dict(factor=None), max_position_embeddings=65536))
    assert derived.rope_scaling.factor == 2.0


def test_null_and_missing_take_the_defaults_of_transformers(tmp_path):
    plain = read(tmp_path, dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps"), REMOVED))
    assert (plain.head_dim, plain.kv_heads, plain.rope_theta, plain.norm_eps) == (8, 4, 1e4, 1e-6)
    assert read(tmp_path, dict.fromkeys(("head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps"))) == plain
    assert read(tmp_path, dict(tie_word_embeddings=REMOVED)).tied is False
    kind = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=REMOVED)
    assert read(tmp_path, kind).head_dim == 128
    assert read(tmp_path, dict(model_type=REMOVED)) == CONFIG


MISTRAL = dict(model_type="mistral", architectures=["MistralForCausalLM"], mlp_bias=REMOVED, attention_bias=REMOVED)
QWEN2 = dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], mlp_bias=REMOVED, attention_bias=REMOVED)
ACCEPTED = {
    "a window that is not used": QWEN2 | dict(use_sliding_window=False, sliding_window=4096, max_window_layers=0),
    "a window that begins after the last layer": QWEN2 | dict(use_sliding_window=True, max_window_layers=2),
    "Mistral without a window": MISTRAL | dict(sliding_window=None),
    "notes of other programs": dict(unsloth_version="2025.1", _name_or_path="x", use_cache=False, temperature=0.6),
    "a null that is unknown": dict(some_new_thing=None),
    "another spelling of the activation": dict(hidden_act="swish"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_changes_nothing_is_accepted(tmp_path, name):
    config = read(tmp_path, ACCEPTED[name])
    assert dataclasses.replace(config, attention_bias="") == CONFIG


REFUSED = [
    (dict(hidden_act="gelu_pytorch_tanh"), r"hidden_act='gelu_pytorch_tanh'"),
    (dict(mlp_bias=True), "mlp_bias=True"),
    (dict(partial_rotary_factor=0.5), r"partial_rotary_factor=0\.5"),
    (dict(rope_interleaved=True), "rope_interleaved=True"),
    (dict(pretraining_tp=2), "pretraining_tp=2"),
    (dict(is_encoder_decoder=True), "is_encoder_decoder"),
    (dict(quantization_config={"quant_method": "fp8"}), "quantization_config=.*fp8"),
    (dict(torch_dtype="float8_e4m3fn"), "torch_dtype='float8_e4m3fn'"),
    (dict(auto_map={"AutoModelForCausalLM": "modeling_x.X"}), "auto_map"),
    (dict(model_type="mixtral", architectures=["MixtralForCausalLM"]), "model_type='mixtral': of these.*llama.*qwen3"),
    (dict(model_type="qwen2_5_vl", text_config={}), "model_type='qwen2_5_vl'.*text_config"),
    (dict(architectures=["LlamaForSequenceClassification"]), r"architectures=\['LlamaForSequence"),
    (dict(architectures=["Qwen3ForCausalLM"]), "with model_type 'llama' only LlamaForCausalLM"),
    (dict(sliding_window=512), "sliding_window=512"),
    (MISTRAL, "sliding_window=None: missing is 4096"),
    (MISTRAL | dict(sliding_window=4096), "sliding_window=4096"),
    (QWEN2 | dict(use_sliding_window=True, sliding_window=512, max_window_layers=0), "use_sliding_window=True"),
    (QWEN2 | dict(use_sliding_window=True, max_window_layers=1), "use_sliding_window=True"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "layer_types=.*sliding_attention"),
    (dict(layer_types=["full_attention"]), "layer_types has 1 entries, num_hidden_layers is 2"),
    (dict(attn_logit_softcapping=50.0), r"attn_logit_softcapping=50\.0.*model\.ignore"),
    (dict(residual_multiplier=0.22, embedding_multiplier=12.0), "embedding_multiplier=12.0, residual_multiplier=0.22"),
    (dict(rope_scaling=dict(rope_type="longrope", short_factor=[1.0])), "rope_type='longrope': only default, linear"),
    (dict(rope_scaling=dict(type="dynamic", factor=2.0)), "'dynamic'"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor=None.*high_freq_factor=None"),
    (dict(rope_scaling=YARN | dict(factor=0.5)), r"factor=0\.5"),
    (dict(rope_scaling=YARN | dict(short_factor=[1.0])), "short_factor=.*no meaning with rope_type 'yarn'"),
    (dict(rope_scaling=dict(factor=4.0)), "factor=4.0: has no meaning with rope_type 'default'"),
    (dict(rope_scaling="yarn"), "rope_scaling='yarn': an object is needed"),
    (dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)), "rope_theta=100000.0 and 500000.0 .*contradict"),
    (dict(rope_scaling=dict(type="yarn", rope_type="llama3")), "contradict each other"),
    (dict(rope_scaling=YARN, rope_parameters=YARN | dict(factor=2.0)), "rope_scaling=.*contradict each other"),
    (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)), "partial_rotary_factor"),
    (dict(hidden_size=30, head_dim=None), "hidden_size=30 is no multiple of num_attention_heads=4"),
    (dict(num_key_value_heads=3), "kv_heads=3 does not divide"),
    (dict(head_dim=7), "head_dim=7 is odd"),
    (dict(vocab_size=REMOVED, hidden_size="32"), "vocab_size=None.*hidden_size='32'|hidden_size='32'.*vocab_size=None"),
    (dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps=nan"),
    (dict(rope_theta=-1), "rope_theta=-1"),
    (dict(tie_word_embeddings="yes"), "tie_word_embeddings='yes': true or false"),
    (QWEN2 | dict(attention_bias=False), "attention_bias=False"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[str(list(change))[:50] for change, _ in REFUSED])
def test_what_changes_the_computation_is_refused_by_its_name(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, change)
    assert "\n" not in str(caught.value)


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, dict(hidden_act="gelu", mlp_bias=True, sliding_window=8, new_thing=1, vocab_size=None))
    for name in ("hidden_act", "mlp_bias", "sliding_window", "new_thing", "vocab_size"):
        assert name in str(caught.value)


def test_a_key_that_its_user_knows_is_ignored(tmp_path):
    assert read(tmp_path, dict(new_thing=1), ignore=("new_thing",)) == CONFIG
    with pytest.raises(CheckpointError, match="other=2"):
        read(tmp_path, dict(new_thing=1, other=2), ignore=("new_thing",))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\xff", '{"a": ' * 100_000], ids=["empty", "cut", "list", "latin", "deep"]
)
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        hf_config.read_config(tmp_path)


def test_all_differences_to_a_shape_are_listed(tmp_path):
    theirs = read(tmp_path, dict(rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=False, vocab_size=97))
    assert hf_config.differences(CONFIG, CONFIG, "f") == []
    with pytest.raises(CheckpointError) as caught:
        hf_config.check_same(theirs, CONFIG, "config.json")
    for said in (
        "model.rope_theta=100000.0, but config.json has 10000.0",
        "model.norm_eps=1e-05, but config.json has 1e-06",
        "model.tied=True, but config.json has False",
        "model.vocab_size=96, but config.json has 97",
    ):
        assert said in str(caught.value)
    shorter = dataclasses.replace(CONFIG, max_length=100)
    assert hf_config.differences(CONFIG, shorter, "f") == []  # a run may be shorter than the model allows
    assert hf_config.differences(shorter, CONFIG, "f") == ["model.max_length=8192, but f has only 100"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.sampled_from(["silu", "yarn", "llama3", "x"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*LLAMA3, *YARN, "type"]), inner, max_size=5),
    max_leaves=6,
)
KEYS = sorted(hf_config._USED | set(hf_config._FIXED) | {"new_thing"})


@settings(max_examples=150, deadline=None)
@given(change=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
def test_any_content_is_read_or_refused_in_one_line(tmp_path_factory, change):
    folder = tmp_path_factory.mktemp("any")
    try:
        config = read(folder, change)
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        assert (frequencies >= 0).all() and np.isfinite(frequencies).all()
    except CheckpointError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("value", [10**400, 1e308], ids=["400 digits", "1e308"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rope_theta", lambda n: {"rope_theta": n}),
        ("rms_norm_eps", lambda n: {"rms_norm_eps": n}),
        ("rope_parameters.rope_theta", lambda n: {"rope_theta": REMOVED, "rope_parameters": {"rope_theta": n}}),
        ("rope_scaling.factor", lambda n: {"rope_scaling": {"rope_type": "linear", "factor": n}}),
        ("rope_scaling.factor", lambda n: {"rope_scaling": YARN | {"factor": n}}),
        ("rope_scaling.attention_factor", lambda n: {"rope_scaling": YARN | {"attention_factor": n}}),
        ("rope_scaling.mscale", lambda n: {"rope_scaling": YARN | {"mscale": n}}),
        (
            "rope_scaling.low_freq_factor",
            lambda n: {"rope_scaling": {"rope_type": "llama3", **LLAMA3, **{"low_freq_factor": n}}},
        ),
        ("vocab_size", lambda n: {"vocab_size": n}),
        ("max_position_embeddings", lambda n: {"max_position_embeddings": n}),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_their_key(tmp_path, name, change, value):
    with pytest.raises(CheckpointError, match=f"{name}=.* is believed"):
        read(tmp_path, change(value))


def test_a_factor_that_reaches_beyond_all_positions_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"factor=100000.0: sequences of 3276800000 tokens"):
        read(tmp_path, {"rope_scaling": YARN | {"factor": 1e5}})

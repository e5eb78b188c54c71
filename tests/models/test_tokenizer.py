"""Text in never becomes a control token, and comes out as it went in."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from venusrl.core.errors import ConfigError, ContractError
from venusrl.models.chat import ChatFormat
from venusrl.models.tokenizer import CONTROL, Tokenizer

# Text without lone surrogates (not UTF-8), mixed with the control tokens spelled out.
PIECES = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.sampled_from(CONTROL))
TEXT = st.lists(PIECES, max_size=6).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
@example(text="<|im_end|>\n<|im_start|>assistant\n")
@example(text="\x00\r\n\t \u200b\u0301e\u0301 \U0001f469\u200d\U0001f680")
def test_round_trip_without_control_ids(tokenizer, text):
    ids = tokenizer.encode(text)
    assert not {tokenizer.im_start, tokenizer.im_end, tokenizer.end_of_text} & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, keep_control=True) == text


@settings(max_examples=50, deadline=None)
@given(data=st.binary(max_size=40))
def test_any_bytes_come_back_through_latin1(tokenizer, data):
    text = data.decode("latin-1")
    assert tokenizer.decode(tokenizer.encode(text)).encode("latin-1") == data


def test_digits_are_single(tokenizer):
    digits = {tokenizer.decode([i]) for i in tokenizer.encode("1234567890")}
    assert digits == set("0123456789")
    assert len(tokenizer.encode("1234" * 5)) == 20  # 1234 is in the training text, and still not merged


def test_merges_are_learnt(tokenizer):
    assert len(tokenizer.encode("the quick brown fox")) < len("the quick brown fox") // 2


def test_control_tokens_are_hidden_or_kept(tokenizer):
    ids = [tokenizer.im_start, *tokenizer.encode("a"), tokenizer.im_end]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, keep_control=True) == "<|im_start|>a<|im_end|>"


def test_part_of_a_character_decodes_to_a_replacement(tokenizer):
    ids = tokenizer.encode("\U0001f680")
    assert len(ids) > 1
    assert "\ufffd" in tokenizer.decode(ids[:-1])


def test_save_and_load(tmp_path, tokenizer):
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    text = "the fox <|im_end|> 12\n\n x"
    assert again.encode(text) == tokenizer.encode(text)
    assert again.im_end not in again.encode(text)
    assert (again.vocab_size, again.im_end) == (tokenizer.vocab_size, tokenizer.im_end)


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        Tokenizer.load(tmp_path / "nothing.json")
    (tmp_path / "bad.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match=r"bad\.json"):
        Tokenizer.load(tmp_path / "bad.json")


def byte_level(dropout: float | None = None) -> Backend:
    """Every byte, and the merges "a b" and "ab c"."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc"]
    merges = [("a", "b"), ("ab", "c")]
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, dropout=dropout))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_unigram() -> Backend:
    """Every byte, and pairs that sampling splits at random."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "ba", "aba"]
    backend = Backend(models.Unigram([(token, -1.0 - len(token) / 10) for token in tokens], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.model.alpha = 0.3
    return backend


@pytest.mark.parametrize("backend", [byte_level(0.5), byte_unigram()], ids=["dropout of BPE", "sampling of Unigram"])
def test_what_makes_ids_random_is_switched_off_and_said(caplog, backend):
    assert len({tuple(backend.encode("ababcabab" * 3).ids) for _ in range(40)}) > 1
    with caplog.at_level("WARNING"):
        loaded = Tokenizer(backend)
    assert len({tuple(loaded.encode("ababcabab" * 3)) for _ in range(40)}) == 1
    assert "makes ids random" in caplog.text


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": normalizers.Prepend("x")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("  ")])},
        {"normalizer": normalizers.Replace(Regex("^a"), "xa")},
        {"normalizer": normalizers.Replace(Regex("$"), "x")},
        {"normalizer": normalizers.Replace(Regex("^[0-9]"), "#")},
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Lowercase()},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"decoder": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])},
        {"decoder": decoders.Sequence([decoders.ByteLevel(), decoders.Replace("Hello", "hello")])},
    ],
    ids=str,
)
def test_a_tokenizer_whose_parts_do_not_join_is_refused(part):
    backend = byte_level()
    for name, value in part.items():
        setattr(backend, name, value)
    with pytest.raises(ConfigError, match="parts of a conversation do not join"):
        Tokenizer(backend)


def test_a_panic_of_the_library_is_one_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    said = json.loads(byte_level().to_str())
    said["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer\.json"):
        Tokenizer.load(path)


def test_a_tokenizer_that_panics_on_every_text_is_refused_at_the_start():
    backend = byte_level()
    backend.normalizer = normalizers.Replace(Regex("^"), "x")
    with pytest.raises(ConfigError, match=r"cannot be used .*fails on a text"):
        Tokenizer(backend)


def test_what_the_library_raises_in_a_text_is_one_line():
    backend = byte_level()
    tokenizer = Tokenizer(backend)
    backend.model = models.WordLevel({"a": 0}, unk_token="<none>")
    with pytest.raises(ContractError, match="fails on a text of 5 characters"):
        tokenizer.encode("hello")


def test_ids_and_texts_that_no_token_can_have_are_none(tokenizer):
    assert [tokenizer.token(i) for i in (-1, 10**5, 2**32, 2**70)] == [None] * 4
    assert tokenizer.token_id("\ud800") is None and tokenizer.bytes_of(2**40) == b""


def test_a_tokenizer_without_chatml_is_read_and_cannot_speak_it():
    plain = Tokenizer(byte_level())
    assert not plain.speaks_chatml
    with pytest.raises(ConfigError, match=r"<\|im_start\|>"):
        ChatFormat(plain)


def test_a_long_text_has_the_ids_of_its_parts_and_halves_of_characters_are_replaced(tokenizer):
    line = "the fox <|im_end|> 12 é\n"
    whole = tokenizer.encode(line * 2000)
    assert whole == tokenizer.encode(line) * 2000 and tokenizer.im_end not in whole
    assert tokenizer.encode("\ud800" + line * 2000) == tokenizer.encode("\ufffd") + whole

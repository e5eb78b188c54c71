"""Text in never becomes a control token, and comes out as it went in."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from venusrl.core.errors import ConfigError
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


def test_a_tokenizer_without_chatml_is_read_and_cannot_speak_it():
    plain = Tokenizer(Backend(models.BPE()))
    assert not plain.speaks_chatml
    with pytest.raises(ConfigError, match=r"<\|im_start\|>"):
        ChatFormat(plain)


def test_a_long_text_has_the_ids_of_its_parts_and_halves_of_characters_are_replaced(tokenizer):
    line = "the fox <|im_end|> 12 é\n"
    whole = tokenizer.encode(line * 2000)
    assert whole == tokenizer.encode(line) * 2000 and tokenizer.im_end not in whole
    assert tokenizer.encode("\ud800" + line * 2000) == tokenizer.encode("\ufffd") + whole

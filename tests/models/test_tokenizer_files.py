"""The files beside tokenizer.json: what ends a reply, templates, special tokens, and contradictions."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from venusrl.core.errors import CheckpointError, ConfigError, VenusError
from venusrl.models.tokenizer import CONTROL, Tokenizer
from venusrl.models.tokenizer_files import read_tokenizer

LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
ROWS = 400


def backend(control=CONTROL, special=True) -> Backend:
    made = Backend(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["hello world, e\u0301 and \u00e9"] * 3, trainer)
    added = [AddedToken(token, special=special, normalized=False) for token in control]
    (made.add_special_tokens if special else made.add_tokens)(added)
    return made


def write(folder, made: Backend, **files):
    """tokenizer.json and JSON files by name (tokenizer_config, generation_config, ...)."""
    made.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def read(folder, config=None):
    return read_tokenizer(folder, config or {}, ROWS)


def test_what_ends_a_reply_is_what_all_files_say(tmp_path):
    made = backend()
    end_of_text, im_start, im_end = (made.token_to_id(token) for token in CONTROL)
    write(
        tmp_path,
        made,
        generation_config={"eos_token_id": [im_end, end_of_text]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}},
    )
    _, files = read(tmp_path, {"eos_token_id": im_start})
    assert files.stop_tokens == (im_end, end_of_text, im_start)
    assert (files.eos, files.bos, files.pad) == ("<|im_end|>", "", "")


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        (dict(generation_config={"eos_token_id": [5000]}), {}, "eos_token_id=5000 is no token of tokenizer.json"),
        ({}, {"eos_token_id": 5000}, "eos_token_id=5000 is no token"),
        ({}, {"eos_token_id": "x"}, "eos_token_id='x' of config.json must be token ids"),
        (dict(generation_config={"eos_token_id": [-1]}), {}, r"eos_token_id=\[-1\] of generation_config.json must be"),
        ({}, {"eos_token_id": 2**32}, "eos_token_id=4294967296 is no token"),
        ({}, {"eos_token_id": [2**70]}, "eos_token_id=1180591620717411303424 is no token"),
        (dict(generation_config={"eos_token_id": 10**400}), {}, "eos_token_id=a number of 1329 bits is no token"),
        (dict(tokenizer_config={"eos_token": "\ud800"}), {}, "tokenizer_config.json cannot be read .*surrogates"),
        (dict(special_tokens_map={"a": ["\udfff"]}), {}, "special_tokens_map.json cannot be read .*surrogates"),
        (dict(tokenizer_config={"chat_template": [{"name": [], "template": "x"}]}), {}, "neither text nor a list"),
        (dict(tokenizer_config={"chat_template": [{"name": {}, "template": {}}]}), {}, "neither text nor a list"),
        (dict(tokenizer_config={"eos_token": "</s>"}), {}, "eos_token='</s>' is no token"),
        (dict(special_tokens_map={"bos_token": {"content": "<s>"}}), {}, "bos_token='<s>' is no token"),
        (dict(tokenizer_config={"add_eos_token": True}), {}, "add_eos_token"),
        (dict(tokenizer_config={"add_prefix_space": True}), {}, "add_prefix_space"),
        (dict(tokenizer_config={"add_bos_token": True}), {}, "add_bos_token .* has no bos_token"),
        (
            dict(added_tokens={"<|im_end|>": 7}),
            {},
            r"'<\|im_end\|>' is 7 in added_tokens.json and \d+ in tokenizer.json",
        ),
        (
            dict(tokenizer_config={"added_tokens_decoder": {"399": {"content": "<new>"}}}),
            {},
            "'<new>' is 399 in tokenizer_config.json and None in tokenizer.json",
        ),
        (
            dict(tokenizer_config={"auto_map": {"AutoTokenizer": ["x.X", None]}}),
            {},
            "auto_map of tokenizer_config.json",
        ),
        (
            dict(special_tokens_map={"additional_special_tokens": ["<|im_end|>", "<new>"]}),
            {},
            "additional special tokens '<new>' are no tokens of tokenizer.json",
        ),
        (
            dict(tokenizer_config={"extra_special_tokens": {"image": "<img>"}}),
            {},
            "special tokens '<img>' are no tokens",
        ),
        (dict(quantize_config={}), {}, "quantize_config.json says that the weights are quantised"),
        (dict(generation_config=[]), {}, "generation_config.json holds list"),
    ],
)
def test_contradictions_are_refused_by_the_file_that_has_them(tmp_path, files, config, message):
    write(tmp_path, backend(), **files)
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, config)


def test_all_contradictions_are_told_at_once(tmp_path):
    write(tmp_path, backend(), tokenizer_config={"add_eos_token": True, "eos_token": "</s>"})
    with pytest.raises(CheckpointError, match=r"</s>.*add_eos_token"):
        read(tmp_path)


def test_more_tokens_than_rows_are_refused(tmp_path):
    made = write(tmp_path, backend())
    with pytest.raises(CheckpointError, match=r"ids up to .*, the embedding 100 rows"):
        read_tokenizer(made, {}, 100)


def test_tokens_that_are_listed_again_alike_are_accepted(tmp_path):
    made = backend()
    again = {token: made.token_to_id(token) for token in CONTROL}
    decoder = {str(id_): {"content": token, "special": True} for token, id_ in again.items()}
    read(write(tmp_path, made, added_tokens=again, tokenizer_config={"added_tokens_decoder": decoder}))


def test_defaults_of_sampling_are_told_as_not_used(tmp_path):
    sampling = {
        "temperature": 0.6,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "transformers_version": "5",
        "pad_token_id": 1,
    }
    _, files = read(write(tmp_path, backend(), generation_config=sampling))
    [note] = files.notes
    assert "repetition_penalty=1.1, temperature=0.6, top_p=0.95 not used" in note
    assert "version" not in note and files.generation == sampling


def test_special_tokens_that_differ_are_told(tmp_path):
    ends = dict(tokenizer_config={"eos_token": "<|im_end|>"}, special_tokens_map={"eos_token": "<|endoftext|>"})
    _, files = read(write(tmp_path, backend(), **ends))
    assert files.eos == "<|im_end|>" and "special_tokens_map.json" in files.notes[0]


def test_the_template_is_found_where_it_is(tmp_path):
    write(tmp_path, backend())
    assert read(tmp_path)[1].chat_template == ""
    write(tmp_path, backend(), tokenizer_config={"chat_template": "one"})
    assert read(tmp_path)[1].chat_template == "one"
    several = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    write(tmp_path, backend(), tokenizer_config={"chat_template": several})
    assert read(tmp_path)[1].chat_template == {"tool_use": "two", "default": "three"}
    (tmp_path / "chat_template.jinja").write_text("four")
    assert read(tmp_path)[1].chat_template == "four"
    assert [path.name for path in read(tmp_path)[1].copies][-1] == "chat_template.jinja"


def test_a_llama_folder_is_read_with_its_own_control_tokens(tmp_path):
    made = backend(LLAMA3)
    begin, end, eot = (made.token_to_id(token) for token in LLAMA3)
    made.post_processor = processors.TemplateProcessing(
        single=f"{LLAMA3[0]} $A", pair=f"{LLAMA3[0]} $A $B", special_tokens=[(LLAMA3[0], begin)]
    )
    settings = {"bos_token": LLAMA3[0], "eos_token": LLAMA3[2]}
    write(tmp_path, made, tokenizer_config=settings, generation_config={"eos_token_id": [end, eot]})
    tokenizer, files = read(tmp_path)
    assert files.prefix == tokenizer.prefix == (begin,)
    assert files.stop_tokens == (end, eot)
    assert begin not in tokenizer.encode("text")  # a part of a sequence does not begin with it
    assert not {begin, end, eot} & set(tokenizer.encode("".join(LLAMA3)))
    assert tokenizer.decode(tokenizer.encode("a<|eot_id|>b")) == "a<|eot_id|>b"
    assert not tokenizer.speaks_chatml
    write(tmp_path, made, tokenizer_config=settings | {"add_bos_token": False})
    assert read(tmp_path)[1].prefix == ()


def test_a_bos_that_only_the_settings_add_begins_a_sequence(tmp_path):
    made = backend(LLAMA3)
    write(tmp_path, made, tokenizer_config={"bos_token": LLAMA3[0], "add_bos_token": True})
    assert read(tmp_path)[1].prefix == (made.token_to_id(LLAMA3[0]),)


def test_text_does_not_become_a_control_token_that_the_file_forgot_to_mark(tmp_path):
    made = backend(special=False)
    made.encode_special_tokens = True
    end = made.token_to_id("<|im_end|>")
    assert end in made.encode("x<|im_end|>").ids  # as the library does it
    tokenizer, _ = read(write(tmp_path, made, generation_config={"eos_token_id": end}))
    assert end not in tokenizer.encode("x<|im_end|>")
    assert tokenizer.decode([*tokenizer.encode("x"), end]) == "x"
    assert tokenizer.decode(tokenizer.encode("x<|im_end|>")) == "x<|im_end|>"


def test_tokens_that_another_file_calls_special_are_special(tmp_path):
    """transformers would make them special, so text that spells one stays text."""
    made = backend()
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<a>", "<b>", "<c>")])
    ids = [made.token_to_id(token) for token in ("<a>", "<b>", "<c>")]
    decoder = {str(ids[0]): {"content": "<a>", "special": True}, str(ids[2]): {"content": "<c>", "special": False}}
    settings = {"added_tokens_decoder": decoder, "additional_special_tokens": ["<b>"]}
    tokenizer, _ = read(write(tmp_path, made, tokenizer_config=settings))
    assert set(tokenizer.encode("<a><b><c>")) & set(ids) == {ids[2]}


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_link_to_nothing_is_told(tmp_path, name):
    """As in a cache of which a part was not copied."""
    write(tmp_path, backend())
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read(tmp_path)


def test_a_piece_of_text_cannot_end_a_reply(tmp_path):
    made = backend()
    with pytest.raises(ConfigError, match=r"makes # of text .* take them out of eos_token_id"):
        read(write(tmp_path, made), {"eos_token_id": made.token_to_id("#")})


def test_other_tokens_of_the_file_stay_tokens_of_text(tmp_path):
    made = backend()
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    tokenizer, _ = read(write(tmp_path, made))
    assert tokenizer.encode("<tool_call>") == [made.token_to_id("<tool_call>")]


def test_nfc_of_the_file_is_used(tmp_path):
    made = backend()
    write(tmp_path, made)
    plain, _ = read(tmp_path)
    assert plain.encode("e\u0301") != plain.encode("\u00e9")
    made.normalizer = normalizers.NFC()
    write(tmp_path, made)
    composed, _ = read(tmp_path)
    assert composed.encode("e\u0301") == composed.encode("\u00e9") == plain.encode("\u00e9")


def test_nothing_is_cut_or_padded_whatever_the_file_says(tmp_path):
    made = backend()
    text = "hello world " * 9
    whole = made.encode(text).ids
    made.enable_truncation(3)
    made.enable_padding(length=500)
    assert read(write(tmp_path, made))[0].encode(text) == whole


def test_half_a_character_is_replaced(tokenizer):
    assert tokenizer.encode("cut \ud83d emoji") == tokenizer.encode("cut \ufffd emoji")
    assert tokenizer.encode("\ud83d\ude80") == tokenizer.encode("\U0001f680")


def test_a_tokenizer_that_puts_something_around_a_text_is_refused():
    made = backend()
    end = made.token_to_id(CONTROL[0])
    made.post_processor = processors.TemplateProcessing(single=f"$A {CONTROL[0]}", special_tokens=[(CONTROL[0], end)])
    with pytest.raises(ConfigError, match=r"puts \['<\|endoftext\|>'\] after every text"):
        Tokenizer(made)
    spaced = backend()
    spaced.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(ConfigError, match="puts a space before every text"):
        Tokenizer(spaced)
    with pytest.raises(ConfigError, match="lacks <unheard>"):
        Tokenizer(backend(), ["<unheard>"])


def test_another_format_of_tokenizer_is_told_with_its_cure(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"only tokenizer\.model; make it with transformers"):
        read(tmp_path)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 400)
    | st.floats()
    | st.sampled_from(["<|im_end|>", "a", "", "default"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "special", "name", "template", "3", "258"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = {
    "tokenizer_config": """
        bos_token eos_token add_bos_token add_eos_token add_prefix_space added_tokens_decoder auto_map chat_template
        additional_special_tokens extra_special_tokens clean_up_tokenization_spaces
    """.split(),
    "special_tokens_map": ["bos_token", "eos_token", "pad_token", "additional_special_tokens"],
    "generation_config": ["eos_token_id", "temperature", "new"],
    "added_tokens": ["<|im_end|>", "a", "<new>"],
}
FILES = st.fixed_dictionaries(
    {}, optional={name: st.dictionaries(st.sampled_from(keys), VALUES, max_size=3) for name, keys in KEYS.items()}
)


@settings(max_examples=100, deadline=None)
@given(files=FILES, eos=VALUES)
def test_any_content_is_read_or_refused_in_one_line(tmp_path_factory, files, eos):
    folder = write(tmp_path_factory.mktemp("any"), backend(), **files)
    try:
        read(folder, {"eos_token_id": eos})
    except VenusError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "generation_config.json",
    ],
)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, name):
    write(tmp_path, backend())
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is no file"):
        read(tmp_path)

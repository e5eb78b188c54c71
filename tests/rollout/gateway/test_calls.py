"""Reading tool calls: each kind of reply, whole and in pieces of any size."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from venusrl.rollout.gateway.calls import CallReader, ReadCall, read_calls


def block(call) -> str:
    said = call if isinstance(call, str) else json.dumps(call, ensure_ascii=False)
    return f"<tool_call>\n{said}\n</tool_call>"


RUN = block({"name": "run", "arguments": {"command": "ls"}})


@pytest.mark.parametrize(
    "text, content, calls",
    [
        pytest.param(RUN, None, [("run", {"command": "ls"})], id="a-call"),
        pytest.param(f"I look.\n{RUN}", "I look.", [("run", {"command": "ls"})], id="text-before-a-call"),
        pytest.param(f"{RUN}\n{RUN}\n", None, [("run", {"command": "ls"})] * 2, id="two-calls"),
        pytest.param(f"A\n{RUN}\n\nB", "A\n\nB", [("run", {"command": "ls"})], id="text-around-a-call"),
        pytest.param(
            block({"name": "w", "arguments": {"t": "</tool_call> and <tool_call>"}}),
            None,
            [("w", {"t": "</tool_call> and <tool_call>"})],
            id="tags-inside-an-argument",
        ),
        pytest.param(
            block('{"name": "w", "arguments": {"t": "line 1\nline 2\ttab"}}'),
            None,
            [("w", {"t": "line 1\nline 2\ttab"})],
            id="raw-newlines-in-a-string",
        ),
        pytest.param(
            block({"name": "r", "arguments": '{"c": "ls"}'}), None, [("r", {"c": "ls"})], id="arguments-encoded-twice"
        ),
        pytest.param(block({"name": "r", "arguments": None}), None, [("r", {})], id="no-arguments"),
        pytest.param(block('{"name": "r"}'), None, [("r", {})], id="arguments-left-out"),
        pytest.param(
            block({"name": "r", "arguments": {"a": {"b": [{"c": "}"}]}}}),
            None,
            [("r", {"a": {"b": [{"c": "}"}]}})],
            id="nested-objects",
        ),
        pytest.param(RUN[:-13], None, [("run", {"command": "ls"})], id="cut-before-its-end-tag"),
        pytest.param(f"<tool_call>\n{RUN}", None, [("run", {"command": "ls"})], id="tag-said-twice"),
        pytest.param("  plain \n", "  plain \n", [], id="white-space-of-plain-text"),
        pytest.param("a <tool", "a <tool", [], id="half-a-tag"),
        pytest.param(block('{"name": run}'), block('{"name": run}'), [], id="no-json"),
        pytest.param(block([1]), block([1]), [], id="no-object"),
        pytest.param(block({"name": 1}), block({"name": 1}), [], id="a-name-that-is-no-text"),
        pytest.param(block({"name": "r", "arguments": [1]}), block({"name": "r", "arguments": [1]}), [], id="a-list"),
        pytest.param(block('{"name": "r", "arguments": {"x": NaN}}'), ..., [], id="nan"),
        pytest.param(block('{"name": "r", "arguments": {"x": ' + "[" * 4000 + "]" * 4000 + "}}"), ..., [], id="depth"),
        pytest.param(block('{"name": "r", "arguments": {"x": ' + "9" * 9000 + "}}"), ..., [], id="a-huge-number"),
        pytest.param('<tool_call>\n{"name": "r", "arg', ..., [], id="cut-inside"),
        pytest.param(f"<think>{RUN}</think>\nno", ..., [], id="a-thought-about-a-call"),
    ],
)
def test_a_reply_is_read_as(text, content, calls):
    said, read = read_calls(text)
    assert said == (text if content is ... else content)
    assert [(call.name, json.loads(call.arguments)) for call in read] == calls


def test_a_call_that_cannot_be_read_does_not_hide_the_others():
    broken = block('{"name": run}')
    assert read_calls(f"{RUN}\n{broken}\n{RUN}") == (broken, [ReadCall("run", '{"command": "ls"}')] * 2)


def test_arguments_keep_their_characters_and_have_no_half_pairs():
    (call,) = read_calls(block('{"name": "say", "arguments": {"t": "日本 \\u00e9 \\ud83d"}}'))[1]
    assert call.arguments == '{"t": "日本 é \ufffd"}'
    call.arguments.encode()


PARTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "\n",
        " ",
        "x",
        '"',
        "\\",
        "{",
        "}",
        '{"name": "r"}',
        RUN,
        "é",
    ]
)


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(PARTS, max_size=12), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=50))
def test_in_pieces_it_says_the_same_as_whole(parts, sizes):
    text = "".join(parts)
    reader, items, at = CallReader(), [], 0
    for size in sizes:
        items += reader.feed(text[at : at + size])
        at += size
    items += [*reader.feed(text[at:]), *reader.end()]
    said = "".join(item for item in items if isinstance(item, str))
    calls = [item for item in items if isinstance(item, ReadCall)]
    content, read = read_calls(text)
    assert (said, calls) == (content or "", read)

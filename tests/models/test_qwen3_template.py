"""Qwen3's own chat template, as published, run as transformers runs it: our ids have to be its ids, for its template
turn by turn and for the one that is used where a model has none."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from venusrl.models.chat import ChatFormat
from venusrl.models.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / ".reference/qwen3"

pytestmark = pytest.mark.skipif(
    not (FOLDER / "tokenizer_config.json").is_file() and "CI" not in os.environ,
    reason="`make reference` has not brought Qwen3's tokenizer (it takes npm)",
)


class Published:
    """What transformers makes of a conversation: the template as it is, then the whole text to ids."""

    def __init__(self):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self.source = json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"]
        self._template = environment.from_string(self.source)
        self._backend = Backend.from_file(str(FOLDER / "tokenizer.json"))

    def text(self, messages, tools=(), **options) -> str:
        messages = [{**m, "content": m.get("content") or ""} for m in messages]
        return self._template.render(messages=messages, tools=tools or None, add_generation_prompt=True, **options)

    def ids(self, messages, tools=(), **options) -> list[int]:
        return self._backend.encode(self.text(messages, tools, **options), add_special_tokens=False).ids


@pytest.fixture(scope="module")
def published():
    return Published()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(FOLDER / "tokenizer.json")


@pytest.fixture(scope="module")
def own(tokenizer, published):
    return ChatFormat(tokenizer, published.source)


@pytest.fixture(scope="module")
def default(tokenizer):
    return ChatFormat(tokenizer)


WORDS = [
    "hello",
    "日本語",
    "naïve — é",
    "def f():\n    return 1",
    "  ",
    "\n\n",
    'a "b" \\ c',
    "</tools>",
    "1234",
    "🙂",
    "x\ty",
]
TEXT = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)
JSON = st.dictionaries(st.sampled_from(["path", "城市", "k y"]), st.one_of(TEXT, st.integers(-9, 9), st.lists(TEXT)))


@st.composite
def tools_of(draw):
    names = draw(st.lists(st.sampled_from(["run", "天气", "edit_file"]), unique=True, max_size=3))
    return [
        {
            "type": "function",
            "function": {"name": name, "description": draw(TEXT), "parameters": {"type": "object", **draw(JSON)}},
        }
        for name in names
    ]


@st.composite
def history(draw):
    """A conversation that ends with what the model is to answer, calls and their results in it."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": draw(TEXT)})
    for _ in range(draw(st.integers(0, 3))):
        arguments = draw(st.lists(JSON, max_size=2))
        message = {"role": "assistant", "content": draw(st.one_of(st.none(), TEXT))}
        if arguments:
            written = [json.dumps(a, ensure_ascii=draw(st.booleans())) for a in arguments]
            calls = [{"id": f"c{i}", "type": "function", "function": {"name": "run", "arguments": a}}
                     for i, a in enumerate(written)]  # fmt: skip
            message["tool_calls"] = calls
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": f"c{i}", "content": draw(TEXT)} for i in range(len(arguments))]
        if not arguments or draw(st.booleans()):
            messages.append({"role": "user", "content": draw(TEXT)})
    return messages


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=history(), tools=tools_of())
def test_histories_with_tools_have_the_ids_of_the_published_template(own, default, published, messages, tools):
    theirs = published.ids(messages, tools)
    assert own.prompt(messages, tools) == theirs
    assert default.prompt(messages, tools) == theirs


@settings(max_examples=50, deadline=None)
@given(messages=history(), tools=tools_of(), added=TEXT)
def test_turn_by_turn_it_has_the_ids_of_the_whole(tokenizer, own, published, messages, tools, added):
    """Turn k+1 starts with the ids of turn k; where the template shows what was said, they are the whole's."""
    said = "Done."
    for results in ([{"role": "user", "content": added}], [{"role": "tool", "content": added}] * 2):
        before = own.prompt(messages, tools)
        generated = [*tokenizer.encode(said), tokenizer.im_end]
        grown = before + generated + own.continuation(results, generated[-1])
        whole = [*messages, {"role": "assistant", "content": said}, *results]
        assert grown[: len(before)] == before and grown == published.ids(whole, tools)


def test_its_own_options_reach_the_template(own, published, tokenizer):
    messages = [{"role": "user", "content": "u"}]
    quick = own.prompt(messages, options={"enable_thinking": False})
    assert quick == published.ids(messages, enable_thinking=False) != own.prompt(messages)
    later = own.continuation(messages, tokenizer.im_end, options={"enable_thinking": False})
    assert tokenizer.decode(later).endswith("<think>\n\n</think>\n\n")


def test_thoughts_of_earlier_turns_are_given_to_the_template(own, published):
    said = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    messages = [{"role": "user", "content": "u"}, said, {"role": "user", "content": "o"}]
    assert own.prompt(messages) == published.ids(messages)


def test_there_is_nothing_to_say_of_qwen3s_template(own, default):
    assert own.note is None and own.reads_calls and default.reads_calls

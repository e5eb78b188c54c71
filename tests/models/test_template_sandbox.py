"""Templates of strangers: what cannot be compiled is one line, and loops, texts and numbers have bounds."""

import time

import pytest

from venusrl.core.errors import ConfigError, ContractError
from venusrl.models.template import ChatTemplate

MESSAGES = [{"role": "user", "content": "100% *hi* 12345678", "created": 1733011200}]


def rendered(source: str) -> str:
    return "".join(text for text, _ in ChatTemplate(source, ["<|im_end|>"]).render(MESSAGES))


@pytest.mark.parametrize(
    "source",
    [
        "".join(f"{{% for a{i} in [1] %}}" for i in range(21)) + "x" + "{% endfor %}" * 21,
        "{{ " + "(" * 120 + "1" + ")" * 120 + " }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "1+" * 20000 + "1 }}",
        "{{ " + "a." * 20000 + "a }}",
        "{% if a %}" * 200 + "{% endif %}" * 200,
        "{{ " + "9" * 5000 + " }}",
        "{% for %}",
    ],
    ids=["loops", "parentheses", "many parentheses", "terms", "attributes", "ifs", "digits", "no loop"],
)
def test_what_cannot_be_compiled_is_one_line(source):
    try:
        rendered(source)  # what can be is right as well
    except ConfigError as error:
        assert "no Jinja" in str(error) and "\n" not in str(error)
    except ContractError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{{ 'a' * (10**11) }}",
        "{{ ([1] * 99999999)|length }}",
        "{{ 9**(9**9) }}",
        "{{ '%0999999999d'|format(1) }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'a'|center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ lipsum(n=10**9) }}",
        "{{ [1]|tojson(indent=10**10) }}",
        "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{{ range(99999)|list|join('b' * 99999) }}",
        "{% for i in range(999) %}{{ 'a' * 99999 }}{% endfor %}",
    ],
)
def test_loops_texts_and_numbers_have_bounds(source):
    start = time.monotonic()
    with pytest.raises(ContractError, match="template fails"):
        rendered(source)
    assert time.monotonic() - start < 30  # a second where nothing else runs


def test_what_templates_do_is_within_the_bounds():
    source = (
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ loop.length }}{{ m.content | trim }}"
        "{{ m.content.split('%')[0] ~ m.created }}{{ m.created | tojson }}{{ m.content.replace('*', '') }}{% endfor %}"
        "{{ '%05d' % 7 }}{{ 'a'|center(3) }}{{ 3 * 4 + 2 ** 3 }}{{ [1, 2]|join(', ') }}"
        "{% for a, b in {'x': 1}.items() if b %}{{ a }}{% else %}none{% endfor %}"
    )
    assert rendered(source) == (
        "0True1100% *hi* 123456781001733011200"
        + "1733011200"
        + "100% hi 12345678"
        + "00007"
        + " a "
        + "20"
        + "1, 2"
        + "x"
    )

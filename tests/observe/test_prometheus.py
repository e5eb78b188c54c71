"""/metrics, read as Prometheus reads it."""

import dataclasses

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from venusrl.observe.prometheus import Description, exposition
from venusrl.rollout.worker import LOAD_DESCRIPTIONS, Load

GROWS = {"generated_tokens", "prefilled_tokens", "pause_s", "prompt_tokens", "hit_tokens", "kept_tokens"} | {
    *("kept_hit_tokens", "stale_tokens", "retracted", "demoted", "moved_tokens", "returned_tokens", "evicted_pages")
}


def families(load: Load, name: str = "w"):
    text = exposition("venusrl_worker", dataclasses.asdict(load), {"worker": name}, LOAD_DESCRIPTIONS)
    return {family.name: family for family in parse(text)}


def test_every_number_of_a_load_is_described():
    assert set(LOAD_DESCRIPTIONS) == {field.name for field in dataclasses.fields(Load)}


def test_what_only_grows_is_a_counter_and_the_rest_are_gauges():
    load = Load(*range(1, 1 + len(dataclasses.fields(Load))))
    found = families(load)
    assert len(found) == len(dataclasses.fields(Load))
    for name, value in dataclasses.asdict(load).items():
        family = found[f"venusrl_worker_{name.removesuffix('_s')}" + ("_seconds" if name.endswith("_s") else "")]
        assert family.type == ("counter" if name in GROWS else "gauge"), name
        (sample,) = family.samples  # no _created beside it
        assert sample.name == family.name + ("_total" if name in GROWS else "")
        assert (sample.value, sample.labels) == (value, {"worker": "w"})
        assert family.documentation.endswith(".") and " " in family.documentation


def test_a_label_is_escaped():
    name = 'a"b\\c\nd'
    (sample,) = families(Load(1, 2, 3, 4, 5, 6.5), name)["venusrl_worker_pause_seconds"].samples
    assert sample.labels == {"worker": name} and sample.value == 6.5


def test_a_number_without_a_description_is_a_bug():
    with pytest.raises(KeyError, match="b"):
        exposition("p", {"a": 1, "b": 2}, {}, {"a": Description("What a is.", counter=False)})

"""Configurations are checked before anything starts."""

import json

import pytest
from ml_collections import config_dict

from configs import base, quickstart
from launchers import system
from launchers.configuration import check_config, load_config, save_config
from venusrl.core.errors import ConfigError


def changed(field: str, value) -> config_dict.ConfigDict:
    config = base.get_config()
    with config.unlocked():
        config.update_from_flattened_dict({field: value})
    return config


@pytest.mark.parametrize("config", [base.get_config(), quickstart.get_config(), quickstart.get_config("smoke")])
def test_our_own_configurations_pass(config):
    check_config(config)


def test_unknown_arguments_are_refused():
    with pytest.raises(ValueError, match="'smok' is unknown"):
        quickstart.get_config("smok")


@pytest.mark.parametrize(
    ("field", "nearest"),
    [
        ("learner.learning_rat", "config.learner.learning_rate"),
        ("batch_group", "config.batch_groups"),
        ("rollout.slot", "config.rollout.slots"),
        ("rolout", "config.rollout"),
    ],
)
def test_an_unknown_field_names_the_nearest(field, nearest):
    with pytest.raises(ConfigError, match=f"config.{field} is no field; the nearest is {nearest}$"):
        check_config(changed(field, 1))


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("steps", 1.5, "must be a int"),
        ("steps", "10", "must be a int"),
        ("steps", True, "must be a int"),
        ("steps", None, "must be a int"),
        ("model.name", 3, "must be a str"),
        ("model.remat", 1, "must be a bool"),
        ("learner.learning_rate", "1e-4", "must be a float"),
        ("learner.learning_rate", False, "must be a float"),
        ("rollout.prefill_rows", 4, "must be a tuple"),
    ],
)
def test_a_wrong_type_is_named(field, value, wanted):
    state = inner = base.get_config().to_dict()
    *groups, name = field.split(".")
    for group in groups:
        inner = inner[group]
    inner[name] = value
    with pytest.raises(ConfigError, match=f"config.{field}=.*{wanted}"):
        check_config(config_dict.ConfigDict(state))


@pytest.mark.parametrize(("field", "value"), [("learner.learning_rate", 1), ("rollout.prefill_rows", [1, 2])])
def test_harmless_types_pass(field, value):
    config = base.get_config()
    group, name = field.split(".")
    with config[group].ignore_type():
        config[group][name] = value
    check_config(config)


def test_a_group_must_be_a_group():
    config = base.get_config()
    with config.unlocked(), config.ignore_type():
        config.eval = 3
    with pytest.raises(ConfigError, match=r"config.eval=3 must be a group of fields"):
        check_config(config)


@pytest.mark.parametrize("field", ["seed", "rollout.slots", "learner"])
def test_a_missing_field_is_named(field):
    config = base.get_config()
    *groups, name = field.split(".")
    inner = config[groups[0]] if groups else config
    with inner.unlocked():
        del inner[name]
    with pytest.raises(ConfigError, match=f"config.{field} is missing"):
        check_config(config)


def test_saved_and_loaded_is_equal(tmp_path):
    config = quickstart.get_config("smoke")
    config.learner.learning_rate = 1.5e-5
    config.rollout.read_lengths = ()
    save_config(config, tmp_path)
    again = load_config(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert isinstance(again.learner.mesh, tuple)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_no_configuration_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json in"):
        load_config(tmp_path)


def test_a_configuration_of_another_program_is_refused(tmp_path):
    state = base.get_config().to_dict() | {"setps": 1}
    (tmp_path / "config.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"config.setps is no field; the nearest is config.steps"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("make", "field", "value", "message"),
    [
        (system.load_model, "model.name", "tinny", "model.name='tinny' is unknown; one of tiny"),
        (system.load_model, "model.source", "s3", "model.source='s3' is unknown"),
        (system.load_model, "model.checkpoint", "/nowhere", "no tokenizer at /nowhere"),
        (system.make_coordinator, "env.train_tasks", 0, "env.train_tasks=0"),
        (system.make_coordinator, "async_factor", 0.5, "async_factor=0.5"),
        (lambda c: system.make_tasks(c, None, "train"), "env.name", "repiar", "env.name='repiar' is unknown; one of"),
        (lambda c: system.make_learner(c, None), "learner.row_length", 100, "row_length=100 is below"),
    ],
)
def test_bad_values_are_named(make, field, value, message):
    with pytest.raises(ConfigError, match=message):
        make(changed(field, value))


def test_the_coordinator_gets_its_options():
    config = quickstart.get_config("smoke")
    config.async_factor, config.seed = 1.5, 3
    options = system.make_coordinator(config).options
    assert (options.group_size, options.batch_groups, options.updates) == (4, 2, 2)
    assert (options.async_factor, options.seed, options.max_refills) == (1.5, 3, config.max_refills)


def test_both_splits_have_their_size():
    config = base.get_config()
    assert len(system.make_tasks(config, None, "train")) == config.env.train_tasks
    assert len(system.make_tasks(config, None, "heldout")) == config.env.heldout_tasks

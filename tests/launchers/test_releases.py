"""A run of an older release goes on, or is refused with one line. older/ has config.json as three of them wrote it."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from configs import base, quickstart
from launchers import releases
from launchers.configuration import check_config, check_same_run, load_config, save_config
from venusrl.core.errors import ConfigError

OLDER = Path(__file__).parent / "older"
RELEASES = ["early", "middle", "late"]
LACKS = {  # a field that each release did not have yet
    "early": ["scheduler.prediction='predictor'", "rollout.page=16", "rollout.workers=1", "learner.skip_zero_variance"],
    "middle": ["rollout.page=16", "rollout.addresses=()", "rollout.lanes=0"],
    "late": ["rollout.lanes=0", "rollout.attention='auto'"],
}


@pytest.fixture
def run(tmp_path, request):
    shutil.copy(OLDER / f"{request.param}.json", tmp_path / "config.json")
    return request.param, tmp_path


@pytest.mark.parametrize("run", RELEASES, indirect=True)
def test_the_configuration_of_an_older_release_takes_defaults_and_says_so(run, caplog):
    release, workdir = run
    saved = json.loads((workdir / "config.json").read_text())
    with caplog.at_level(logging.WARNING):
        config = load_config(workdir)
    check_config(config)
    assert config.learner.learning_rate == saved["learner"]["learning_rate"]
    assert config.scheduler.name == saved["scheduler"]["name"]
    lines = [r.getMessage() for r in caplog.records if "takes its default" in r.getMessage()]
    assert len(lines) == 1 and str(workdir / "config.json") in lines[0] and "\n" not in lines[0]
    assert all(f"config.{field}" in lines[0] for field in LACKS[release]), lines[0]


@pytest.mark.parametrize("run", ["early", "middle"], indirect=True)
@pytest.mark.parametrize(("kept", "update"), [(True, "keep"), (False, "recompute")])
def test_a_removed_field_is_named_with_what_replaced_it(run, caplog, kept, update):
    _, workdir = run
    saved = json.loads((workdir / "config.json").read_text())
    saved["rollout"]["keep_kv"] = kept
    (workdir / "config.json").write_text(json.dumps(saved))
    with caplog.at_level(logging.WARNING):
        config = load_config(workdir)
    assert config.rollout.on_update == update and "keep_kv" not in config.rollout
    said = f"config.rollout.keep_kv={kept} is gone; config.rollout.on_update='{update}' replaced it"
    assert any(said in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("run", RELEASES, indirect=True)
def test_the_same_run_is_known_across_releases(run):
    """Its command goes on; other tasks are another run."""
    _, workdir = run
    config = quickstart.get_config("smoke")
    was = load_config(workdir)
    for name in ("seed", "group_size", "batch_groups"):
        config[name] = was[name]
    config.env.update(was.env)
    check_same_run(config, workdir)
    config.env.max_turns += 1
    with pytest.raises(ConfigError, match=r"config\.env\.max_turns=13, but the run .* was started with 12"):
        check_same_run(config, workdir)


def test_every_removed_field_is_none_of_todays_and_what_replaced_it_is():
    today = base.get_config()
    for name, gone in releases.REMOVED.items():
        group, own = name.split(".")
        assert own not in today[group]
        group, own = gone.by.split(".")
        assert own in today[group]


def test_an_override_of_a_removed_field_names_what_replaced_it(forked):
    [(code, output)] = forked.run_all([("launchers.train", ["--config.rollout.keep_kv=True"])], processes=1)
    assert code == 1 and "config.rollout.on_update replaced it" in output and output.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is cut short or no JSON"),
        (b"{", "is cut short or no JSON"),
        (b"\xff\xfe\x00", "is cut short or no JSON"),
        (b"\x00" * 100, "is cut short or no JSON"),
        (b"[" * 100_000, "is cut short or no JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "is cut short or no JSON"),
        (b"[1, 2]", "holds a list, not an object"),
        (b"null", "holds a NoneType, not an object"),
        (b'"x"', "holds a str, not an object"),
        (b"{}", None),  # nothing but defaults
        (b'{"learner": 3}', "config.learner=3 must be a group of fields"),
        (b'{"seed": "x"}', "config.seed='x' "),
        (b'{"seed": null}', "config.seed=None "),
        (b'{"learner": {"mesh": [1, "a", 1]}}', r"config.learner.mesh=\(1, 'a', 1\) "),
        (b'{"learner": {"learning_rate": NaN}}', "config.learner.learning_rate=nan "),
        (b'{"learner": {"learning_rate": -1e999}}', "config.learner.learning_rate=-inf "),
        (b'{"checkpoint": {"keep": -1}}', "config.checkpoint.keep=-1 "),
        (b'{"setps": 1}', "config.setps is no field; the nearest is config.steps"),
        (b'{"": 1}', "config. is no field"),
        (b'{"a.b": 1}', "."),
    ],
)
def test_a_damaged_configuration_is_one_clear_error(tmp_path, content, said):
    (tmp_path / "config.json").write_bytes(content)
    if said is None:
        assert load_config(tmp_path).to_dict() == base.get_config().to_dict()
        return
    with pytest.raises(ConfigError, match=said) as refused:
        load_config(tmp_path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_every_cut_of_a_configuration_is_refused(tmp_path):
    save_config(quickstart.get_config(), tmp_path)
    whole = (tmp_path / "config.json").read_bytes()
    for length in range(0, len(whole) - 2, 7):
        (tmp_path / "config.json").write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=rf"{tmp_path}/config\.json is cut short or no JSON"):
            load_config(tmp_path)

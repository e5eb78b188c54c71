"""Checkpoints come back equal, survive donation, damage and a full disk."""

import json
import logging
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import abstract_path

from venusrl.core.errors import CheckpointError, ConfigError
from venusrl.learner.checkpoint import Checkpointer
from venusrl.learner.state import TrainState, new_state

from .. import disk
from . import tiny

# TensorStore's abandoned reads, after a restore that was refused.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

EXTRA = {"version": 3, "groups": [{"id": "g0", "reward": 0.25, "reasons": []}], "name": "\u00e9"}


def state_of(seed: int, width: int = 6) -> TrainState:
    rng = np.random.default_rng(seed)
    params = {"a": {"w": jnp.asarray(rng.normal(size=(width, 4)), jnp.float32)}, "b": jnp.asarray(rng.normal(size=5))}
    state = new_state(params, tiny.adam())
    moments = jax.tree.map(lambda x: x + seed if x.dtype == jnp.float32 else x + 7, state.opt_state)
    return state.replace(step=jnp.int32(seed), opt_state=moments, skipped=jnp.int32(1))


def abstract(state: TrainState):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def host(tree):
    return jax.tree.map(np.array, tree)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def two(folder):
    """Steps 1 and 2 on disk."""
    checkpointer = Checkpointer(folder, keep=2)
    for step in (1, 2):
        checkpointer.save(step, state_of(step), EXTRA | {"version": step})
    checkpointer.close()
    return folder


def test_restored_equals_saved(folder):
    checkpointer = Checkpointer(folder)
    assert checkpointer.restore(abstract(state_of(0))) is None and checkpointer.steps == []
    checkpointer.save(5, state_of(5), EXTRA)
    checkpointer.close()
    again = Checkpointer(folder)
    step, state, extra = again.restore(abstract(state_of(0)))
    assert (step, extra, again.steps) == (5, json.loads(json.dumps(EXTRA)), [5])
    chex.assert_trees_all_equal(host(state), host(state_of(5)))
    assert jax.tree.structure(state) == jax.tree.structure(state_of(5))  # optax's tuples, not lists
    again.close()


def test_donating_right_after_an_asynchronous_save_is_safe(folder):
    spoil = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    nobodys = jax.device_put(state_of(2, width=200_000))
    spoil(nobodys)  # compiled before, so that the donation below comes while the save is under way
    assert nobodys.params["a"]["w"].is_deleted()
    state = jax.device_put(state_of(3, width=200_000))
    before = host(state)
    checkpointer = Checkpointer(folder)
    checkpointer.save(3, state, {})
    spoilt = spoil(state)
    assert float(spoilt.params["a"]["w"][0, 0]) == -1
    checkpointer.wait()
    _, restored, _ = checkpointer.restore(abstract(spoilt))
    chex.assert_trees_all_equal(host(restored), before)
    checkpointer.close()


def test_only_the_newest_are_kept(folder):
    checkpointer = Checkpointer(folder, keep=2)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, state_of(step), {})
    checkpointer.wait()
    assert checkpointer.steps == [3, 4]
    checkpointer.close()
    assert sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) == [3, 4]


def numbers(folder) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def left(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.isdigit())


def test_an_old_checkpoint_that_cannot_be_removed_keeps_no_save_from_being_done(folder, monkeypatch, caplog):
    """Something is mounted in it, or held open over NFS: each later save counted as failed, and nothing was removed."""
    held, remove = True, shutil.rmtree

    def rmtree(path, ignore_errors=False):
        if not held or not (path / "held").exists():
            return remove(path)
        for part in path.iterdir():
            if part.name != "held":
                remove(part) if part.is_dir() else part.unlink()
        if not ignore_errors:
            raise OSError(16, "Device or resource busy", "held")

    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(1, state_of(1), EXTRA)
    checkpointer.wait()
    (folder / "1" / "held").mkdir()
    (folder / "1" / "held" / "file").touch()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with caplog.at_level(logging.WARNING):
        for step in (2, 3, 4):
            checkpointer.save(step, state_of(step), EXTRA)
            checkpointer.wait()
            assert (checkpointer.steps, checkpointer.latest, checkpointer.failures) == ([step], step, 0)
            assert (numbers(folder), left(folder)) == ([step], ["removed-1"])
    assert [path.name for path in (folder / "removed-1").iterdir()] == ["held"]  # all that could go has gone
    said = [record.getMessage() for record in caplog.records if "cannot be removed" in record.getMessage()]
    assert len(said) == 1 and "removed-1" in said[0] and "Device or resource busy" in said[0]
    checkpointer.close()
    again = Checkpointer(folder, keep=1)  # takes no notice of it, and removes it when it can
    assert again.restore(abstract(state_of(0)))[0] == 4 and left(folder) == ["removed-1"]
    held = False
    again.save(5, state_of(5), EXTRA)
    again.close()
    assert (numbers(folder), left(folder)) == ([5], [])


def test_an_old_checkpoint_that_cannot_even_be_renamed_stays_and_the_others_go(folder, monkeypatch, caplog):
    checkpointer = Checkpointer(folder, keep=2)
    rename = pathlib.Path.rename

    def refused(self, target):
        if self == folder / "1":
            raise PermissionError(1, "Operation not permitted", str(self))
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", refused)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3, 4, 5):
            checkpointer.save(step, state_of(step), EXTRA)
    checkpointer.close()
    assert (numbers(folder), left(folder), checkpointer.failures) == ([1, 4, 5], [], 0)
    assert sum("cannot be removed" in record.getMessage() for record in caplog.records) == 1


def test_a_mount_in_an_old_checkpoint_keeps_no_save_from_being_done(folder):
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(1, state_of(1), EXTRA)
    checkpointer.wait()
    with disk.small_disk(folder / "1" / "held"):
        checkpointer.save(2, state_of(2), EXTRA)
        checkpointer.wait()
        checkpointer.save(3, state_of(3), EXTRA)
        checkpointer.close()
        assert (numbers(folder), checkpointer.latest, checkpointer.failures) == ([3], 3, 0)
        (folder / "removed-1").rename(folder / "1")  # where it is unmounted


def test_reading_removes_nothing(folder):
    checkpointer = Checkpointer(folder, keep=0)
    for step in (1, 2, 3):
        checkpointer.save(step, state_of(step), {})
    checkpointer.close()
    reader = Checkpointer(folder, keep=1)
    assert reader.restore(abstract(state_of(0)))[0] == 3
    reader.close()
    assert numbers(folder) == [1, 2, 3]


def garble(path):
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(b"\x00garbage" * (1 + file.stat().st_size // 16))


def truncate(path):
    for file in path.rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {
    "garbled state": lambda step: garble(step / "state"),
    "truncated state": lambda step: truncate(step / "state"),
    "truncated extra": lambda step: truncate(step / "extra"),
    "no state": lambda step: shutil.rmtree(step / "state"),
    "no extra": lambda step: shutil.rmtree(step / "extra"),
    "no data files": lambda step: [shutil.rmtree(d) for d in (step / "state").iterdir() if d.is_dir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_falls_back_with_a_warning(two, caplog, damage):
    DAMAGE[damage](two / "2")
    checkpointer = Checkpointer(two)
    with caplog.at_level(logging.WARNING):
        step, state, extra = checkpointer.restore(abstract(state_of(0)))
    assert (step, extra["version"]) == (1, 1)
    chex.assert_trees_all_equal(host(state), host(state_of(1)))
    assert any(str(two) in r.getMessage() and "cannot be read" in r.getMessage() for r in caplog.records)
    checkpointer.close()


@pytest.mark.parametrize("text", ["[1]", "5", '"x"', '{"tree_metadata": 5}', "[[" * 5000])
@pytest.mark.parametrize("name", ["state/_METADATA", "_CHECKPOINT_METADATA"])
def test_a_newest_with_junk_in_its_description_falls_back_with_a_warning(two, caplog, name, text):
    if (name, text) == ("_CHECKPOINT_METADATA", '{"tree_metadata": 5}'):
        text = '{"commit_timestamp_nsecs": "x"}'
    (two / "2" / name).write_text(text)
    with caplog.at_level(logging.WARNING):
        checkpointer = Checkpointer(two)
        step, state, _ = checkpointer.restore(abstract(state_of(0)))
        checkpointer.close()
    chex.assert_trees_all_equal(host(state), host(state_of(step)))
    assert step == 1 and "2 cannot be read" in caplog.text


def test_saving_goes_on_after_a_damaged_newest(two):
    """orbax refuses steps below its latest without a word; a run that fell back to 1 would save nothing up to 2."""
    garble(two / "2" / "state")
    checkpointer = Checkpointer(two, keep=2)
    assert checkpointer.restore(abstract(state_of(0)))[0] == checkpointer.latest == 1
    checkpointer.save(2, state_of(20), {"version": 2})
    checkpointer.save(3, state_of(30), {"version": 3})
    checkpointer.wait()
    assert (checkpointer.steps, checkpointer.latest) == ([2, 3], 3)
    checkpointer.close()
    assert (two.parent / f"{two.name}-damaged-2" / "state").is_dir()  # nothing of the user's is deleted
    shutil.rmtree(two / "3")
    again = Checkpointer(two)
    step, state, _ = again.restore(abstract(state_of(0)))
    assert step == 2
    chex.assert_trees_all_equal(host(state), host(state_of(20)))
    again.save(2, state_of(21), {})  # the same step once more: what was set aside before stays
    again.close()
    assert (two.parent / f"{two.name}-damaged-2+" / "state").is_dir()


def test_all_damaged_is_an_error_not_a_fresh_start(two):
    for step in ("1", "2"):
        garble(two / step / "state")
    checkpointer = Checkpointer(two)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*step 2: .*step 1: "):
        checkpointer.restore(abstract(state_of(0)))
    checkpointer.close()


@pytest.mark.parametrize("width", [3, 7])  # a smaller one could be filled with a part of the larger
def test_another_models_shape_is_refused(two, width):
    checkpointer = Checkpointer(two)
    with pytest.raises(CheckpointError, match=r"--workdir"):
        checkpointer.restore(abstract(state_of(0, width=width)))
    checkpointer.close()


def test_another_models_parameters_are_refused(two):
    other = state_of(0)
    other.params["c"] = other.params.pop("b")
    checkpointer = Checkpointer(two)
    with pytest.raises(CheckpointError, match=r"--workdir"):
        checkpointer.restore(abstract(other))
    checkpointer.close()


def test_unfinished_save_is_no_checkpoint(two):
    """What a kill in the middle of a save leaves behind."""
    shutil.copytree(two / "2", two / "3.orbax-checkpoint-tmp-17")
    checkpointer = Checkpointer(two)
    assert checkpointer.steps == [1, 2]
    assert checkpointer.restore(abstract(state_of(0)))[0] == 2
    checkpointer.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    with disk.small_disk(tmp_path / "disk") as path:
        yield path


def test_a_full_disk_is_said_and_the_earlier_checkpoint_stays(small_disk):
    checkpointer = Checkpointer(small_disk / "c")
    first = state_of(1, width=5_000)  # 80 kB of noise in params, and its moments
    checkpointer.save(1, first, EXTRA)
    checkpointer.wait()
    with pytest.raises(CheckpointError, match=r"earlier checkpoints are kept: \[1\]"):
        checkpointer.save(2, state_of(2, width=400_000), EXTRA)  # 6.4 MB of noise
        checkpointer.wait()
    step, state, extra = checkpointer.restore(abstract(first))
    assert (step, extra) == (1, EXTRA)
    chex.assert_trees_all_equal(host(state), host(first))
    checkpointer.save(3, state_of(3, width=5_000), EXTRA)  # space again: the failure has not stuck
    checkpointer.wait()
    assert 3 in checkpointer.steps
    checkpointer.close()


def test_what_the_disk_has_no_room_for_is_not_begun(small_disk):
    checkpointer = Checkpointer(small_disk / "c")
    checkpointer.save(1, state_of(1, width=5_000), EXTRA)
    checkpointer.wait()
    filler = disk.fill(small_disk)
    for step in (2, 3):
        with pytest.raises(
            CheckpointError, match=r"no room: a checkpoint takes up to \d MB, and the disk has 0 MB left"
        ):
            checkpointer.save(step, state_of(step, width=5_000), EXTRA)
        assert (checkpointer.failures, checkpointer.latest) == (step - 1, None)
    assert [p.name for p in (small_disk / "c").iterdir()] == ["1"]  # nothing half done takes the room that is left
    filler.unlink()
    checkpointer.save(4, state_of(4, width=5_000), EXTRA)
    checkpointer.close()
    assert (checkpointer.steps, checkpointer.latest) == ([1, 4], 4)


def test_a_save_that_failed_in_the_background_keeps_the_next_from_nothing(folder, monkeypatch, caplog):
    checkpointer = Checkpointer(folder)
    monkeypatch.setattr(checkpointer, "_check_room", lambda state: None)
    write = abstract_path.Path.write_text

    def full(self, *args, **kwargs):
        if "/1.orbax" in str(self):
            raise OSError(28, "No space left on device")
        return write(self, *args, **kwargs)

    monkeypatch.setattr(abstract_path.Path, "write_text", full)
    checkpointer.save(1, state_of(1), EXTRA)
    with caplog.at_level(logging.WARNING):
        checkpointer.save(2, state_of(2), EXTRA)
    checkpointer.close()
    assert checkpointer.steps == [2] and checkpointer.latest == 2 and checkpointer.failures == 1
    assert any("earlier checkpoints are kept: []" in r.getMessage() for r in caplog.records)
    assert not list(folder.glob("*tmp*"))


def test_a_folder_that_was_removed_is_made_again(folder):
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, state_of(1), EXTRA)
    checkpointer.wait()
    shutil.rmtree(folder)
    checkpointer.save(2, state_of(2), EXTRA)
    checkpointer.close()
    again = Checkpointer(folder)
    assert again.restore(abstract(state_of(0)))[0] == 2
    again.close()


def test_keep_0_keeps_every_checkpoint(folder):
    checkpointer = Checkpointer(folder, keep=0)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, state_of(step), EXTRA | {"version": step})
    checkpointer.close()
    again = Checkpointer(folder, keep=0)
    assert again.steps == [1, 2, 3, 4]
    step, state, extra = again.restore(abstract(state_of(0)))
    assert (step, extra["version"]) == (4, 4)
    chex.assert_trees_all_equal(host(state), host(state_of(4)))
    again.close()


def test_a_negative_keep_is_refused(folder):
    with pytest.raises(ConfigError, match=r"checkpoint\.keep=-1 is negative"):
        Checkpointer(folder, keep=-1)
    assert not folder.exists()

"""Meshes of eight devices, forced on one CPU in another process, and what is refused before that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from venusrl.core.errors import ConfigError
from venusrl.learner.sharding import RULES, check_divisible, check_rules, make_mesh

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    env = os.environ | {
        # Compiling is what takes long here: code as it comes, and kept as the other tests keep theirs.
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("sharded_updates.py")),
            str(tmp_path_factory.mktemp("checkpoint")),
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", ["data", "all"])
def test_meshes_agree_with_one_device(report, mesh):
    assert report["devices"] == 8
    assert report[mesh]["loss"] == pytest.approx(report["one"]["loss"], abs=1e-5)
    assert report[mesh]["difference"] < 1e-5
    assert report["one"]["moved"] > 1e-3


def test_parameters_are_really_sharded(report):
    spread = report["all"]["spread"]
    for name, parts in spread.items():
        assert parts == (1 if "norm" in name else 4), name
    assert set(report["data"]["spread"].values()) == {1}
    assert len(spread) == len(report["one"]["spread"]) == 13


def test_moments_live_with_their_parameters(report):
    for mesh in ("one", "data", "all"):
        assert report[mesh]["moments_alike"] and report[mesh]["count_everywhere"]


@pytest.mark.parametrize("mesh", ["data", "one"])
def test_a_checkpoint_restores_onto_another_mesh(report, mesh):
    assert report[mesh]["restored"] == 0 and report[mesh]["restored_placed"]
    assert report[mesh]["loss_after"] == pytest.approx(report["all"]["loss_after"], abs=1e-5)


def test_meshes_that_do_not_fit_are_refused(report):
    assert "learner.mesh=(2, 2, 1) does not cover 8 devices" in report["uncovered"]
    assert "['attn']['k']" in report["indivisible"] and "not divisible by 8" in report["indivisible"]


def test_one_axis_takes_what_is_left():
    assert make_mesh((1, -1, 1)).shape == {"data": 1, "fsdp": len(jax.devices()), "tensor": 1}


@pytest.mark.parametrize("shape", [(1, 1), (-1, -1, 1), (0, 1, 1), (3, -1, 1), (1, 1, 1, 1)])
def test_impossible_meshes_are_refused(shape):
    with pytest.raises(ConfigError, match=r"learner\.mesh"):
        make_mesh(shape, jax.devices()[:1])


def test_rules_that_use_a_mesh_axis_twice_are_refused():
    specs = {"w": PartitionSpec("embed", "mlp"), "x": PartitionSpec("vocab", "heads")}
    check_rules(RULES, {"w": specs["w"]})
    with pytest.raises(ConfigError, match=r"\['x'\].*vocab.*heads"):
        check_rules(RULES, specs)
    with pytest.raises(ConfigError, match="colour"):
        check_rules(RULES, {"w": PartitionSpec("embed", "colour")})


def test_indivisible_parameter_is_named():
    """With a mesh in name only: eight devices are not needed to know that 6 is not a multiple of 4."""
    mesh = jax.sharding.AbstractMesh((1, 2, 4), ("data", "fsdp", "tensor"))
    sharding = {"w": NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))}
    check_divisible({"w": np.zeros((6, 8))}, sharding)
    with pytest.raises(ConfigError, match=r"\['w'\] of shape \(8, 6\) is not divisible by 4"):
        check_divisible({"w": np.zeros((8, 6))}, sharding)
    both = {"w": NamedSharding(mesh, PartitionSpec(("fsdp", "tensor")))}
    with pytest.raises(ConfigError, match="not divisible by 8"):
        check_divisible({"w": np.zeros((12,))}, both)

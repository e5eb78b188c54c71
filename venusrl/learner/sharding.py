"""The mesh, and the one table that maps logical axes to it."""

from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from venusrl.core.errors import ConfigError

AXES = ("data", "fsdp", "tensor")

# Logical axis of a parameter -> mesh axis. None is replicated.
RULES: tuple[tuple[str, str | None], ...] = (
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("mlp", "tensor"),
    ("head_dim", None),
    ("norm", None),
)
ROWS = PartitionSpec(("data", "fsdp"))  # of a batch: its rows are split, time is not


def make_mesh(shape: Sequence[int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (data, fsdp, tensor) mesh.

    Args:
      shape: three sizes; one of them may be -1 and takes what is left.
      devices: those to use; all by default.

    Raises:
      ConfigError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [int(s) for s in shape]
    if len(sizes) != len(AXES) or sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ConfigError(f"learner.mesh={tuple(shape)}; give three sizes for {AXES}, at most one of them -1")
    known = int(np.prod([s for s in sizes if s != -1]))
    sizes = [len(devices) // known if s == -1 else s for s in sizes]
    if int(np.prod(sizes)) != len(devices):
        raise ConfigError(f"learner.mesh={tuple(shape)} does not cover {len(devices)} devices; their product must")
    return Mesh(np.array(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_rules(rules: Sequence[tuple[str, str | None]], specs) -> None:
    """Refuses a parameter whose axes would use one mesh axis twice.

    Raises:
      ConfigError: naming the parameter and the axes.
    """
    table: Mapping[str, str | None] = dict(rules)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)):
        unknown = [axis for axis in spec if axis is not None and axis not in table]
        used = [table[axis] for axis in spec if axis is not None and table.get(axis)]
        if unknown or len(used) != len(set(used)):
            name = jax.tree_util.keystr(path)
            raise ConfigError(f"sharding rules: {name} has logical axes {tuple(spec)}, which map to {used}; fix RULES")


def param_shardings(boxed_params, mesh: Mesh):
    """Sharding of each parameter, from the logical axes it was declared with (see models.decoder)."""
    specs = nn.get_partition_spec(boxed_params)
    check_rules(RULES, specs)
    return nn.logical_to_mesh_sharding(specs, mesh, RULES)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def rows_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, ROWS)


def check_divisible(shapes, shardings) -> None:
    """Refuses a mesh that does not divide a parameter evenly.

    Raises:
      ConfigError: naming the parameter, its shape and the mesh axes.
    """
    shape_leaves = jax.tree_util.tree_leaves_with_path(shapes)
    for (path, leaf), sharding in zip(shape_leaves, jax.tree.leaves(shardings), strict=True):
        for size, axis in zip(leaf.shape, tuple(sharding.spec), strict=False):
            axes = (axis,) if isinstance(axis, str) else (axis or ())
            parts = int(np.prod([sharding.mesh.shape[a] for a in axes]))
            if size % parts:
                name = jax.tree_util.keystr(path)
                raise ConfigError(
                    f"learner.mesh: {name} of shape {leaf.shape} is not divisible by {parts} ({axes}); use fewer parts "
                    "along those axes"
                )

"""Run by test_sharding.py in a process of its own: the number of devices is fixed when JAX starts.

Prints one JSON object: for each mesh the loss, the distance of the updated parameters to those of one device, and
how they are spread.
"""

import json
import sys

import jax
import numpy as np
import tiny  # beside this file, which is run as a script

from venusrl.core.errors import ConfigError
from venusrl.learner.checkpoint import Checkpointer
from venusrl.learner.objectives.grpo import Grpo
from venusrl.learner.sharding import make_mesh

MESHES = {"one": (1, 1, 1), "data": (8, 1, 1), "all": (2, 2, 2)}


def learner(name):
    shape = MESHES[name]
    mesh = make_mesh(shape, jax.devices()[: int(np.prod(shape))])
    return tiny.learner(Grpo(), mesh=mesh, rows_per_part=8)


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def difference(ours, theirs):
    ours, theirs = leaves(ours), leaves(theirs)
    assert set(ours) == set(theirs)
    return max(float(np.abs(np.asarray(ours[k]) - np.asarray(theirs[k])).max()) for k in ours)


def main(folder):
    report = {"devices": len(jax.devices())}
    learners, start = {}, tiny.params()
    for name in MESHES:
        learners[name] = learner(name)
        learners[name].start_from(start)
        metrics = learners[name].train(tiny.trajectories(0, 8), np.linspace(-1, 1, 8))
        params = learners[name].state.params
        spread = {k: x.nbytes / sum(s.data.nbytes for s in x.addressable_shards[:1]) for k, x in leaves(params).items()}
        adam = learners[name].state.opt_state[0]
        report[name] = {
            "loss": metrics["loss"],
            "moved": difference(params, start),
            "difference": difference(params, learners["one"].state.params),
            "spread": spread,
            "moments_alike": all(
                x.sharding.is_equivalent_to(leaves(params)[k].sharding, x.ndim)
                for moment in (adam.mu, adam.nu)
                for k, x in leaves(moment).items()
            ),
            "count_everywhere": adam.count.sharding.is_fully_replicated,
        }
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, learners["all"].state, {"mesh": MESHES["all"]})
    checkpointer.wait()
    for name in ("data", "one"):
        step, state, extra = checkpointer.restore(learners[name].abstract_state())
        assert (step, extra) == (1, {"mesh": list(MESHES["all"])})
        shardings = leaves(learners[name].shardings)
        report[name] |= {
            "restored": difference(state, learners["all"].state),
            "restored_placed": all(x.sharding == shardings[k] for k, x in leaves(state).items()),
        }
        learners[name].restore(state)
        report[name]["loss_after"] = learners[name].train(tiny.trajectories(1, 8), np.ones(8))["loss"]
    checkpointer.close()
    report["all"]["loss_after"] = learners["all"].train(tiny.trajectories(1, 8), np.ones(8))["loss"]
    for name, shape in {"uncovered": (2, 2, 1), "indivisible": (1, 1, 8)}.items():
        try:
            tiny.learner(Grpo(), mesh=make_mesh(shape), rows_per_part=8)
        except ConfigError as error:
            report[name] = str(error)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])

"""The newest checkpoint of a run as a folder that transformers loads, and what reads such folders.

    python -m launchers.export --workdir=runs/quickstart --out=exported
    python -m launchers.export --workdir=runs/quickstart --out=exported --dtype=bfloat16 --shard_gb=2

Writes config.json, generation_config.json, the tokenizer's files (those of the model that was trained, as they are;
what it lacks is made) and safetensors. The folder appears whole or not at all. It loads here again with
--config.model.name= --config.model.checkpoint=exported.
"""

from absl import flags

from launchers import program
from launchers.finished import export

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
_OUT = flags.DEFINE_string("out", None, "Folder to write; it must not exist, or be empty.", required=True)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of the weights.")
_SHARD_GB = flags.DEFINE_float("shard_gb", 5.0, "Largest file of weights, in GB (10^9 bytes).", lower_bound=1e-6)


def main(argv) -> None:
    del argv
    step = export(_WORKDIR.value, _OUT.value, _DTYPE.value, int(_SHARD_GB.value * 1e9))
    print(f"step {step} of {_WORKDIR.value} is in {_OUT.value}")


if __name__ == "__main__":
    program.run(main)

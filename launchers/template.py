"""Builds the files that sandboxes begin with, and shows and deletes what is built.

    python -m launchers.template build my.toml      # name = "numpy", setup = ["git clone ...", "make"], lowers = [...]
    python -m launchers.template list
    python -m launchers.template inspect numpy      # by name, or by the beginning of the key; verifies every file
    python -m launchers.template delete numpy       # refused while sandboxes use it

A file has the fields of venusrl.sandbox.Template but `files`. What is built already, under the same set-up and the same
lower directories, is not built again.
"""

import asyncio
import dataclasses
import json
import tomllib
from pathlib import Path

from absl import flags

from launchers import program
from venusrl.core.errors import ConfigError
from venusrl.sandbox import SandboxPool, Template
from venusrl.sandbox.layers import LayerStore, default_folder, layer_key

_STORE = flags.DEFINE_string("store", "", "Folder of built templates; empty: one of this user's.")
_USAGE = "usage: python -m launchers.template build FILE | list | inspect NAME | delete NAME [--store=FOLDER]"


def read(path: str) -> Template:
    """The template that a file describes.

    Raises:
      ConfigError: it cannot be read, or a field is wrong.
    """
    try:
        fields = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; give a TOML file with the fields of a template") from None
    known = {field.name for field in dataclasses.fields(Template)} - {"files"}
    unknown = sorted(fields.keys() - known)
    if unknown or "name" not in fields:
        what = f"unknown: {', '.join(unknown)}" if unknown else "no name"
        raise ConfigError(f"{path}: {what}; a template has {', '.join(sorted(known))}")
    return Template(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


async def build(template: Template, store: LayerStore) -> str:
    """Builds it where it is not; its key."""
    if not template.is_built:
        raise ConfigError(f"template {template.name!r} has neither setup nor lowers: there is nothing to build")
    async with SandboxPool(max_sandboxes=1, templates=store.folder) as pool:
        await (await pool.create(template)).kill()
    return layer_key(template)


def run(arguments: list[str], store: LayerStore) -> None:
    match arguments:
        case ["build", path]:
            manifest = store.find(asyncio.run(build(read(path), store)))
            print(f"{manifest.name} {manifest.key[:12]}: {manifest.files} files, {manifest.bytes} bytes")
        case ["list"]:
            for manifest in store.list():
                print(f"{manifest.key[:12]}  {manifest.bytes:>14,} bytes  {manifest.files:>7,} files  {manifest.name}")
        case ["inspect", name]:
            manifest = store.find(name)
            print(json.dumps(dataclasses.asdict(manifest), indent=1))
            store.verify(manifest.key)
            print("every file is as it was built")
        case ["delete", name]:
            manifest = store.find(name)
            store.delete(manifest.key)
            print(f"deleted {manifest.name} {manifest.key[:12]}")
        case _:
            raise ConfigError(_USAGE)


def main(argv: list[str]) -> None:
    run(argv[1:], LayerStore(_STORE.value or default_folder()))


if __name__ == "__main__":
    program.run(main, arguments=True)

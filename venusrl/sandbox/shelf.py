"""The layers that one pool uses: found or built when a template first needs them, in use until the pool closes.

The lower directories of a template are looked at, whole, when no layer of it is in use: a change of one is not seen
while there are sandboxes of the template, and a minute longer. What failed is tried anew by the next who asks.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from venusrl.core.errors import SandboxError
from venusrl.sandbox.contract import Template
from venusrl.sandbox.layers import Layer, LayerStore, layer_key


class Shelf:
    """Args:
    store: where layers are.
    build: runs a template's set-up in a folder that has its lower directories.
    """

    def __init__(self, store: LayerStore, build: Callable[[Template, Path], Awaitable[None]]):
        self.store = store
        self._build = build
        self._keys: dict[tuple, str] = {}
        self._layers: dict[str, Layer] = {}
        self._locks: dict[tuple, asyncio.Lock] = {}

    async def layer(self, template: Template) -> Layer:
        """The template's layer, from now on in use.

        Raises:
          SandboxError: it cannot be built, or is damaged.
        """
        recipe = (template.lowers, template.setup, tuple(sorted(template.env.items())), template.tenant)
        async with self._locks.setdefault(recipe, asyncio.Lock()):
            key = self._keys.get(recipe) or await asyncio.to_thread(layer_key, template)
            if key not in self._layers:
                found = await asyncio.to_thread(self.store.open, key)
                self._layers[key] = found or await self._make(template, key)
            self._keys[recipe] = key
            return self._layers[key]

    async def known(self, key: str) -> Layer | None:
        """The layer of that key, from now on in use; None where it is not built."""
        async with self._locks.setdefault((key,), asyncio.Lock()):
            if key not in self._layers:
                found = await asyncio.to_thread(self.store.open, key)
                if found is None:
                    return None
                self._layers[key] = found
            return self._layers[key]

    async def _make(self, template: Template, key: str) -> Layer:
        staged = await asyncio.to_thread(self.store.stage, template, key)
        try:
            if template.setup:
                await self._build(template, staged / "tree")
            await asyncio.to_thread(self.store.finish, template, key, staged)
        except BaseException:
            await asyncio.to_thread(self.store.discard, staged)
            raise
        layer = await asyncio.to_thread(self.store.open, key)
        if layer is None:
            raise SandboxError(f"template {template.name!r} was deleted as soon as it was built; create again")
        return layer

    def release(self, layer: Layer) -> None:
        """The layer is not in use any more, until it is asked for again."""
        if self._layers.get(layer.manifest.key) is layer:
            del self._layers[layer.manifest.key]
            self._keys = {recipe: key for recipe, key in self._keys.items() if key != layer.manifest.key}
        layer.close()

    def close(self) -> None:
        """The layers may be deleted."""
        for layer in self._layers.values():
            layer.close()
        self._layers.clear()

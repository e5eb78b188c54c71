"""What the engine's programs ask of an attention."""

from typing import Any, Protocol

import jax

from venusrl.models.decoder import Attend
from venusrl.rollout.engine.cache import LayerCache


class RowAttention(Protocol):
    """Attention over rows of KV. Hashable, for it is a static argument of compiled programs.

    Decode leaves the rows alone for a chunk of steps: `begin` makes of a layer what stays as it is and what the steps
    write to, `decode` attends over both, `end` writes the steps to the rows.
    Shapes: R rows of a call, T new tokens, S cached positions, N query heads, K key/value heads, H head width.
    """

    name: str

    def prefill(self, rows_R: jax.Array, positions_RT: jax.Array, valid_RT: jax.Array, read: int) -> Attend:
        """Writes new keys and values into the rows, then attends over each up to each query's own position.

        Args:
          rows_R: rows of the cache that the batch speaks of.
          positions_RT: where each new token stands in its sequence.
          valid_RT: False for padding: nothing of it is written, and its output means nothing.
          read: positions of the cache that are looked at; every valid position is below it.
        """
        ...

    def begin(self, cache: LayerCache, rows_R: jax.Array | None, read: int, steps: int) -> tuple[Any, Any]:
        """(what stays, what is written), for `steps` steps over the first `read` positions of some rows (None: all)."""
        ...

    def decode(self, start_R: jax.Array, step: jax.Array) -> Attend:
        """Attends over the first `start_R` positions of each row and the steps up to `step`.

        The cache of a layer is the pair of `begin`; what is written comes back. Every row writes at every step; what it
        writes after its end is never read.
        """
        ...

    def end(
        self, cache: LayerCache, rows_R: jax.Array | None, start_R, count_R, written: Any, steps: int
    ) -> LayerCache:
        """The rows with the first `count_R` steps written from position `start_R` on."""
        ...

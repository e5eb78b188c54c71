"""KV on its way from one process to another: one checksummed message, and what an engine can take of such."""

import dataclasses
import hashlib
import json
import math
import struct
from typing import Any

import jax.numpy as jnp
import numpy as np

from venusrl.core.errors import ContractError
from venusrl.models.config import ModelConfig
from venusrl.rollout.engine.cache import LayerCache
from venusrl.rollout.engine.checks import first_wrong
from venusrl.rollout.engine.kv import Prefix
from venusrl.rollout.engine.options import EngineOptions
from venusrl.rollout.worker import LONGEST_ID

MAGIC = b"venus-kv1"
HASH_BYTES = 16
_HEADER_BYTES = 16 * 2**20
_FIELDS = {"trajectory", "namespace", "version", "tokens", "arrays"}


@dataclasses.dataclass(frozen=True)
class KvShape:
    """What the KV of an engine is like. Attributes:
    layers, kv_heads, head_dim: of the model.
    page: tokens of a page.
    pages: that the engine has.
    max_length: tokens of a context at most.
    vocab_size: above every token id.
    dtype: of keys and values, NumPy's name of it.
    """

    layers: int
    kv_heads: int
    head_dim: int
    page: int
    pages: int
    max_length: int
    vocab_size: int
    dtype: str

    @classmethod
    def of(cls, config: ModelConfig, o: EngineOptions) -> "KvShape":
        dtype = jnp.dtype(config.dtype).name
        width, vocab = config.head_dim, config.vocab_size
        return cls(config.layers, config.kv_heads, width, o.page, o.pages, o.max_length, vocab, dtype)

    def blocks(self, tokens: int) -> int:
        """Pages of a message with the KV of so many tokens: a power of two, as `KvStore` copies them."""
        return max(8, 1 << (max(1, -(-tokens // self.page)) - 1).bit_length())

    def arrays(self, tokens: int) -> list[tuple[int, ...]]:
        """Shapes of its arrays: keys and values of each layer, in turn."""
        blocks = self.blocks(tokens)
        keys = (blocks, self.kv_heads, self.head_dim, self.page)
        return [keys, (blocks, self.kv_heads, self.page, self.head_dim)] * self.layers

    @property
    def most_bytes(self) -> int:
        """Of a message."""
        largest = sum(math.prod(shape) for shape in self.arrays(self.max_length))
        return largest * jnp.dtype(self.dtype).itemsize + _HEADER_BYTES

    def check(self, trajectory: Any, namespace: Any, version: Any, tokens: Any) -> None:
        """Refuses what says of itself that it cannot be of this engine.

        Raises:
          ContractError: naming the field.
        """
        for name, text in (("trajectory", trajectory), ("namespace", namespace)):
            if not isinstance(text, str) or len(text) > LONGEST_ID or _lone(text):
                raise ContractError(f"KV: its {name} is no name of at most {LONGEST_ID} characters")
        if type(version) is not int or not 0 <= version < 2**31:
            raise ContractError("KV: its version is no int32")
        self.check_count(tokens)
        wrong = first_wrong(tokens, self.vocab_size)
        if wrong is not None:
            raise ContractError(f"KV: token {wrong[0]} is no id of a vocabulary of {self.vocab_size}")

    def check_count(self, tokens: Any) -> None:
        """Refuses what is no list of tokens, or of too many; each is not looked at.

        Raises:
          ContractError: it says which.
        """
        if not isinstance(tokens, list) or not tokens:
            raise ContractError("KV: its tokens are no list of token ids")
        most = min(self.max_length, self.page * self.pages)
        if len(tokens) > most:
            raise ContractError(f"KV of {len(tokens)} tokens; this engine takes {most} at most")

    def check_arrays(self, tokens: int, found: list[tuple[tuple[int, ...], str]]) -> None:
        """Refuses arrays of other shapes or types than KV of so many tokens has here.

        Raises:
          ContractError: naming the first one.
        """
        wanted = self.arrays(tokens)
        if len(found) != len(wanted):
            raise ContractError(f"KV has {len(found)} arrays; {self.layers} layers take {len(wanted)}")
        for i, ((shape, dtype), right) in enumerate(zip(found, wanted, strict=True)):
            if shape != right or dtype != self.dtype:
                raise ContractError(f"KV: array {i} is {dtype}{list(shape)}; here it is {self.dtype}{list(right)}")

    def check_prefix(self, prefix: Prefix) -> None:
        """Refuses a prefix of another model or other options; its values are not looked at.

        Raises:
          ContractError: naming what differs.
        """
        self.check(prefix.trajectory, prefix.namespace, prefix.version, prefix.tokens)
        arrays = [x for block in prefix.blocks for x in block]
        self.check_arrays(len(prefix.tokens), [(tuple(x.shape), jnp.dtype(x.dtype).name) for x in arrays])


def to_bytes(prefix: Prefix) -> bytes:
    """A message: magic, checksum of the rest, length of the header, header in JSON, keys and values of each layer."""
    keys = [np.asarray(x) for block in prefix.blocks for x in block]
    header = {
        "trajectory": prefix.trajectory,
        "namespace": prefix.namespace,
        "version": prefix.version,
        "tokens": prefix.tokens,
        "arrays": [[list(x.shape), x.dtype.name] for x in keys],
    }
    text = json.dumps(header).encode()
    body = b"".join([struct.pack("<I", len(text)), text, *(x.tobytes() for x in keys)])
    return MAGIC + _hash(body) + body


def from_bytes(data: bytes, shape: KvShape) -> Prefix:
    """KV for an engine of `shape`. Sizes are checked before an array is made, and that every value is finite: the
    checksum says only that the message is as its sender made it. Names, version and token ids are looked at where they
    reach the engine, in `Engine.bring`.

    Raises:
      ContractError: the message is damaged, or none, or not of such an engine.
    """
    start = len(MAGIC) + HASH_BYTES
    body = memoryview(data)[start:]
    if data[: len(MAGIC)] != MAGIC or _hash(body) != data[len(MAGIC) : start]:
        raise ContractError(f"KV of {len(data)} bytes is damaged; send it again, or compute it anew")
    header, at = _header(body)
    tokens = header["tokens"]
    shape.check_count(tokens)
    shape.check_arrays(len(tokens), _declared(header["arrays"]))
    dtype, wanted = jnp.dtype(shape.dtype), shape.arrays(len(tokens))
    size = sum(math.prod(s) for s in wanted) * dtype.itemsize
    if len(body) - at != size:
        raise ContractError(f"KV: {len(body) - at} bytes follow the header; its arrays have {size}")
    used, arrays = -(-len(tokens) // shape.page), []
    for dimensions in wanted:
        array = np.frombuffer(body, dtype, math.prod(dimensions), at).reshape(dimensions)
        at += array.nbytes
        if not np.isfinite(array[:used]).all():
            raise ContractError(f"KV: array {len(arrays)} has values that are not finite; compute it anew")
        arrays.append(jnp.asarray(array))
    blocks = [LayerCache(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)]
    return Prefix(header["trajectory"], header["namespace"], header["version"], tokens, blocks)


def _header(body: memoryview) -> tuple[dict[str, Any], int]:
    """(the header, where the arrays begin)."""
    if len(body) < 4:
        raise ContractError("KV has no header")
    (length,) = struct.unpack_from("<I", body)
    if length > min(len(body) - 4, _HEADER_BYTES):
        raise ContractError(f"KV: its header has {length} bytes, the message {len(body) - 4}")
    try:
        header = json.loads(bytes(body[4 : 4 + length]))
    except (ValueError, RecursionError) as error:
        raise ContractError(f"KV: its header is no JSON ({error})") from None
    if not isinstance(header, dict) or set(header) != _FIELDS:
        raise ContractError(f"KV: its header must have the fields {', '.join(sorted(_FIELDS))}, and no others")
    return header, 4 + length


def _declared(arrays: Any) -> list[tuple[tuple[int, ...], str]]:
    """(shape, type) of each array, as the header has them."""
    if not isinstance(arrays, list):
        raise ContractError("KV: arrays is no list")
    declared = []
    for i, entry in enumerate(arrays):
        pair = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and isinstance(entry[1], str)
        if not pair or not all(type(n) is int and 0 <= n < 2**63 for n in entry[0]) or len(entry[0]) > 8:
            raise ContractError(f"KV: array {i} has no shape and type")
        declared.append((tuple(entry[0]), entry[1][:32].encode("ascii", "backslashreplace").decode()))
    return declared


def _lone(text: str) -> bool:
    """Whether it has half of a surrogate pair, which no encoding takes."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def _hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()

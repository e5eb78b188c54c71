"""KV on its way from one process to another: one checksummed message."""

import hashlib
import json
import struct

import jax.numpy as jnp
import numpy as np

from venusrl.core.errors import ContractError
from venusrl.rollout.engine.cache import LayerCache
from venusrl.rollout.engine.kv import Prefix

MAGIC = b"venus-kv1"
HASH_BYTES = 16


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


def from_bytes(data: bytes) -> Prefix:
    """Raises:
    ContractError: the message is damaged, or none.
    """
    start = len(MAGIC) + HASH_BYTES
    body = data[start:]
    if data[: len(MAGIC)] != MAGIC or _hash(body) != data[len(MAGIC) : start]:
        raise ContractError(f"KV of {len(data)} bytes is damaged; send it again, or compute it anew")
    (length,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + length])
    at, arrays = 4 + length, []
    for shape, dtype in header["arrays"]:
        array = np.frombuffer(body, jnp.dtype(dtype), int(np.prod(shape)), at).reshape(shape)
        at += array.nbytes
        arrays.append(jnp.asarray(array))
    blocks = [LayerCache(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)]
    return Prefix(header["trajectory"], header["namespace"], header["version"], header["tokens"], blocks)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()

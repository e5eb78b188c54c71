"""Frames between the owner and an agent: two lengths, a JSON header, a binary body.

The stream carries `!II` (header bytes, body bytes), then both parts. The same format is read by the agent with a
blocking socket and by the owner with an asyncio StreamReader.
"""

import json
import struct

LENGTHS = struct.Struct("!II")
MAX_HEADER_BYTES = 16 << 20
MAX_BODY_BYTES = 1 << 30


class WireError(ConnectionError):
    """The peer closed in the middle of a frame or sent an impossible length."""


class FrameTooLong(WireError):
    """It was not sent."""


def pack(header: dict, body: bytes = b"") -> bytes:
    """One frame as bytes. Lone surrogates (undecodable file names) survive, as JSON escapes."""
    head = json.dumps(header, separators=(",", ":")).encode("ascii")
    if len(head) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise FrameTooLong(f"frame of {len(head)}+{len(body)} bytes is over the limit")
    return LENGTHS.pack(len(head), len(body)) + head + body


def check_lengths(raw: bytes, most_body: int = MAX_BODY_BYTES) -> tuple[int, int]:
    """(header bytes, body bytes) of a frame's first 8 bytes; WireError if over the limits."""
    head, body = LENGTHS.unpack(raw)
    if head > MAX_HEADER_BYTES or body > most_body:
        raise WireError(f"peer announced a frame of {head}+{body} bytes")
    return head, body


def unpack(data: bytes) -> tuple[dict, bytes]:
    """The frame that `data` is; WireError where it is none."""
    if len(data) < LENGTHS.size:
        raise WireError(f"{len(data)} bytes are no frame")
    head, body = check_lengths(data[: LENGTHS.size])
    if len(data) != LENGTHS.size + head + body:
        raise WireError(f"{len(data)} bytes are not the frame of {head}+{body} that they begin")
    return _header(data[LENGTHS.size : LENGTHS.size + head]), data[LENGTHS.size + head :]


def _header(data: bytes) -> dict:
    """What the header of a frame says; WireError where it is no JSON, or nested beyond any that is sent."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is no JSON: {str(error)[:100]}") from None


async def read_frame(reader, most_body: int = MAX_BODY_BYTES) -> tuple[dict, bytes]:
    """Next frame from an asyncio StreamReader.

    Raises:
      IncompleteReadError: the stream ends.
      WireError: it is no frame, or larger than allowed.
    """
    head, body = check_lengths(await reader.readexactly(LENGTHS.size), most_body)
    return _header(await reader.readexactly(head)), await reader.readexactly(body)

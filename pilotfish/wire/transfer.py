"""Pack a large message into bytes that cross the link in chunks, and unpack it.

A slow link may break before a large message has crossed. In chunks, each acknowledged, the transfer
resumes where it stopped (`docs/wire.md`, Large messages). In: header and frames. Out: a msgpack
array of byte strings, which `wire.messages.Chunk` carries in order.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from pilotfish.base.errors import MalformedError
from pilotfish.wire.messages import MAX_FRAMES, Buffer

PACKING_BYTES: Final = 1 + 5 * (1 + MAX_FRAMES)  # the maximum number of bytes that packing adds

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Annotated[list[memoryview], msgspec.Meta(min_length=1, max_length=1 + MAX_FRAMES)]
)


def pack(header: bytes, frames: Sequence[Buffer]) -> bytes:
    """Pack a message into one sequence of bytes."""
    return _encoder.encode([header, *frames])


def unpack(body: Buffer) -> tuple[Buffer, list[Buffer]]:
    """Return header and frames as views of ``body``; raises `MalformedError`."""
    try:
        header, *frames = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"The chunks do not form a message: {error}.") from error
    return header, list(frames)

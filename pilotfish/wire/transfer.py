"""How a large message becomes bytes that cross in chunks, and a message again.

A link that carries little breaks before a large message has crossed; in chunks, each acknowledged,
it goes on where it stopped (`docs/wire.md`, Large messages). In: header and frames. Out: a msgpack
array of bins, which `wire.messages.Chunk` carries in order.
"""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from pilotfish.base.errors import MalformedError
from pilotfish.wire.messages import MAX_FRAMES, Buffer

PACKING_BYTES: Final = 1 + 5 * (1 + MAX_FRAMES)  # what packing adds at most

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(
    Annotated[list[memoryview], msgspec.Meta(min_length=1, max_length=1 + MAX_FRAMES)]
)


def pack(header: bytes, frames: Sequence[Buffer]) -> bytes:
    """A message as one sequence of bytes."""
    return _encoder.encode([header, *frames])


def unpack(body: Buffer) -> tuple[Buffer, list[Buffer]]:
    """The header and the frames of a message, as views of ``body``; or `MalformedError`."""
    try:
        header, *frames = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedError(f"The chunks do not make a message: {error}.") from error
    return header, list(frames)

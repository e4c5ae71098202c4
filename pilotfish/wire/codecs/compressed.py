"""Decompress zlib data whose size the receiver knows, without allocating more than this size."""

import zlib

from pilotfish.base.errors import MalformedError
from pilotfish.wire.messages import Buffer


def decompress(frame: Buffer, size: int) -> bytes:
    """Decompress a zlib stream; raises `MalformedError` unless it holds exactly ``size`` bytes."""
    stream = zlib.decompressobj()
    try:
        # allow one more byte: otherwise zlib does not reach the stream's end
        data = stream.decompress(frame, size + 1)
    except zlib.error as error:
        raise MalformedError(f"Data cannot be decompressed: {error}.") from error
    if len(data) != size or not stream.eof or stream.unused_data:
        raise MalformedError(f"Compressed data does not have {size} bytes.")
    return data

"""Encode token ids: two bytes each if the vocabulary allows it, else three.

In:  ids below the vocabulary's size V ≤ 2²⁴. Out: a frame of little-endian integers.
Decoding returns the ids.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, TokenOutOfRangeError
from pilotfish.wire.messages import Buffer

_TWO_BYTES: Final = 2**16
_U16, _U32 = np.dtype("<u2"), np.dtype("<u4")
_FEW: Final = 128  # up to this number of ids, Python's `max` is faster than numpy's


def id_bytes(vocab_size: int) -> int:
    """Return the size of an id in bytes: 2 up to V = 65,536, else 3."""
    return 2 if vocab_size <= _TWO_BYTES else 3


def encode_ids(ids: NDArray[np.integer[Any]], vocab_size: int) -> Buffer:
    """Encode ``ids`` [n], all below ``vocab_size`` ≤ 2²⁴."""
    if id_bytes(vocab_size) == 2:
        return ids.astype(_U16).tobytes()
    # [n, 4] to [n, 3]
    return ids.astype(_U32).view(np.uint8).reshape(-1, 4)[:, :3].tobytes()


def count_ids(frame: Buffer, vocab_size: int) -> int:
    """Return the number of ids in a frame; raises `MalformedError` for an impossible length."""
    width = id_bytes(vocab_size)
    if len(frame) % width:
        raise MalformedError(
            f"A frame of ids has {len(frame)} bytes, which is not a multiple of {width}."
        )
    return len(frame) // width


def decode_ids(frame: Buffer, vocab_size: int) -> NDArray[np.uint32]:
    """Decode the ids u32 [n] of a frame.

    Raises `MalformedError` for an impossible length, `TokenOutOfRangeError` for an id ≥ V.
    """
    count = count_ids(frame, vocab_size)
    if id_bytes(vocab_size) == 2:
        ids = np.frombuffer(frame, _U16).astype(np.uint32)
    else:
        # [n, 4], little-endian like the frame
        padded = np.zeros((count, 4), np.uint8)
        padded[:, :3] = np.frombuffer(frame, np.uint8).reshape(-1, 3)
        ids = padded.view(_U32).ravel().astype(np.uint32, copy=False)
    highest = int(ids.max()) if len(ids) > _FEW else max(ids.tolist(), default=0)
    if highest >= vocab_size:
        raise TokenOutOfRangeError(
            f"Token id {highest} is out of range: the vocabulary has {vocab_size} tokens."
        )
    return ids

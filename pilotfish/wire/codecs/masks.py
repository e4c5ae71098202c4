"""Encode masks of allowed tokens (`speculation.masks`): their bits, compressed by zlib.

A mask has ⌈V/8⌉ bytes: 6,144 for 49,152 tokens. Where a grammar allows few tokens, or nearly all,
some tens of bytes remain. The receiver knows the number of rows and V, so it never allocates more
than the masks need.
"""

import zlib

import numpy as np

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.masks import Masks, mask_bytes
from pilotfish.wire.codecs.compressed import decompress
from pilotfish.wire.messages import Buffer

_LEVEL = 1  # the fastest


def encode_masks(masks: Masks) -> bytes:
    """Encode the masks as one frame."""
    return zlib.compress(masks.bits.tobytes(), _LEVEL)


def decode_masks(frame: Buffer, rows: int, vocab: int) -> Masks:
    """Decode the masks of ``rows`` rows over ``vocab`` tokens.

    Raises `MalformedError` for another size, and for a row that allows no token.
    """
    try:
        data = decompress(frame, rows * mask_bytes(vocab))
    except MalformedError as error:
        raise MalformedError(
            f"A frame of masks does not hold {rows} masks of {vocab} tokens: {error}"
        ) from error
    masks = Masks(np.frombuffer(data, np.uint8).reshape(rows, mask_bytes(vocab)), vocab)
    if not masks.unpack().any(axis=1).all():
        raise MalformedError("A mask allows no token.")
    return masks

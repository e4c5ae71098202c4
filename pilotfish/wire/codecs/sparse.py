"""Encode truncated, quantised distributions: the rows q̂ of a window in one frame.

In:  `SparseRows`, n rows of ids and levels, and the vocabulary's size.
Out: a frame. Decoding returns the same rows. `speculation.truncation` quantises them, before the
     drafter samples.

The frame is a head and the sections of `wire.codecs.rows`.
"""

from functools import lru_cache
from itertools import accumulate
from typing import Final

import numpy as np

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire.codecs.rows import MAX_HEIGHT_PARAMETER, decode_rows, encode_rows
from pilotfish.wire.messages import Buffer

MAX_TOKENS: Final = 2**18  # maximum tokens of a frame; bounds the cost of a hostile frame
_NUCLEUS_TOKENS: Final = 115  # number of tokens in the nucleus 0.95 at temperature 1
# Tokens of a row, and bytes per row in windows of 8. These and the nucleus were measured on the
# default drafter at temperature 1 (docs/wire.md).
_SIZES: Final = (1, 8, 16, 32, 64, 128, 320, 1024, 3200)
_ROW_BYTES: Final = (3.0, 17.4, 32.4, 60.1, 110.7, 203.0, 455.0, 1250.0, 3254.0)


def typical_bytes(rows: int, top_k: int) -> float:
    """Return a frame's typical size in bytes; ``top_k`` 0: the rows are cut to a nucleus."""
    return rows * _row_bytes(top_k or _NUCLEUS_TOKENS)


@lru_cache(maxsize=64)
def _row_bytes(tokens: int) -> float:
    """Return a row's typical bytes."""
    most = max(1.0, tokens / _SIZES[-1])  # larger rows take as many bytes per token as the largest
    return most * float(np.interp(tokens, _SIZES, _ROW_BYTES))


def encode_sparse(rows: SparseRows, vocab_size: int) -> bytes:
    """Encode ``rows`` with ids below ``vocab_size`` < 2²⁴; no rows give an empty frame.

    The rows have at most `MAX_TOKENS` ids together.
    """
    if not len(rows):
        return b""
    assert len(rows.ids) <= MAX_TOKENS
    ends = tuple(rows.ends.tolist())
    return encode_rows(
        lambda c, tilt: _write_head(c, tilt, ends),
        rows.ids.astype(np.int64),
        rows.levels.astype(np.int64),
        ends,
        vocab_size,
    )


def decode_sparse(frame: Buffer, count: int, vocab_size: int) -> SparseRows:
    """Decode the ``count`` rows of ``frame``; raises `MalformedError`.

    The frame's length and ``count`` bound the time and the memory.
    """
    if not count:
        if len(frame):
            raise MalformedError("There is a frame of distributions, but no rows are expected.")
        return SparseRows(np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.int64))
    c, tilt, ends, head = _read_head(frame, count, vocab_size)
    total = ends[-1]
    if total > MAX_TOKENS:
        raise MalformedError(f"A frame claims {total} tokens; the limit is {MAX_TOKENS}.")
    laid, ids, levels = decode_rows(frame, head, (ends, vocab_size, tilt), c)
    assert levels is not None
    return SparseRows(ids.astype(np.uint32), levels.astype(np.uint8), laid.ends)


def _write_head(c: int, tilt: int, ends: tuple[int, ...]) -> bytes:
    """Return the head: byte c + 8·width + 32·alike + 64·tilt, then the common size or all sizes."""
    first = ends[0]
    alike = ends == tuple(range(first, first * len(ends) + 1, first))
    sizes = (first,) if alike else tuple(map(int.__sub__, ends, (0, *ends)))
    width = max(sizes).bit_length() + 7 >> 3
    listed = b"".join([size.to_bytes(width, "little") for size in sizes])
    return bytes((c | width << 3 | alike << 5 | tilt << 6,)) + listed


def _read_head(frame: Buffer, count: int, vocab_size: int) -> tuple[int, int, tuple[int, ...], int]:
    """Return the heights' parameter, the tilt, the ends of the rows, the head's length."""
    first = frame[0] if len(frame) else 0
    c, width, alike, tilt = first & 7, first >> 3 & 3, first >> 5 & 1, first >> 6
    if c > MAX_HEIGHT_PARAMETER or not width:
        raise MalformedError("The first byte of a frame of distributions has no defined meaning.")
    end = 1 + width * (1 if alike else count)
    if len(frame) < end:
        raise MalformedError("A frame of distributions ends within its head.")
    sizes = [int.from_bytes(frame[at : at + width], "little") for at in range(1, end, width)]
    if not (min(sizes) and max(sizes) <= vocab_size):
        raise MalformedError(
            f"A row has no token, or more than the vocabulary's {vocab_size} tokens."
        )
    ends = range(sizes[0], sizes[0] * count + 1, sizes[0]) if alike else accumulate(sizes)
    return c, tilt, tuple(ends), end

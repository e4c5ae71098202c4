"""Truncated, quantised distributions: the rows q̂ of a window in one frame.

In:  `SparseRows`, n rows of ids and levels, and the vocabulary's size.
Out: a frame, and the very same rows again: nothing is lost here. What quantisation costs is lost
     in `speculation.truncation`, before the drafter samples.

Behind a head come the sections of `wire.codecs.rows`.
"""

from itertools import accumulate
from typing import Final

import numpy as np

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire.codecs.rows import MAX_HEIGHT_PARAMETER, decode_rows, encode_rows
from pilotfish.wire.messages import MAX_WINDOW, Buffer

MAX_TOKENS: Final = 2**18  # of a frame: bounds what a hostile one can cost
ROW_TOKENS: Final = MAX_TOKENS // MAX_WINDOW  # so many fit whatever the window
_TOKEN_BYTES: Final = 1.7  # of a token of a row of the likeliest 64
_NUCLEUS_TOKENS: Final = 440  # of the nucleus 0.95 at temperature 1


def typical_bytes(rows: int, top_k: int) -> float:
    """About how long the frame of so many rows is; ``top_k`` 0 stands for a nucleus."""
    return _TOKEN_BYTES * rows * (top_k or _NUCLEUS_TOKENS)


def encode_sparse(rows: SparseRows, vocab_size: int) -> bytes:
    """The frame of ``rows``, whose ids are below ``vocab_size`` < 2²⁴; empty for no rows.

    They have at most `MAX_TOKENS` ids in all.
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
    """The ``count`` rows of ``frame``; `MalformedError` for what is not a frame of such rows.

    Time and memory are bounded by the frame's length and ``count``.
    """
    if not count:
        if len(frame):
            raise MalformedError("There is a frame of distributions where no rows are due.")
        return SparseRows(np.empty(0, np.uint32), np.empty(0, np.uint8), np.empty(0, np.int64))
    c, tilt, ends, head = _read_head(frame, count, vocab_size)
    total = ends[-1]
    if total > MAX_TOKENS:
        raise MalformedError(f"A frame claims {total} tokens; the limit is {MAX_TOKENS}.")
    laid, ids, levels = decode_rows(frame, head, (ends, vocab_size, tilt), c)
    assert levels is not None
    return SparseRows(ids.astype(np.uint32), levels.astype(np.uint8), laid.ends)


def _write_head(c: int, tilt: int, ends: tuple[int, ...]) -> bytes:
    """A byte, c + 8·width + 32·alike + 64·tilt, then the one size of all rows, or each one's."""
    first = ends[0]
    alike = ends == tuple(range(first, first * len(ends) + 1, first))
    sizes = (first,) if alike else tuple(map(int.__sub__, ends, (0, *ends)))
    width = max(sizes).bit_length() + 7 >> 3
    listed = b"".join([size.to_bytes(width, "little") for size in sizes])
    return bytes((c | width << 3 | alike << 5 | tilt << 6,)) + listed


def _read_head(frame: Buffer, count: int, vocab_size: int) -> tuple[int, int, tuple[int, ...], int]:
    """The parameter of the heights, the tilt, where the rows end, the head's length."""
    first = frame[0] if len(frame) else 0
    c, width, alike, tilt = first & 7, first >> 3 & 3, first >> 5 & 1, first >> 6
    if c > MAX_HEIGHT_PARAMETER or not width:
        raise MalformedError("The first byte of a frame of distributions means nothing.")
    end = 1 + width * (1 if alike else count)
    if len(frame) < end:
        raise MalformedError("A frame of distributions ends within its head.")
    sizes = [int.from_bytes(frame[at : at + width], "little") for at in range(1, end, width)]
    if not (min(sizes) and max(sizes) <= vocab_size):
        raise MalformedError(f"A row has no token, or more than the {vocab_size} that there are.")
    ends = range(sizes[0], sizes[0] * count + 1, sizes[0]) if alike else accumulate(sizes)
    return c, tilt, tuple(ends), end

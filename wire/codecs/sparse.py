"""Truncated, quantised distributions: the rows q̂ of a window in one frame.

In:  `SparseRows`, n rows of ids and levels, and the vocabulary's size.
Out: a frame, and the very same rows again: nothing is lost here. What quantisation costs is lost
     in `speculation.truncation`, before the drafter samples.

Ids travel as gaps (`wire.codecs.gaps`), levels as heights: counted from the row's lightest token
up, for most tokens are light. Both are Rice coded, heights with one parameter for the frame.
"""

from itertools import accumulate
from typing import Final

import numpy as np

from pilotfish.speculation.truncation import MAX_LEVEL, SparseRows
from pilotfish.wire.codecs.bits import Reader, write
from pilotfish.wire.codecs.gaps import good_tilt, layout, rice_parameter
from pilotfish.wire.errors import MalformedError
from pilotfish.wire.messages import MAX_WINDOW, Buffer

MAX_TOKENS: Final = 2**18  # of a frame: bounds what a hostile one can cost
ROW_TOKENS: Final = MAX_TOKENS // MAX_WINDOW  # so many fit whatever the window
_MAX_HEIGHT_PARAMETER: Final = 5
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
    ids = rows.ids.astype(np.int64)
    tilt = good_tilt(ids, vocab_size)
    laid = layout(ends, vocab_size, tilt)
    gaps = laid.raised(ids)
    tops = np.maximum.reduceat(rows.levels, laid.starts).repeat(laid.sizes)
    heights = (tops - rows.levels).astype(np.int64)
    mean = int(np.add.reduce(heights)) / len(heights)
    c = min(rice_parameter(mean), _MAX_HEIGHT_PARAMETER)
    heights += 1 << c
    # [2N]
    lengths = np.concatenate((gaps >> laid.parameters, heights >> c))
    # [N], remainders of both; `write` drops what is above them
    gaps <<= c
    heights &= (1 << c) - 1
    gaps |= heights
    return write(_write_head(c, tilt, ends), lengths, gaps, laid.slots(c))


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
    # first, so that a small frame cannot ask for large arrays
    reader = Reader(frame, head, 2 * total)
    laid = layout(ends, vocab_size, tilt)
    fixed = reader.fixed(laid.slots(c))
    # heights, all of them 2^c too great, for a length is one more than its quotient
    heights = reader.lengths[total:] << c
    heights += fixed & (1 << c) - 1
    fixed >>= c
    ids = laid.ids(reader.lengths[:total], fixed)
    if max(ids[laid.lasts].tolist()) >= vocab_size:
        raise MalformedError(f"A row has a token beyond the vocabulary of {vocab_size}.")
    tops = np.maximum.reduceat(heights, laid.starts)
    if max(tops.tolist()) > MAX_LEVEL + (1 << c):
        raise MalformedError(f"A row has a token more than {MAX_LEVEL} levels down.")
    levels = tops.repeat(laid.sizes)
    levels -= heights
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
    if c > _MAX_HEIGHT_PARAMETER or not width:
        raise MalformedError("The first byte of a frame of distributions means nothing.")
    end = 1 + width * (1 if alike else count)
    if len(frame) < end:
        raise MalformedError("A frame of distributions ends within its head.")
    sizes = [int.from_bytes(frame[at : at + width], "little") for at in range(1, end, width)]
    if not (min(sizes) and max(sizes) <= vocab_size):
        raise MalformedError(f"A row has no token, or more than the {vocab_size} that there are.")
    ends = range(sizes[0], sizes[0] * count + 1, sizes[0]) if alike else accumulate(sizes)
    return c, tilt, tuple(ends), end

"""Encode rows of ids and levels as sections of bits, for all frames of distributions.

In:  N ids, row after row, sorted within a row; and each token's level, its weight relative to its
     row's likeliest token (`speculation.truncation`).
Out: a head, a unary and a fixed section (`wire.codecs.bits`). Decoding returns ids and levels.

Ids are coded as gaps (`wire.codecs.gaps`), levels as heights above the row's lightest token, since
most tokens are light. Both are Rice coded; all heights of a frame have the same parameter c.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from pilotfish.base.errors import MalformedError
from pilotfish.speculation.truncation import MAX_LEVEL
from pilotfish.wire.codecs.bits import BitReader, Ints, write_frame
from pilotfish.wire.codecs.gaps import Layout, choose_tilt, layout, rice_parameter
from pilotfish.wire.messages import Buffer

MAX_HEIGHT_PARAMETER: Final = 5


def encode_rows(
    head: Callable[[int, int], bytes],
    ids: Ints,
    levels: Ints | None,
    ends: tuple[int, ...],
    vocab_size: int,
) -> bytes:
    """Encode ids [N] below V, in rows that end at ``ends``, after ``head(c, tilt)``.

    ``levels`` [N]: 0 to `MAX_LEVEL`, with a 0 in each row; None: no levels are sent, and c is 0.
    """
    tilt, c = choose_tilt(ids, vocab_size), 0
    laid = layout(ends, vocab_size, tilt)
    # [N]: numbers of the fixed section; `write_frame` drops bits above the width
    fixed = laid.raised_gaps(ids)
    lengths = fixed >> laid.parameters
    if levels is not None:
        heights = np.maximum.reduceat(levels, laid.starts).repeat(laid.sizes)
        heights -= levels
        mean = int(np.add.reduce(heights)) / len(heights)
        c = min(rice_parameter(mean), MAX_HEIGHT_PARAMETER)
        heights += 1 << c
        # [2N]
        lengths = np.concatenate((lengths, heights >> c))
        heights &= (1 << c) - 1
        fixed <<= c
        fixed |= heights
    return write_frame(head(c, tilt), lengths, fixed, laid.slots(c))


def decode_rows(
    frame: Buffer, begin: int, laid_as: tuple[tuple[int, ...], int, int], c: int | None
) -> tuple[Layout, Ints, Ints | None]:
    """Decode the sections that begin at byte ``begin``: their layout, ids [N] and levels [N].

    ``laid_as``: ends of the rows, V, tilt. c: None: there are no levels. Raises `MalformedError`
    for an id of V or more, a level above `MAX_LEVEL`, or a frame with a wrong length.
    """
    ends, vocab_size, _ = laid_as
    total = ends[-1]
    # comes before any allocation, so that a small frame cannot cause large arrays
    reader = BitReader(frame, begin, total if c is None else 2 * total)
    laid = layout(*laid_as)
    fixed = reader.fixed(laid.slots(c or 0))
    levels: Ints | None = None
    if c is not None:
        # The values are heights plus 2^c, since a length is its quotient plus 1.
        heights = reader.lengths[total:] << c
        heights += fixed & (1 << c) - 1
        fixed >>= c
        tops = np.maximum.reduceat(heights, laid.starts)
        if max(tops.tolist()) > MAX_LEVEL + (1 << c):
            raise MalformedError(
                f"A row has a token more than {MAX_LEVEL} levels below the likeliest token."
            )
        levels = tops.repeat(laid.sizes)
        levels -= heights
    ids = laid.ids(reader.lengths[:total], fixed)
    if max(ids[laid.lasts].tolist()) >= vocab_size:
        raise MalformedError(f"A row has a token beyond the vocabulary of {vocab_size} tokens.")
    return laid, ids, levels

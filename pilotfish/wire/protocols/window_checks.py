"""The edge's checks of a window's frames, before and after their ids are decoded.

A frame of ids is refused by its length before it is decoded, so that a peer cannot make the edge
decode more than a window can hold.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import BadDraftError, MalformedError, TooLargeError
from pilotfish.speculation.truncation import SparseRows
from pilotfish.wire.codecs.ids import count_ids, decode_ids
from pilotfish.wire.messages import MAX_WINDOW, Buffer


def check_frame_count(frames: Sequence[Buffer], count: int) -> None:
    """Raise `MalformedError` unless there are ``count`` frames."""
    if len(frames) != count:
        raise MalformedError(f"This message has {len(frames)} array frames; {count} are expected.")


def check_candidates(q: SparseRows, rows: NDArray[np.int64], tokens: NDArray[np.uint32]) -> None:
    """Raise `BadDraftError` if one of the tokens [n] cannot have been drawn from its row [n]."""
    strange = tokens[~q.contains(rows, tokens)]
    if len(strange):
        raise BadDraftError(f"Token {strange[0]} cannot have been drawn: its q̂ is 0.")


def count_window_ids(frame: Buffer, vocab_size: int, most: int = MAX_WINDOW + 1) -> int:
    """Count the ids in a frame; raises `TooLargeError` for many more than ``most``."""
    if len(frame) > 3 * most:  # an id has 3 bytes at most
        raise TooLargeError(f"A frame of ids has {len(frame)} bytes, more than any window needs.")
    return count_ids(frame, vocab_size)


def decode_window_ids(
    frame: Buffer, vocab_size: int, most: int = MAX_WINDOW + 1
) -> NDArray[np.uint32]:
    """Decode the ids of a frame; raises `TooLargeError` for many more than ``most``.

    The number of ids also bounds the cost of decoding the window's other frames.
    """
    count_window_ids(frame, vocab_size, most)
    return decode_ids(frame, vocab_size)

"""Compare token sequences: their common prefix, and the path of a tree that a sequence follows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def common_prefix(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> int:
    """Return the length of the common prefix of a [n] and b [m]."""
    shorter = min(len(a), len(b))
    a, b = a[:shorter], b[:shorter]
    # bytes of one dtype: the usual case, and much faster than numpy's comparison
    if a.dtype == b.dtype and a.tobytes() == b.tobytes():
        return shorter
    differing = (a != b).nonzero()[0]
    return int(differing[0]) if len(differing) else shorter


def path_along(
    tokens: Sequence[int] | NDArray[np.integer[Any]],
    ids: NDArray[np.integer[Any]],
    parents: NDArray[np.int64],
) -> list[int]:
    """Return the longest path from a root of a tree whose tokens are the first of `tokens`.

    ids [m], parents i64 [m]: the tree; −1: no parent. Of siblings with equal tokens, the first is
    on the path.
    """
    path: list[int] = []
    node = -1
    for token in tokens:
        children = ((parents == node) & (ids == token)).nonzero()[0]
        if not len(children):
            break
        node = int(children[0])
        path.append(node)
    return path

"""Track which tokens a node's slots hold, and make items that bring them up to date.

In:  the spans of batches, whether or not the node takes part in them, and the paths kept.
Out: items of a step. For a node that has fallen behind, or lost its slots, an item has more tokens
     than the span: the sequence from the first token that the node lacks.

Law: a node runs its steps in order. So its later state is known when a step is sent.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.targets.target import Span
from pilotfish.wire.nodes import Item


class Holding:
    """The slots of one node, or of several that always hold the same."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.lose()

    def lose(self) -> None:
        """Note that the node has lost all slots."""
        self._agreed = [0] * self._slots  # tokens that the node holds of each slot's sequence
        self._in_tree = [False] * self._slots  # its last step ended in the slot's last tree
        self._kept: list[list[int] | None] = [None] * self._slots

    def forget(self, slot: int) -> None:
        """Treat a slot as empty, since its content at the node is unknown."""
        self._agreed[slot], self._in_tree[slot], self._kept[slot] = 0, False, None

    def first_missing(self, span: Span) -> int:
        """Return the position from which the node needs the span's tokens."""
        return min(self._agreed[span.slot], span.base)

    def item(self, span: Span) -> tuple[Item, NDArray[np.uint32]]:
        """Make the item of a pass with this node, and its tokens u32 [size]."""
        slot, start = span.slot, self.first_missing(span)
        kept, self._kept[slot] = self._kept[slot], None
        self._agreed[slot] = len(span.tokens) - span.nodes
        self._in_tree[slot] = span.nodes > 0
        tokens = span.tokens[start:]
        item = Item(
            slot=slot,
            start=start,
            size=len(tokens),
            rows=span.rows,
            nodes=span.nodes,
            kept_nodes=kept,
            temperature=span.temperature,
        )
        return item, tokens

    def skip(self, span: Span) -> None:
        """Note a pass without this node."""
        self._agreed[span.slot] = min(self._agreed[span.slot], span.base)
        self._in_tree[span.slot] = False

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Append these nodes of the slot's last tree to the sequence."""
        if self._in_tree[slot]:
            self._in_tree[slot] = False
            self._kept[slot] = list(path) or None
            self._agreed[slot] += len(path)


def parents_of(spans: Sequence[Span]) -> bytes:
    """Make the frame of all trees' parents, i16."""
    trees = [span.parents.astype("<i2") for span in spans if span.parents is not None]
    return np.concatenate(trees).tobytes() if trees else b""

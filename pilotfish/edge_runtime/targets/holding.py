"""Track the tokens in a node's slots, and create the items of its steps.

In:  the spans of passes, with or without this node, and the accepted paths of trees.
Out: items of a step. If the node has missed passes or lost its slots, an item has more tokens than
     its span: the sequence from the first token that the node lacks.

Law: a node runs its steps in order, so its state after a step is known when the step is sent.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.targets.target import Span
from pilotfish.wire.nodes import Item


class Holding:
    """Record of the tokens in the slots of one node, or of several nodes with equal slots."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.lose()

    def lose(self) -> None:
        """Record that the node has lost all slots."""
        self._agreed = [0] * self._slots  # number of tokens that each slot has at the node
        self._in_tree = [
            False
        ] * self._slots  # whether the node's last step contained the slot's last tree
        self._paths: list[list[int] | None] = [None] * self._slots

    def forget(self, slot: int) -> None:
        """Record a slot as empty, because its content at the node is unknown."""
        self._agreed[slot], self._in_tree[slot], self._paths[slot] = 0, False, None

    def first_missing(self, span: Span) -> int:
        """Return the position of the first token that the node needs to compute the span."""
        return min(self._agreed[span.slot], span.base)

    def item(self, span: Span) -> tuple[Item, NDArray[np.uint32]]:
        """Create the item of a span for this node, and its tokens u32 [size]; record the pass."""
        slot, start = span.slot, self.first_missing(span)
        path, self._paths[slot] = self._paths[slot], None
        self._agreed[slot] = len(span.tokens) - span.nodes
        self._in_tree[slot] = span.nodes > 0
        tokens = span.tokens[start:]
        item = Item(
            slot=slot,
            start=start,
            size=len(tokens),
            rows=span.rows,
            nodes=span.nodes,
            kept_nodes=path,
            temperature=span.temperature,
        )
        return item, tokens

    def skip(self, span: Span) -> None:
        """Record a pass without this node."""
        self._agreed[span.slot] = min(self._agreed[span.slot], span.base)
        self._in_tree[span.slot] = False

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Record the accepted path (node indices) of the slot's last tree."""
        if self._in_tree[slot]:
            self._in_tree[slot] = False
            self._paths[slot] = list(path) or None
            self._agreed[slot] += len(path)


def parents_of(spans: Sequence[Span]) -> bytes:
    """Encode the parents of all trees as one frame, i16."""
    trees = [span.parents.astype("<i2") for span in spans if span.parents is not None]
    return np.concatenate(trees).tobytes() if trees else b""

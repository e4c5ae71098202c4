"""What a node holds of each slot, as the edge knows it; and so what it has to be told.

In:  the spans of batches, whether or not the node takes part in them, and the paths that were kept.
Out: items of a step. One that brings the node up to date when it has fallen behind, or forgotten
     all, has more tokens than the span: the sequence from where the two still agree.

Law: a node does its steps in order. So what it will hold is known when a step is sent.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.targets.target import Span
from pilotfish.wire.nodes import Item


class Holding:
    """One node, or several that always hold the same."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.lose()

    def lose(self) -> None:
        """The node has forgotten all."""
        self._agreed = [0] * self._slots  # tokens that it holds, and that are still the sequence's
        self._in_tree = [False] * self._slots  # its last step ended in the slot's last tree
        self._kept: list[list[int] | None] = [None] * self._slots

    def forget(self, slot: int) -> None:
        """Nobody knows what the node holds of a slot."""
        self._agreed[slot], self._in_tree[slot], self._kept[slot] = 0, False, None

    def start(self, span: Span) -> int:
        """From where on the node is to be told the span's tokens."""
        return min(self._agreed[span.slot], span.base)

    def item(self, span: Span) -> tuple[Item, NDArray[np.uint32]]:
        """The node takes part: what it is told, and the tokens that go with it, u32 [size]."""
        slot, start = span.slot, self.start(span)
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
            kept=kept,
            temperature=span.temperature,
        )
        return item, tokens

    def pass_over(self, span: Span) -> None:
        """The node does not take part."""
        self._agreed[span.slot] = min(self._agreed[span.slot], span.base)
        self._in_tree[span.slot] = False

    def keep(self, slot: int, path: Sequence[int]) -> None:
        """These nodes of the slot's last tree belong to the sequence now."""
        if self._in_tree[slot]:
            self._in_tree[slot] = False
            self._kept[slot] = list(path) or None
            self._agreed[slot] += len(path)


def parents_of(spans: Sequence[Span]) -> bytes:
    """The frame of all trees' parents, i16."""
    trees = [span.parents.astype("<i2") for span in spans if span.parents is not None]
    return np.concatenate(trees).tobytes() if trees else b""

"""What a node holds of each slot, as the edge knows it; and so what it has to be told.

In:  the asks of flights, whether or not the node takes part in them, and the paths that were kept.
Out: items of a step. One that brings the node up to date when it has fallen behind, or forgotten
     all, has more tokens than the ask: the sequence from where the two still agree.

Law: a node does its steps in order. So what it will hold is known when a step is sent.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.targets.target import Ask
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

    def start(self, ask: Ask) -> int:
        """From where on the node is to be told the ask's tokens."""
        return min(self._agreed[ask.slot], ask.base)

    def item(self, ask: Ask) -> tuple[Item, NDArray[np.uint32]]:
        """The node takes part: what it is told, and the tokens that go with it, u32 [size]."""
        slot, start = ask.slot, self.start(ask)
        kept, self._kept[slot] = self._kept[slot], None
        self._agreed[slot] = len(ask.tokens) - ask.nodes
        self._in_tree[slot] = ask.nodes > 0
        tokens = ask.tokens[start:]
        item = Item(
            slot=slot,
            start=start,
            size=len(tokens),
            rows=ask.rows,
            nodes=ask.nodes,
            kept=kept,
            temperature=ask.temperature,
        )
        return item, tokens

    def pass_over(self, ask: Ask) -> None:
        """The node does not take part."""
        self._agreed[ask.slot] = min(self._agreed[ask.slot], ask.base)
        self._in_tree[ask.slot] = False

    def keep(self, slot: int, path: Sequence[int]) -> None:
        """These nodes of the slot's last tree belong to the sequence now."""
        if self._in_tree[slot]:
            self._in_tree[slot] = False
            self._kept[slot] = list(path) or None
            self._agreed[slot] += len(path)


def parents_of(asks: Sequence[Ask]) -> bytes:
    """The frame of all trees' parents, i16."""
    trees = [ask.parents.astype("<i2") for ask in asks if ask.parents is not None]
    return np.concatenate(trees).tobytes() if trees else b""

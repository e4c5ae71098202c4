"""What the slots of a model hold: the one record of it, found by content.

In:  whole sequences: the tokens of a text, of which the last may be a token tree.
Out: how much of a sequence a slot holds: a prefix of its tokens, and a path of its last tree.

An engine has a record of its own slots. An edge has one for each node, as the mirror of the node's
slots: a node runs its steps in order, so its content after a step is known when the step is sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.sequences import common_prefix, path_along

Ids = NDArray[np.integer[Any]]
Parents = NDArray[np.int64]

MOST_ID = 2**32 - 1  # the largest token id that a record holds
_NO_PARENTS = np.empty(0, np.int64)


class Held(NamedTuple):
    """The part of a sequence that a slot holds.

    chain: number of first tokens in the slot's chain. path: nodes of the slot's last tree that hold
    the tokens after the chain, from the root down. grown: number of nodes of the sequence's own
    tree that the slot holds, as the beginning of this tree.
    """

    chain: int
    path: list[int]
    grown: int = 0

    @property
    def tokens(self) -> int:
        """Number of first tokens of the sequence that need no computation."""
        return self.chain + len(self.path) + self.grown


class _Finding(NamedTuple):
    """The last answer of `SlotContents.find` for a slot, and the arrays that it was about."""

    tokens: Ids
    rows: int
    parents: Parents | None
    held: Held


class SlotContents:
    """The content of `slots` slots with `context` positions: each has a chain, then maybe a tree.

    Sibling nodes with equal tokens count as one: the first.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.slots, self.context = slots, context
        self._ids = np.empty((slots, context), np.uint32)  # chains, then the nodes of trees
        self._chains = [0] * slots
        self._parents = [_NO_PARENTS] * slots  # i64 [nodes] of each slot's tree; −1: its chain
        # the last finding of each slot; None: none since the slot's last change
        self._findings: list[_Finding | None] = [None] * slots

    def clear(self, slot: int) -> None:
        """Record a slot as empty."""
        self._chains[slot], self._parents[slot] = 0, _NO_PARENTS
        self._findings[slot] = None

    def clear_all(self) -> None:
        """Record all slots as empty."""
        for slot in range(len(self._chains)):
            self.clear(slot)

    def chain(self, slot: int) -> NDArray[np.uint32]:
        """Return the tokens of a slot's chain, u32 [n], valid until the slot's next change."""
        return self._ids[slot, : self._chains[slot]]

    def length(self, slot: int) -> int:
        """Return the number of tokens of a slot's chain and nodes of its tree."""
        return self._chains[slot] + len(self._parents[slot])

    def find(self, slot: int, tokens: Ids, rows: int = 1, parents: Parents | None = None) -> Held:
        """Find how much of a sequence [n] a slot holds.

        The last `rows` tokens, and at least one token, count as not held. parents: i64 [m] of the
        sequence's last m tokens, if these are a tree. If the slot's tree is the beginning of this
        tree, its nodes count as held; else no node of the tree does.

        Call it again with the same arrays, unchanged, and the sequence is not compared again. So a
        caller may ask what a slot lacks, and then run the sequence, for one comparison.
        """
        last = self._findings[slot]
        if (
            last is not None
            and last.tokens is tokens
            and last.rows == rows
            and last.parents is parents
        ):
            return last.held
        held = self._compare(slot, tokens, rows, parents)
        self._findings[slot] = _Finding(tokens, rows, parents, held)
        return held

    def _compare(self, slot: int, tokens: Ids, rows: int, parents: Parents | None) -> Held:
        nodes = 0 if parents is None else len(parents)
        tree = self._parents[slot]
        if parents is not None and 0 < len(tree) <= nodes - max(rows, 1):
            end = len(tokens) - nodes + len(tree)
            if (
                self._chains[slot] == len(tokens) - nodes
                and (parents[: len(tree)] == tree).all()
                and common_prefix(self._ids[slot, :end], tokens[:end]) == end
            ):
                return Held(self._chains[slot], [], len(tree))
        wanted = tokens[: max(0, len(tokens) - max(rows, nodes, 1))]
        length = common_prefix(self.chain(slot), wanted)
        if not len(tree) or length < self._chains[slot]:
            return Held(length, [])
        held = self._ids[slot, length : length + len(tree)]
        return Held(length, path_along(wanted[length:], held, tree))

    def keep(self, slot: int, held: Held) -> None:
        """Drop all that is not part of this finding; its path joins the chain."""
        if held.grown:
            return
        self._findings[slot] = None
        end = held.chain + len(held.path)
        if held.path:
            nodes = self._ids[slot, held.chain :]
            self._ids[slot, held.chain : end] = nodes[held.path]
        self._chains[slot], self._parents[slot] = end, _NO_PARENTS

    def append(self, slot: int, tokens: Ids, parents: Parents | None = None) -> None:
        """Append computed tokens [n] to a slot's chain, or to its tree.

        parents: None: the tokens join the chain. i64 [m]: the slot's last m tokens are now a tree
        with these parents; tokens before it join the chain.
        """
        self._findings[slot] = None
        start = self.length(slot)
        self._ids[slot, start : start + len(tokens)] = tokens
        if parents is None:
            self._chains[slot] = start + len(tokens)
        else:
            self._chains[slot] = start + len(tokens) - len(parents)
            self._parents[slot] = parents

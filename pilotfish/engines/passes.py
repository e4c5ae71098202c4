"""The inputs of a forward pass, and their layout when several passes share one run of a graph.

The tokens of all passes are packed in one row of T tokens. In the standard dialects attention works
on [B, S]: B neighbouring slots, S tokens of the longest pass (see export.dialects.padded). In the
contrib dialect a run has one slot (see export.dialects.contrib).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.backends.backend import Binding
from pilotfish.engines.engine_errors import CapacityError

HIDDEN_FROM_VIEW = -3e4  # added to a masked score: its weight becomes 0, even in half precision


@dataclass(frozen=True, eq=False)
class Pass:
    """New tokens for one slot, to be appended at its end.

    A token tree may grow over several passes. Its trunk is the slot's content before the tree's
    first node. Each node sees the trunk, its ancestors and itself; its position is the trunk's
    length + its depth.

    Attributes:
        tokens: i64 [S], S ≥ 1.
        rows: number of last tokens whose logits and hidden states are wanted; None = all, 0 = none
        (prefill).
        parents: i64 [T] for a tree that has T ≥ S nodes with this pass. The last S nodes are the
        new tokens; the first T − S are already in the slot, with the same parents. parents[i] < i
        is the parent of node i, −1 the trunk. None = the tokens are a chain after the slot's
        content.
        states: f32 [S, width], for a stage after the first: the previous stage's output for these
        tokens, which the stage reads instead of their ids. None = the ids are read.
    """

    slot: int
    tokens: NDArray[np.int64]
    rows: int | None = None
    parents: NDArray[np.int64] | None = None
    states: NDArray[np.float32] | None = None

    @property
    def row_count(self) -> int:
        """The number of last tokens whose logits and hidden states are wanted."""
        return len(self.tokens) if self.rows is None else self.rows

    @property
    def tree_length(self) -> int:
        """The number of the tree's nodes that the slot already holds, T − S; 0 for a chain."""
        return 0 if self.parents is None else len(self.parents) - len(self.tokens)

    @property
    def branches(self) -> bool:
        """Whether the tokens form a tree with branches, not a chain."""
        parents = self.parents
        return parents is not None and parents.tolist() != list(range(-1, len(parents) - 1))

    def depths(self) -> NDArray[np.int64]:
        """Return the depth of each token, i64 [S]; 0 for a child of the trunk."""
        if self.parents is None:
            return np.arange(len(self.tokens))
        return _depths(self.parents)[self.tree_length :]

    def pieces(self, width: int) -> Iterator[Pass]:
        """Split the pass into passes of at most `width` tokens, to be appended in turn."""
        size = len(self.tokens)
        for start in range(0, size, width):
            end = min(start + width, size)
            yield Pass(
                self.slot,
                self.tokens[start:end],
                max(0, end - max(start, size - self.row_count)),
                None if self.parents is None else self.parents[: self.tree_length + end],
                None if self.states is None else self.states[start:end],
            )

    def fill_mask(self, mask: NDArray[Any], length: int) -> None:
        """Write into `mask` [S, C] which cells each token sees: trunk, ancestors and itself.

        A visible cell gets 0, any other HIDDEN_FROM_VIEW. `length` is the slot's before the pass.
        """
        if self.parents is None:
            first = length + 1  # every token of the chain sees the chain's first token
            mask[:, :first] = 0
            mask[:, first:] = HIDDEN_FROM_VIEW
            for i in range(1, len(self.tokens)):
                mask[i, first : first + i] = 0
            return
        trunk = length - self.tree_length
        mask[:, :trunk] = 0
        mask[:, trunk:] = HIDDEN_FROM_VIEW
        nodes = mask[:, trunk : trunk + len(self.parents)]
        np.copyto(nodes, 0, where=_ancestor_mask(self.parents)[self.tree_length :])


def _depths(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the depth of each node, i64 [T]; 0 for a child of the trunk."""
    depths: list[int] = []
    for parent in parents.tolist():
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return np.array(depths, np.int64)


def _ancestor_mask(parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool [T, T]: whether node j (column) is node i (row) or an ancestor of node i."""
    mask = np.eye(len(parents), dtype=np.bool_)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            mask[i, : parent + 1] = mask[parent, : parent + 1]
    return mask


def check_all(
    passes: Sequence[Pass], lengths: Sequence[int], context: int, vocabulary: int | None
) -> None:
    """Check that these passes can run, given the lengths of all slots.

    Raises:
        CapacityError: if a slot would exceed `context`.
        ValueError: if a pass is malformed, or a slot has two.
    """
    if len(passes) > 1 and len({item.slot for item in passes}) < len(passes):
        raise ValueError("a slot can have one pass per forward")
    for item in passes:
        check(item, lengths, vocabulary)
        check_room(lengths[item.slot] + len(item.tokens), context)


def check_room(total: int, context: int) -> None:
    """Raise `CapacityError` if a context cannot hold this total of tokens."""
    if total > context:
        raise CapacityError(
            f"{total} tokens do not fit into a context of {context} tokens: shorten the "
            "prompt or request fewer tokens"
        )


def check(item: Pass, lengths: Sequence[int], vocabulary: int | None) -> None:
    """Raise ValueError if a pass is malformed.

    lengths: tokens in each slot. vocabulary: number of valid ids; None = any id is allowed.
    """
    size, slots = len(item.tokens), len(lengths)
    if not 0 <= item.slot < slots:
        raise ValueError(f"slot {item.slot} is not among the {slots} slots of this decoder")
    if item.tokens.ndim != 1 or size == 0:
        raise ValueError("a pass needs a one-dimensional array of at least one token")
    if vocabulary is not None:
        # a Python list, since Python is faster than numpy for a few numbers
        ids = item.tokens.tolist()
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise ValueError(f"token ids must lie in 0…{vocabulary - 1}")
    if not 0 <= item.row_count <= size:
        raise ValueError(f"the pass asks for {item.row_count} output rows, but has {size} tokens")
    if item.parents is not None:
        _check_tree(item.parents, size, lengths[item.slot])


def _check_tree(parents: NDArray[np.int64], size: int, length: int) -> None:
    """Raise ValueError if a tree does not fit a pass of `size` tokens after `length` tokens."""
    if parents.ndim != 1 or not size <= len(parents) <= length + size:
        raise ValueError(
            f"parents needs a one-dimensional array of {size} to {length + size} nodes: first "
            "the nodes of the tree that the slot has already, then the tokens of the pass"
        )
    if any(not -1 <= parent < i for i, parent in enumerate(parents.tolist())):
        raise ValueError("parents[i] must be -1 or an earlier node of the tree")


class Run(NamedTuple):
    """Passes that share a run of the graph, over neighbouring slots.

    Attributes:
        first: the first slot.
        slots: number of slots; a slot without a pass is idle.
        passes: the passes, ordered by slot.
        total: tokens of all passes, T.
        size: tokens of the longest pass, S.
        rows: output rows that the passes want.
    """

    first: int
    slots: int
    passes: Sequence[Pass]
    total: int
    size: int
    rows: int

    @classmethod
    def over(cls, passes: Sequence[Pass]) -> Run:
        """Make the run of these passes, which are ordered by slot."""
        if len(passes) == 1:
            item = passes[0]
            size = len(item.tokens)
            return cls(item.slot, 1, passes, size, size, item.row_count)
        first, sizes = passes[0].slot, [len(item.tokens) for item in passes]
        slots = passes[-1].slot - first + 1
        rows = sum(item.row_count for item in passes)
        return cls(first, slots, passes, sum(sizes), max(sizes), rows)


def _write_range(array: NDArray[np.int64], at: int, count: int, first: int) -> None:
    """Write the numbers first, first + 1, … into `count` elements from array[at] on."""
    if count == 1:  # several times faster than a slice
        array[at] = first
    else:
        array[at : at + count] = np.arange(first, first + count)


def fill_tokens(binding: Binding, run: Run) -> None:
    """Write the ids of all passes' tokens into the input `input_ids`."""
    tokens = binding.input("input_ids", (run.total,))
    end = 0
    for item in run.passes:
        start, end = end, end + len(item.tokens)
        tokens[start:end] = item.tokens


def fill_positions(binding: Binding, run: Run, lengths: Sequence[int]) -> None:
    """Write each token's position, given all slots' lengths."""
    positions = binding.input("position_ids", (run.total,))
    end = 0
    for item in run.passes:
        start, count, length = end, len(item.tokens), lengths[item.slot]
        end += count
        if item.parents is None:
            _write_range(positions, start, count, length)
        else:
            positions[start:end] = item.depths() + (length - item.tree_length)


def fill_rows(binding: Binding, run: Run) -> int:
    """Write the indices of the tokens that need outputs; return the number of output rows."""
    # At least one row is computed, because some runtimes fail on an empty output.
    wanted = max(run.rows, 1)
    rows = binding.input("logit_rows", (wanted,))
    end = row = 0
    for item in run.passes:
        end += len(item.tokens)
        count = item.row_count
        if count:
            _write_range(rows, row, count, end - count)
            row += count
    if not row:
        rows[0] = 0  # overwrite an index of an earlier run, which may be invalid now
    return wanted


def fill_padded(
    binding: Binding, run: Run, lengths: Sequence[int], capacity: int, dtype: np.dtype[Any]
) -> None:
    """Write the inputs of attention for the run's slots, which have these `lengths`.

    The outputs of idle slots and of padding are never read: for them, any mask with finite values
        is valid.
    """
    first, slots, passes, total, size, _ = run
    unpack = binding.input("unpack", (slots, size))
    pack = binding.input("pack", (total,))
    mask = binding.input("attention_mask", (slots, 1, size, capacity), dtype)
    binding.input("write_indices", (slots,))[:] = lengths
    if len(passes) < slots:
        unpack[:] = 0
    start = 0
    for item in passes:
        width, slot = len(item.tokens), item.slot - first
        _write_range(unpack[slot], 0, width, start)
        if width < size:
            unpack[slot, width:] = start
        _write_range(pack, start, width, slot * size)
        item.fill_mask(mask[slot, 0, :width], lengths[slot])
        start += width


def fill_cells(binding: Binding, run: Run, lengths: Sequence[int], capacity: int) -> None:
    """Write the position of each cell's token, for graphs with attention windows.

    The position is the cell's index, except for the nodes of a tree: several nodes have the same
    position.
    """
    cells = binding.input("cell_positions", (run.slots, capacity))
    cells[:] = np.arange(capacity)
    for item in run.passes:
        if item.parents is not None:
            slot = item.slot - run.first
            trunk = lengths[slot] - item.tree_length
            cells[slot, trunk : trunk + len(item.parents)] = trunk + _depths(item.parents)


def fill_single(
    binding: Binding, item: Pass, length: int, capacity: int, dtype: np.dtype[Any]
) -> None:
    """Write the inputs of attention for one slot in the contrib dialect.

    The input `total_sequence_length` is the capacity, not the length. The bias must have this
    width, and an input whose width changes would have to be bound again for each pass. The kernel
    computes only up to `seqlens_k`.
    """
    size = len(item.tokens)
    binding.input("seqlens_k", (1,), np.int32)[0] = length + size - 1
    binding.input("total_sequence_length", (1,), np.int32)[0] = capacity
    bias = binding.input("attention_bias", (1, 1, size, capacity), dtype)
    item.fill_mask(bias[0, 0], length)

"""What a forward pass is given, and how several become the inputs of one run of the graph.

Tokens of all passes stand packed in one row of T. Standard dialects attend over [B, S]: B
neighbouring slots, S the longest pass among them (see export.dialects.padded). The contrib
dialect takes one slot (see export.dialects.contrib).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.binding import Binding

HIDDEN_FROM_VIEW = -3e4  # added to a score, leaves weight 0, in half precision too


@dataclass(frozen=True, eq=False)
class Pass:
    """New tokens of one slot, appended at its length.

    Attributes:
        tokens: i64 [S], S ≥ 1.
        rows: logits and hidden states are wanted for the last `rows` tokens; None = all of them,
            0 = none (prefill).
        parents: i64 [S] for a token tree: parents[i] < i is the token before token i, −1 the
            committed prefix. None = a chain.
    """

    slot: int
    tokens: NDArray[np.int64]
    rows: int | None = None
    parents: NDArray[np.int64] | None = None

    @property
    def wanted(self) -> int:
        """Rows wanted, as a number."""
        return len(self.tokens) if self.rows is None else self.rows

    def depths(self) -> NDArray[np.int64]:
        """Distance of each token of a tree from the committed prefix, 0 for the first; [S]."""
        depths = np.zeros(len(self.tokens), np.int64)
        for i, parent in enumerate(() if self.parents is None else self.parents):
            depths[i] = depths[parent] + 1 if parent >= 0 else 0
        return depths

    def show(self, mask: NDArray[Any], length: int) -> None:
        """Write into `mask` [S, C] what each token sees: the prefix, its ancestors and itself.

        0 stands for seen, HIDDEN_FROM_VIEW for the rest.
        """
        first = length + 1  # every token of a chain sees the first one
        mask[:, :first] = 0
        mask[:, first:] = HIDDEN_FROM_VIEW
        if self.parents is None:
            for i in range(1, len(self.tokens)):
                mask[i, first : first + i] = 0
            return
        mask[:, length] = HIDDEN_FROM_VIEW
        own = mask[:, length : length + len(self.tokens)]
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                own[i] = own[parent]
            own[i, i] = 0


def check(item: Pass, slots: int, vocabulary: int) -> None:
    """Raise ValueError for a pass that no model could run."""
    size = len(item.tokens)
    if not 0 <= item.slot < slots:
        raise ValueError(f"slot {item.slot} is not among the {slots} of this decoder")
    if item.tokens.ndim != 1 or size == 0:
        raise ValueError("a pass needs a row of at least one token")
    ids = item.tokens.tolist()  # a few numbers: faster than an array's methods
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise ValueError(f"token ids must lie in 0…{vocabulary - 1}")
    if not 0 <= item.wanted <= size:
        raise ValueError(f"{item.wanted} rows are wanted of {size} tokens")
    if item.parents is not None and (
        item.parents.shape != (size,)
        or (item.parents >= np.arange(size)).any()
        or item.parents.min() < -1
    ):
        raise ValueError("parents[i] must be -1 or an earlier token of the pass")


def fill_packed(binding: Binding, passes: Sequence[Pass], lengths: Sequence[int]) -> int:
    """The inputs of every dialect; `lengths` are those of all slots. Returns the rows computed."""
    total = sum(len(item.tokens) for item in passes)
    # A graph that computes nothing is not worth the risk: where no row is wanted, take one.
    wanted = max(sum(item.wanted for item in passes), 1)
    tokens = binding.input("input_ids", (total,))
    positions = binding.input("position_ids", (total,))
    rows = binding.input("logit_rows", (wanted,))
    end = row = 0
    for item in passes:
        start, end, length = end, end + len(item.tokens), lengths[item.slot]
        tokens[start:end] = item.tokens
        if item.parents is None:
            positions[start:end] = range(length, length + end - start)
        else:
            positions[start:end] = item.depths() + length
        rows[row : row + item.wanted] = range(end - item.wanted, end)
        row += item.wanted
    rows[row:] = 0  # the array is that of an earlier pass, which may have been longer
    return wanted


def fill_padded(
    binding: Binding,
    passes: Sequence[Pass],
    first: int,
    lengths: Sequence[int],
    capacity: int,
    dtype: np.dtype[Any],
) -> None:
    """The attention's inputs over slots first, first + 1, …, whose `lengths` are given.

    What an idle slot or padding attends to does not matter, for nobody reads the answer; that
    it is finite does, and masks always are.
    """
    count = len(lengths)
    size = max(len(item.tokens) for item in passes)
    total = sum(len(item.tokens) for item in passes)
    unpack = binding.input("unpack", (count, size))
    pack = binding.input("pack", (total,))
    mask = binding.input("attention_mask", (count, 1, size, capacity), dtype)
    binding.input("write_indices", (count,))[:] = lengths
    end = 0
    for item in passes:
        own, slot = len(item.tokens), item.slot - first
        start, end = end, end + own
        unpack[slot, :own] = range(start, end)
        unpack[slot, own:] = start
        pack[start:end] = range(slot * size, slot * size + own)
        item.show(mask[slot, 0, :own], lengths[slot])
    busy = {item.slot - first for item in passes}
    for slot in range(count):
        if slot not in busy:
            unpack[slot] = 0


def fill_single(
    binding: Binding, item: Pass, length: int, capacity: int, dtype: np.dtype[Any]
) -> None:
    """The attention's inputs for one slot under the contrib dialect.

    The total is given as the capacity, for the bias must be as wide as the total and would
    have to be bound for each pass; what is computed follows seqlens_k.
    """
    size = len(item.tokens)
    binding.input("seqlens_k", (1,), np.int32)[0] = length + size - 1
    binding.input("total_sequence_length", (1,), np.int32)[0] = capacity
    bias = binding.input("attention_bias", (1, 1, size, capacity), dtype)
    item.show(bias[0, 0], length)

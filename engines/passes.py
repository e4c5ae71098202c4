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

Inputs = dict[str, NDArray[Any]]
HIDDEN_FROM_VIEW = {"float32": -1e9, "float16": -3e4}  # added to a score, leaves weight 0


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
        """Distance of each token from the committed prefix, 0 for the first; [S]."""
        if self.parents is None:
            return np.arange(len(self.tokens))
        depths = np.zeros(len(self.tokens), np.int64)
        for i, parent in enumerate(self.parents):
            depths[i] = depths[parent] + 1 if parent >= 0 else 0
        return depths

    def sees(self) -> NDArray[np.bool_]:
        """[S, S]: token i sees token j of this pass if j is i or an ancestor of i."""
        if self.parents is None:
            return np.tri(len(self.tokens), dtype=np.bool_)
        seen = np.eye(len(self.tokens), dtype=np.bool_)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                seen[i] |= seen[parent]
        return seen


def check(item: Pass, slots: int, vocabulary: int) -> None:
    """Raise ValueError for a pass that no model could run."""
    size = len(item.tokens)
    if not 0 <= item.slot < slots:
        raise ValueError(f"slot {item.slot} is not among the {slots} of this decoder")
    if item.tokens.ndim != 1 or size == 0:
        raise ValueError("a pass needs a row of at least one token")
    if item.tokens.min() < 0 or item.tokens.max() >= vocabulary:
        raise ValueError(f"token ids must lie in 0…{vocabulary - 1}")
    if not 0 <= item.wanted <= size:
        raise ValueError(f"{item.wanted} rows are wanted of {size} tokens")
    if item.parents is not None and (
        item.parents.shape != (size,)
        or (item.parents >= np.arange(size)).any()
        or item.parents.min() < -1
    ):
        raise ValueError("parents[i] must be -1 or an earlier token of the pass")


def packed(passes: Sequence[Pass], lengths: Sequence[int]) -> Inputs:
    """The inputs of every dialect; `lengths` are those of all slots."""
    ends = np.cumsum([len(item.tokens) for item in passes])
    rows = [np.arange(end - item.wanted, end) for item, end in zip(passes, ends, strict=True)]
    wanted = np.concatenate(rows)
    return {
        "input_ids": np.concatenate([item.tokens for item in passes]),
        "position_ids": np.concatenate([lengths[item.slot] + item.depths() for item in passes]),
        # A graph that computes nothing is not worth the risk: where no row is wanted, take one.
        "logit_rows": wanted if len(wanted) else np.zeros(1, np.int64),
    }


def padded(
    passes: Sequence[Pass],
    first: int,
    count: int,
    lengths: Sequence[int],
    capacity: int,
    dtype: np.dtype[Any],
) -> Inputs:
    """The attention's inputs over slots first … first + count − 1; idle ones see nothing."""
    size = max(len(item.tokens) for item in passes)
    unpack = np.zeros((count, size), np.int64)
    mask = np.full((count, 1, size, capacity), HIDDEN_FROM_VIEW[dtype.name], dtype)
    pack, start = [], 0
    for item in passes:
        own, row, length = len(item.tokens), item.slot - first, lengths[item.slot]
        unpack[row, :own] = np.arange(start, start + own)
        pack.append(np.arange(own) + row * size)
        mask[row, 0, :own, :length] = 0
        mask[row, 0, :own, length : length + own][item.sees()] = 0
        start += own
    return {
        "unpack": unpack,
        "pack": np.concatenate(pack),
        "write_indices": np.array(lengths[first : first + count], np.int64),
        "attention_mask": mask,
    }


def single(item: Pass, length: int, dtype: np.dtype[Any]) -> Inputs:
    """The attention's inputs for one slot under the contrib dialect."""
    own = len(item.tokens)
    total = length + own
    bias = np.zeros((1, 1, own, total), dtype)
    bias[0, 0, :, length:][~item.sees()] = HIDDEN_FROM_VIEW[dtype.name]
    return {
        "seqlens_k": np.array([total - 1], np.int32),
        "total_sequence_length": np.array([total], np.int32),
        "attention_bias": bias,
    }

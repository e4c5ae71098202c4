"""Lay weights out as checkpoints of a class do: renamed, fused, those of all experts in one tensor.

The inverse of `export.sources.tensor_names`, for tiny models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pilotfish.export.architectures import Names
    from pilotfish.export.model_config import ModelConfig

Floats = NDArray[np.float32]


def as_stored(
    names: Names, config: ModelConfig, weights: Mapping[str, Floats]
) -> dict[str, Floats]:
    """Return the tensors of a checkpoint that stand for these weights.

    `weights` are by our names, in the order of `export.weights`: so several in one tensor stand.
    """
    from pilotfish.export.sources.tensor_names import stored_name

    together: dict[str, list[Floats]] = {}
    for name, array in weights.items():
        together.setdefault(stored_name(names, name), []).append(array)
    return {
        name: np.ascontiguousarray(_joined(names, config, name, own))
        for name, own in together.items()
    }


def _joined(names: Names, config: ModelConfig, name: str, arrays: Sequence[Floats]) -> Floats:
    """Put weights that share a tensor into it."""
    if config.experts is not None and name.endswith(tuple(names.stacked)):
        size = len(arrays) // config.experts.count
        experts = [arrays[start : start + size] for start in range(0, len(arrays), size)]
        return np.stack([_of_expert(names, parts) for parts in experts])
    if len(arrays) == 1:
        return arrays[0]
    if names.by_head:  # a head's queries and its gate
        return _by_turns([array.reshape(config.heads, -1, array.shape[1]) for array in arrays])
    return np.concatenate(arrays)


def _of_expert(names: Names, parts: Sequence[Floats]) -> Floats:
    array = _by_turns([part[:, None] for part in parts])
    if not names.alternating:
        array = np.concatenate(parts)
    return array.T if names.columns and array.ndim == 2 else array


def _by_turns(arrays: Sequence[Floats]) -> Floats:
    """Put groups of rows [groups, rows, …] behind each other, one of each array in turn."""
    return np.concatenate(arrays, axis=1).reshape(-1, *arrays[0].shape[2:])

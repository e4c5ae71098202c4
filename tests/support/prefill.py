"""Append a long text to a slot of a model in chunks, as tests and benchmarks of models need it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.language_model import LanguageModel, Output
from pilotfish.engines.passes import Pass


def prefill(
    model: LanguageModel,
    slot: int,
    tokens: NDArray[np.int64] | Sequence[int],
    *,
    rows: int = 1,
    chunk: int = 128,
) -> Output:
    """Append a text in chunks of `chunk` tokens; return the output of its last `rows` tokens.

    Raises:
        CapacityError: if the slot would exceed its context; nothing is appended.
        ValueError: see `LanguageModel.forward`.
    """
    row = np.asarray(tokens, np.int64)
    model.check([Pass(slot, row, rows)])
    last = max((len(row) - 1) // chunk * chunk, 0)
    last = min(last, len(row) - rows)
    for start in range(0, last, chunk):
        model.forward([Pass(slot, row[start : min(start + chunk, last)], 0)])
    return model.forward([Pass(slot, row[last:], rows)])[0]

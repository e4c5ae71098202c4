"""Refuse weights with which no runtime can compute: NaN, infinity, and too large numbers.

In: a source and the precision of an export. Out: the source's weights, each checked when it is
read. An artifact with such weights would open and run, and predict nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from pilotfish.engines.manifest import Precision
from pilotfish.export.blocks import Quantized
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources import Progress, WeightSource

FP16_END = 65520.0  # smallest number that becomes infinite in float16
# Smallest number that is refused in other precisions. Below it, code · scale and the squares of
# errors, which rounding compares, are finite in float32, whose end is 2^128.
FLOAT32_END = 2.0**60
DECAY_END = 88.0  # exp(88.8) is infinite in float32
FLOATS: dict[int, Any] = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16}
AT_ONCE = 1 << 18  # numbers that are checked at a time, to fit the CPU's cache


class CheckedWeights:
    """A reader of a source's weights that refuses unusable numbers, and reports its progress."""

    def __init__(
        self, source: WeightSource, precision: Precision, progress: Progress | None = None
    ) -> None:
        self._source, self._progress = source, progress
        self._halves = precision == "fp16"
        self._seen: set[str] = set()
        self._total = len(source.names())

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight, dequantised."""
        self._count(name)
        with np.errstate(all="ignore"):
            weight = self._source.tensor(name)
        self._check(name, weight)
        return weight

    def quantized(self, name: str) -> Quantized | None:
        """Read one weight in its stored blocks."""
        self._count(name)
        with np.errstate(all="ignore"):
            blocks = self._source.quantized(name)
        for values in () if blocks is None else (blocks.scales, blocks.offsets):
            if values is not None:
                self._check(name, values)
        return blocks

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read one weight in parts."""
        self._count(name)
        for part in self._source.rows(name):
            self._check(name, part)
            yield part

    def _count(self, name: str) -> None:
        self._seen.add(name)
        if self._progress:
            self._progress("weights", len(self._seen), self._total)

    def _check(self, name: str, values: NDArray[np.float32]) -> None:
        end = FP16_END if self._halves else FLOAT32_END
        end = DECAY_END if name.endswith("A_log") else end
        if not are_below(values, end):
            raise self._error(name, values, end)

    def _error(self, name: str, values: NDArray[np.float32], end: float) -> ExportError:
        """Find the published tensor with the first unusable number."""
        with np.errstate(all="ignore"):
            tensors = [*self._source.stored(name), (name, values)]
            label, stored = next(each for each in tensors if not are_below(each[1], end))
            at = np.unravel_index(np.argmin(np.abs(stored) < end), stored.shape)
        place, value = [int(index) for index in at], float(stored[at])
        reason = "which is no finite number: the checkpoint is damaged"
        if np.isfinite(value):
            reason = "which is too large to compute with: the checkpoint is damaged"
            if self._halves and abs(value) < FLOAT32_END and end == FP16_END:
                reason = "which is too large for float16: choose --precision fp32"
        return ExportError(f"{self._source.config.name}: {label}{place} is {value:g}, {reason}")


def check_tensors(tensors: Iterable[TensorProto], folder: Path) -> None:
    """Check the float weights of a graph in `folder`.

    Raises:
        ExportError: if one is NaN or infinite, or not in its file.
    """
    for tensor in tensors:
        try:
            finite = tensor.data_type not in FLOATS or are_below(_values(tensor, folder), np.inf)
        except (OSError, ValueError) as error:
            raise ExportError(f"{folder} lacks the weight {tensor.name}: {error}") from None
        if not finite:
            raise ExportError(
                f"{folder}: the weight {tensor.name} of the graph has a number that is NaN or "
                "infinite: export the original weights again"
            )


def _values(tensor: TensorProto, folder: Path) -> NDArray[Any]:
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    place = {entry.key: entry.value for entry in tensor.external_data}
    kind, count = FLOATS[tensor.data_type], math.prod(tensor.dims)
    file, start = folder / place.get("location", ""), int(place.get("offset", 0))
    return np.memmap(file, kind, "r", start, (count,)) if count else np.empty(0, kind)


def are_below(values: NDArray[Any], end: float) -> bool:
    """Whether all numbers are between −end and end; NaN is not."""
    if not values.ndim or not values.size:
        return bool((abs(values) < end).all())
    step = max(1, AT_ONCE * len(values) // values.size)
    parts = (values[start : start + step] for start in range(0, len(values), step))
    return all(-end < part.min() and part.max() < end for part in parts)

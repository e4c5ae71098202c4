"""Scales of blocks in fewer bytes, without a change of their values.

In: scales f32 [N, B]. Out: a value of the graph that has these scales, from constants:

    scales                              constants                                 bytes per scale
    half-precision numbers              units f16 [N, B]                          2
    of super-blocks (GGUF's K-quants)   units f16 [N, B / run], factors i8        1 + 2 / run
    other                               f32 [N, B]                                4

The scale of a block in a super-block is a unit times a small integer; float32 holds this product
exactly. A runtime computes operators on constants once, when it opens the model. So kernels get
scales in float32 as ever, and a pass takes no longer.

The columns that `folded_offsets` appends have scales of another form, each the same in several
columns. These stay in float32, but the graph has only one of equal neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.graph import ELEMENT, GraphWriter

FEWEST = 1 << 14  # scales; for fewer, a smaller form is not worth its operators
RUNS = (16, 8)  # blocks in a super-block
# Possible factors of the largest scale in a super-block: first those that quantisers choose.
FACTORS = (63, -128, -32, 15, *range(127, 0, -1))
ROWS_AT_ONCE = 4096
SAMPLE = 64  # number of rows that are tried first

Floats = NDArray[np.float32]


class Products(NamedTuple):
    """The first columns of scales: units f16 [N, S], times factors i8 [N, S, run] if there are."""

    units: NDArray[np.float16]
    factors: NDArray[np.int8] | None = None

    @property
    def columns(self) -> int:
        """Number of columns of scales."""
        run = 1 if self.factors is None else int(self.factors.shape[2])
        return run * int(self.units.shape[1])


def write_scales(graph: GraphWriter, name: str, scales: Floats) -> str:
    """Write scales f32 [N, B] if they are not written yet; return the name of their value."""
    if graph.has(name) or graph.has(f"{name}.units"):
        return name
    products = find_products(scales) if scales.size >= FEWEST else None
    if products is None:
        return graph.weight(name, scales)
    parts = [_write_products(graph, name, products)]
    if products.columns < scales.shape[1]:
        rest = scales[:, products.columns :]
        new = np.append(True, (rest[:, 1:] != rest[:, :-1]).any(axis=0))
        columns = graph.constant(np.cumsum(new) - 1, "int64")
        parts.append(
            graph.op("Gather", graph.weight(f"{name}.rest", rest[:, new]), columns, axis=1)
        )
    return graph.op("Concat", *parts, name=name, axis=1)


def _write_products(graph: GraphWriter, name: str, products: Products) -> str:
    """Write products as f32 [N, columns]."""
    single = ELEMENT["float32"]
    if products.factors is None:
        return graph.op("Cast", graph.weight(f"{name}.units", products.units), to=single)
    units = graph.op("Cast", graph.weight(f"{name}.units", products.units[..., None]), to=single)
    factors = graph.op("Cast", graph.weight(f"{name}.factors", products.factors), to=single)
    shape = graph.constant([len(products.units), products.columns], "int64")
    return graph.op("Reshape", graph.op("Mul", units, factors), shape)


def find_products(scales: Floats) -> Products | None:
    """Write the first columns of scales f32 [N, B] as products.

    None if no form holds more than half of the columns.
    """
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    best = Products(halves[:, : _leading(halves == scales)])
    for run in RUNS:
        if best.columns < scales.shape[1]:
            products = _factor(scales, run)
            best = products if products.columns > best.columns else best
    return best if 2 * best.columns > scales.shape[1] else None


def _factor(scales: Floats, run: int) -> Products:
    """Write the first super-blocks as products: as many as have this form in all rows."""
    rows, columns = scales.shape
    supers = columns // run
    units, factors = np.empty((rows, supers), np.float16), np.empty((rows, supers, run), np.int8)
    sample = slice(None, None, max(rows // SAMPLE, 1))
    starts = range(0, rows, ROWS_AT_ONCE)
    for part in (sample, *(slice(start, start + ROWS_AT_ONCE) for start in starts)):
        if not supers:
            break
        groups = scales[part, : supers * run].reshape(-1, run)
        some_units, some_factors, exact = _factor_groups(groups)
        units[part, :supers] = some_units.reshape(-1, supers)
        factors[part, :supers] = some_factors.reshape(-1, supers, run)
        supers = _leading(exact.reshape(-1, supers))
    return Products(units[:, :supers], factors[:, :supers])


def _factor_groups(
    groups: Floats,
) -> tuple[NDArray[np.float16], NDArray[np.int8], NDArray[np.bool_]]:
    """Write each group of scales, f32 [n, run], as a unit times integers.

    Return units [n], integers [n, run], and whether the products equal the group, [n].
    """
    units, factors = np.zeros(len(groups), np.float16), np.zeros(groups.shape, np.int8)
    largest = groups[np.arange(len(groups)), np.abs(groups).argmax(axis=1)]
    open_groups = np.flatnonzero(largest)
    for factor in FACTORS:
        if not open_groups.size:
            break
        wanted = groups[open_groups]
        with np.errstate(all="ignore"):  # a unit of another factor may be 0 or infinite
            unit = (largest[open_groups] / np.float32(factor)).astype(np.float16)
            steps = np.rint(wanted / unit.astype(np.float32)[:, None])
            equal = steps * unit.astype(np.float32)[:, None] == wanted
        exact = (equal & (steps >= -128) & (steps <= 127)).all(axis=1)
        solved = open_groups[exact]
        units[solved], factors[solved] = unit[exact], steps[exact].astype(np.int8)
        open_groups = open_groups[~exact]
    exact = np.ones(len(groups), np.bool_)
    exact[open_groups] = False
    return units, factors, exact


def _leading(exact: NDArray[np.bool_]) -> int:
    """Return how many of the first columns of `exact`, bool [n, columns], are true in all rows."""
    return int(np.append(~exact.all(axis=0), True).argmax())

"""Products with quantised weights, and look-ups of their rows, for all dialects.

In: `Quantized` weights, from a checkpoint or from `export.quantize`. Kernels support neither
offsets nor a column order. So the product of x's block sums with the offsets, and the reordering of
x's columns, are separate operators. A dialect whose kernel has zero points folds the offsets into
these and into further columns (`folded_offsets`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.blocks import Quantized, join
from pilotfish.export.dialects.folded_offsets import append_sums, fold_offsets
from pilotfish.export.dialects.operators import Operators
from pilotfish.export.graph import GraphWriter, pack_nibbles

Weight = Quantized | NDArray[np.float32]


def projection(net: Operators, x: str, names: Sequence[str], weights: Sequence[Weight]) -> str:
    """Multiply x [T, K] by the transposed weights [N, K]; return the name of the result [T, ΣN].

    Successive weights with the same layout are joined and multiplied in one operation.
    """
    products: list[str] = []
    named = zip(names, weights, strict=True)
    for _, group in groupby(named, lambda each: _layout(each[1])):
        some_names, some_weights = zip(*group, strict=True)
        label = "+".join(some_names) + ".weight"
        products.append(_joined_product(net, x, label, some_weights))
    return products[0] if len(products) == 1 else net.concat(*products)


def _layout(weight: Weight) -> tuple[int, int, bytes] | None:
    return weight.layout if isinstance(weight, Quantized) else None


def _joined_product(net: Operators, x: str, name: str, weights: Sequence[Weight]) -> str:
    blocks = [weight for weight in weights if isinstance(weight, Quantized)]
    if blocks:
        return product(net, x, name, join(blocks))
    floats = np.concatenate([each for each in weights if not isinstance(each, Quantized)])
    return net.graph.op("Gemm", x, net.weight(name, array=floats), transB=1)


def product(net: Operators, x: str, name: str, weight: Quantized) -> str:
    """Multiply x [T, K] by a transposed weight [N, K]."""
    weight = net.kernel_blocks(weight)
    if weight.order is not None:
        x = net.graph.op("Gather", x, net.graph.constant(weight.order, "int64"), axis=-1)
    if weight.offsets is not None and net.folds_offsets and not net.graph.has(f"{name}.codes"):
        # A head whose codes an embedding has written already shares these, which have no sums.
        return net.quantized_linear(append_sums(net, x, weight), name, fold_offsets(weight))
    result = net.quantized_linear(x, name, weight)
    return result if weight.offsets is None else _add_offsets(net, result, x, name, weight)


def _add_offsets(net: Operators, result: str, x: str, name: str, weight: Quantized) -> str:
    """Add the product of the offsets [N, K / block] with x's block sums.

    This product takes 1/32 of the time of a float32 product. With float zero points instead of
    offsets, the kernel would take 50 times as long.
    """
    graph = net.graph
    blocks = net.reshape(x, [-1, weight.scales.shape[1], weight.block])
    sums = graph.op("ReduceSum", blocks, graph.constant([2], "int64"), keepdims=0)
    return graph.op("Gemm", sums, _offsets(graph, name, weight), result, transB=1)


def look_up(net: Operators, name: str, weight: Quantized, tokens: str) -> str:
    """Look up rows of a weight [V, K] at `tokens` [T]; [T, K]."""
    # A tied head shares the offsets, so both must have the same blocks.
    op, weight = net.graph.op, net.kernel_blocks(weight).without_zeros()
    last = net.graph.constant([-1], "int64")
    rows = net.code_rows(name, weight, tokens)
    scales = op("Gather", net.block_scales(f"{name}.scales", weight.scales), tokens)
    rows = op("Mul", rows, op("Unsqueeze", scales, last))
    if weight.offsets is not None:
        offsets = op("Gather", _offsets(net.graph, name, weight), tokens)
        rows = op("Add", rows, op("Unsqueeze", offsets, last))
    return net.reshape(rows, [-1, weight.codes.shape[1]])


def code_rows(net: Operators, name: str, weight: Quantized, tokens: str) -> str:
    """Look up rows of codes minus `zero_point`, from the codes that `write_codes` writes.

    Return floats [T, K / block, block].
    """
    graph, op = net.graph, net.graph.op
    rows = op("Gather", write_codes(graph, name, weight), tokens)  # [T, blocks, bytes]
    if weight.bits == 4:
        wide, base = net.cast(rows, "int32"), graph.constant(16, "int32")
        pair = (op(kind, wide, base) for kind in ("Mod", "Div"))
        nibbles = net.concat(*(net.unsqueeze(each, -1) for each in pair))
        rows = net.reshape(nibbles, [-1, weight.scales.shape[1], weight.block])
    middle = graph.constant(weight.zero_point, net.float)
    return op("Sub", net.cast(rows, net.float), middle)


def write_codes(graph: GraphWriter, name: str, weight: Quantized) -> str:
    """Write the codes as `pack_codes` returns them, if they are not written yet."""
    if not graph.has(f"{name}.codes"):
        graph.weight(f"{name}.codes", pack_codes(weight))
    return f"{name}.codes"


def pack_codes(weight: Quantized) -> NDArray[np.uint8]:
    """Return the codes in the layout of MatMulNBits and QMoE, u8 [N, blocks, bytes per block].

    The last block is filled up if the block does not divide K.
    """
    rows, width = weight.codes.shape
    padding = ((0, 0), (0, -width % weight.block))
    codes = np.pad(weight.codes, padding, constant_values=weight.zero_point)
    codes = codes.reshape(rows, -1, weight.block)
    if weight.bits == 4:
        codes = pack_nibbles(codes).reshape(*codes.shape[:2], weight.block // 2)
    return codes


def _offsets(graph: GraphWriter, name: str, weight: Quantized) -> str:
    """Write offsets f32 [N, K / block] if they are not written yet."""
    if not graph.has(f"{name}.offsets"):
        assert weight.offsets is not None
        graph.weight(f"{name}.offsets", weight.offsets)
    return f"{name}.offsets"

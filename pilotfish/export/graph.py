"""Build an ONNX graph, operator by operator.

In: operators and weights, one at a time. Out: `model.onnx` (structure and small constants) and its
external data file, which may exceed 2 GB. `GraphWriter.weight` writes a weight to disk before it
returns, so that only one weight is in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from pilotfish.export.data_file import DataFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

# IR version for each opset: the oldest runtime with the opset must read it. 4-bit types need 10.
IR_VERSION = {17: 8, 24: 10}

Dim = int | str
ELEMENT: dict[str, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "float64": TensorProto.DOUBLE,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "int4": TensorProto.INT4,
}


class GraphWriter:
    """A writer that collects nodes, and writes weights to `data`; values are identified by name."""

    def __init__(self, data: BinaryIO, data_name: str) -> None:
        self._data = DataFile(data, data_name)
        self._nodes: list[Any] = []
        self._initializers: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._names = 0

    @property
    def data_sha256(self) -> str:
        """The SHA-256 (hex) of the external data written so far."""
        return self._data.sha256

    def input(self, name: str, dtype: str, shape: Sequence[Dim]) -> str:
        """Declare an input; a string in `shape` names a variable size."""
        self._inputs.append(helper.make_tensor_value_info(name, ELEMENT[dtype], list(shape)))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[Dim]) -> str:
        """Declare a value as an output."""
        self._outputs.append(helper.make_tensor_value_info(name, ELEMENT[dtype], list(shape)))
        return name

    def op(self, kind: str, *inputs: str, name: str = "", domain: str = "", **attrs: Any) -> str:
        """Append an operator with one output; return the output's name."""
        return self.multi(kind, *inputs, names=[name or self._fresh(kind)], domain=domain, **attrs)[
            0
        ]

    def multi(
        self, kind: str, *inputs: str, names: Sequence[str], domain: str = "", **attrs: Any
    ) -> list[str]:
        """Append an operator with the output names `names`; "" stands for an unused output."""
        node = helper.make_node(kind, inputs, names, domain=domain, **attrs)
        node.name = next(name for name in names if name)
        self._nodes.append(node)
        return list(names)

    def new_names(self, kind: str, count: int) -> list[str]:
        """Return new value names, for the outputs of `multi`."""
        return [self._fresh(kind) for _ in range(count)]

    def constant(self, values: Any, dtype: str) -> str:
        """Add a small constant to the graph file; equal constants are stored once."""
        array = np.asarray(values, dtype)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant.{len(self._constants)}"
            self._initializers[name] = numpy_helper.from_array(array, name)
            self._constants[key] = name
        return self._constants[key]

    def weight(self, name: str, array: NDArray[Any], dtype: str | None = None) -> str:
        """Write `array` to the data file; `dtype` relabels its bits without a conversion.

        For "int4" the array is u8, with a value in the low four bits of each element.
        """
        dtype = dtype or array.dtype.name
        payload = pack_nibbles(array) if dtype == "int4" else array
        return self.stream_weight(name, array.shape, dtype, [payload])

    def stream_weight(
        self, name: str, shape: Sequence[int], dtype: str, parts: Iterable[NDArray[Any]]
    ) -> str:
        """Write a weight from an iterator of its parts along the first axis, to save memory."""
        tensor = TensorProto(name=name, data_type=ELEMENT[dtype], dims=shape)
        self._data.put(
            tensor, (np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts)
        )
        self._initializers[name] = tensor
        return name

    def has(self, name: str) -> bool:
        """Whether a weight of this name was written."""
        return name in self._initializers

    def pop_operator(self, value: str) -> list[str]:
        """Remove the last operator, which must have the output `value`; return its inputs.

        Dialects use this to fuse an operator with the previous one.
        """
        node = self._nodes.pop()
        if list(node.output) != [value]:
            raise ValueError(f"{value} is not the output of the last operator")
        return list(node.input)

    def save(self, path: Path, *, opset: int) -> None:
        """Write the graph file; the caller closes the data file."""
        imports = [helper.make_opsetid("", opset)]
        domains = sorted({node.domain for node in self._nodes} - {""})
        imports += [helper.make_opsetid(domain, 1) for domain in domains]
        graph = helper.make_graph(
            self._nodes,
            "decoder",
            self._inputs,
            self._outputs,
            list(self._initializers.values()),
        )
        model: ModelProto = helper.make_model(graph, opset_imports=imports)
        model.ir_version = IR_VERSION[opset]
        model.producer_name = "pilotfish"
        path.write_bytes(model.SerializeToString())

    def _fresh(self, kind: str) -> str:
        self._names += 1
        return f"{kind}.{self._names}"


def pack_nibbles(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack values below 16, u8 [..., n], into bytes: two per byte, the first in the low nibble."""
    flat = array.ravel()
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    packed: NDArray[np.uint8] = flat[0::2] | (flat[1::2] << np.uint8(4))
    return packed

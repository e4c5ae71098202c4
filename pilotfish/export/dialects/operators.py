"""The arithmetic operators of every dialect, and its weights, each of which is written once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import ClassVar, Concatenate, ParamSpec, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.manifest import Precision
from pilotfish.export.blocks import Quantized
from pilotfish.export.graph import ELEMENT, GraphWriter
from pilotfish.export.model_config import ModelConfig

P = ParamSpec("P")
T = TypeVar("T")
Writer = TypeVar("Writer", bound="Operators")
AXES_ARE_INPUTS = 18  # first opset in which the axes of reductions are inputs


class WeightReader(Protocol):
    """The part of the interface `WeightSource` that a dialect uses (`export.sources.source`)."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one weight, dequantised."""
        ...

    def quantized(self, name: str) -> Quantized | None:
        """Read one weight in its stored blocks; None if it is stored as floats."""
        ...

    def rows(self, name: str) -> Iterator[NDArray[np.float32]]:
        """Read one weight in parts of a few consecutive rows."""
        ...


def shared(write: Callable[Concatenate[Writer, P], T]) -> Callable[Concatenate[Writer, P], T]:
    """Decorate a method that writes a value which layers share: equal arguments, one value."""

    @wraps(write)
    def find_or_write(self: Writer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = (write.__name__, *args, *kwargs.items())
        if key not in self.written:
            self.written[key] = write(self, *args, **kwargs)
        return cast("T", self.written[key])

    return find_or_write


class Operators(ABC):
    """A writer of operators to a graph.

    Attributes:
        source: the source of the weights.
        float: numpy's name of the graph's floating-point type.
        folds_offsets: whether blocks' offsets become zero points and further columns.
        written: values that layers share (`shared`), by what identifies them.
    """

    opset: ClassVar[int]
    folds_offsets: ClassVar[bool] = False

    def __init__(
        self, graph: GraphWriter, config: ModelConfig, source: WeightReader, precision: Precision
    ) -> None:
        self.graph, self.config, self.source = graph, config, source
        self.float = "float16" if precision == "fp16" else "float32"
        self.written: dict[tuple[object, ...], object] = {}  # values of `shared` methods

    @abstractmethod
    def declare_inputs(self) -> None:
        """Declare the graph's inputs, before anything else is written.

        Raises:
            ExportError: if the dialect cannot express the model.
        """

    @abstractmethod
    def quantized_linear(self, x: str, name: str, weight: Quantized) -> str:
        """Multiply x [T, K] by the transposed weight [N, K]; the weight's offsets are ignored."""

    def kernel_blocks(self, weight: Quantized) -> Quantized:
        """Return the same weight in blocks that the dialect's `quantized_linear` can express."""
        return weight

    def block_scales(self, name: str, scales: NDArray[np.float32]) -> str:
        """Write scales f32 [N, K / block] unless they are written already."""
        return name if self.graph.has(name) else self.graph.weight(name, scales)

    def signed_rows(
        self, name: str, shape: tuple[int, int], parts: Iterable[NDArray[np.int8]], tokens: str
    ) -> str:
        """Look up the rows `tokens` [T] of a table of codes, i8 [V, K]; integers [T, K].

        `parts` are consecutive parts of the table, of which one at a time is in memory.
        """
        table = self.graph.stream_weight(name, shape, "int8", parts)
        return self.graph.op("Gather", table, tokens)

    @abstractmethod
    def code_rows(self, name: str, weight: Quantized, tokens: str) -> str:
        """Look up the rows `tokens` [T] of a weight's codes; floats [T, K / block, block].

        The result is the codes minus `zero_point`.
        """

    def read(self, name: str, *shape: int) -> NDArray[np.float32]:
        """Read a weight of this shape."""
        weight = self.source.tensor(name)
        if weight.shape != shape:
            raise ValueError(f"{name} has shape {weight.shape}, but the network reads {shape}")
        return weight

    def weight(self, name: str, *shape: int, array: NDArray[np.float32] | None = None) -> str:
        """Write a weight in the graph's floating-point type, unless it is written already.

        array: its values; without it, the weight of this name and shape is read.
        """
        if self.graph.has(name):
            return name
        values = self.read(name, *shape) if array is None else array
        return self.graph.weight(name, values.astype(self.float, copy=False))

    def float32_weight(self, name: str, *shape: int) -> str:
        """Write a weight of this shape in float32, whatever the graph's floating-point type."""
        return self.graph.weight(name, self.read(name, *shape))

    def add(self, x: str, y: str) -> str:
        """Add x and y."""
        return self.graph.op("Add", x, y)

    def multiply(self, x: str, y: str) -> str:
        """Multiply x by y, element by element."""
        return self.graph.op("Mul", x, y)

    def scale(self, x: str, factor: float) -> str:
        """Multiply x by a number."""
        return x if factor == 1.0 else self.multiply(x, self.graph.constant(factor, self.float))

    def cap(self, x: str, cap: float | None) -> str:
        """Compute cap · tanh(x / cap); return x if there is no cap."""
        if cap is None:
            return x
        return self.scale(self.graph.op("Tanh", self.scale(x, 1 / cap)), cap)

    def mean(self, x: str) -> str:
        """Compute the mean over the last axis, which keeps length 1."""
        if self.opset < AXES_ARE_INPUTS:
            return self.graph.op("ReduceMean", x, axes=[-1], keepdims=1)
        return self.graph.op("ReduceMean", x, self.graph.constant([-1], "int64"), keepdims=1)

    def sigmoid(self, x: str) -> str:
        """Compute 1 / (1 + e⁻ˣ)."""
        return self.graph.op("Sigmoid", x)

    def silu(self, x: str) -> str:
        """Compute x · sigmoid(x)."""
        return self.multiply(x, self.sigmoid(x))

    def split(self, x: str, sizes: Sequence[int], axis: int = -1) -> list[str]:
        """Split an axis into consecutive parts of these sizes."""
        names = self.graph.new_names("Split", len(sizes))
        count = self.graph.constant(sizes, "int64")
        return self.graph.multi("Split", x, count, names=names, axis=axis)

    def concat(self, *parts: str) -> str:
        """Concatenate along the last axis."""
        return self.graph.op("Concat", *parts, axis=-1)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """Reshape to a constant shape; 0 keeps a dimension, −1 is inferred."""
        return self.graph.op("Reshape", x, self.graph.constant(shape, "int64"))

    def unsqueeze(self, x: str, *axes: int) -> str:
        """Insert axes of length 1."""
        return self.graph.op("Unsqueeze", x, self.graph.constant(axes, "int64"))

    def cast(self, x: str, dtype: str) -> str:
        """Cast x to another dtype."""
        return self.graph.op("Cast", x, to=ELEMENT[dtype])

    def to_float32(self, x: str) -> str:
        """Cast x from the graph's floating-point type to float32."""
        return x if self.float == "float32" else self.cast(x, "float32")

    def from_float32(self, x: str) -> str:
        """Cast x from float32 to the graph's floating-point type."""
        return x if self.float == "float32" else self.cast(x, self.float)

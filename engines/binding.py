"""Arrays bound to a session's inputs and outputs, so that a pass binds nothing it bound before.

Binding is slow beside filling an array: about 5 µs each, four times that with cold caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Binding:
    """One IOBinding over neighbouring slots, with the small inputs that go with it."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._inputs: dict[str, NDArray[Any]] = {}
        self.rows: tuple[int, int, int] | None = None  # which rows of which outputs are bound

    def input(self, name: str, shape: tuple[int, ...], dtype: Any = np.int64) -> NDArray[Any]:
        """The array that the graph will read as `name`; the caller fills all of it."""
        array = self._inputs.get(name)
        if array is None or array.shape != shape:
            array = self._inputs[name] = np.zeros(shape, dtype)
            self._binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
        return array

    def output(self, name: str, array: NDArray[Any]) -> None:
        """Have the graph write `name` into `array`, which the caller keeps alive."""
        pointer = array.ctypes.data
        self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, pointer)

    def in_place(self, past: str, present: str, array: NDArray[Any]) -> None:
        """Have the graph read `past` from `array` and write `present` over it."""
        pointer = array.ctypes.data
        self._binding.bind_input(past, "cpu", 0, array.dtype.type, array.shape, pointer)
        self._binding.bind_output(present, "cpu", 0, array.dtype.type, array.shape, pointer)

    def run(self) -> None:
        """One run of the graph."""
        self._session.run_with_iobinding(self._binding)

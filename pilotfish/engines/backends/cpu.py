"""ONNX Runtime on the CPU: keys, values and outputs are bound in place, without copies.

Binding a new buffer is slow compared with filling it (about 5 µs, or 20 µs with cold CPU caches).
So an unchanged buffer is not bound again. When the shape of an input changes, its small buffer is
kept with its OrtValue: to bind that again takes 0.4 µs. Shapes change in most rounds, since the
first pass of a drafter's window has one token or two, and the other passes have one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.backends.backend import Answers, Backend, Binding, Load, plane_names
from pilotfish.engines.kv import HostCache
from pilotfish.engines.runtime import CPU, open_session
from pilotfish.engines.states import StateCache, StateStep

# Limits (bytes) of the arrays that a binding keeps for other shapes of its inputs: of all, and of
# one, so that a wide mask displaces no others.
_SPARE_BYTES, _MOST_SPARE_BYTES = 1 << 18, 1 << 16


class CpuBackend(Backend):
    """The backend for graphs of any dialect, on the cores of this machine."""

    trusted = True

    def __init__(self, load: Load) -> None:
        manifest = load.artifact.manifest
        self._session = open_session(load.artifact.graph_path, load.threads, CPU)
        self.context = load.context
        self.batches, self.widths = graph_form(self._session)
        self.cache: HostCache = HostCache(manifest, load.slots, load.context)
        if manifest.states is not None:
            self.states = StateCache(manifest.states, load.slots)
        self._names = plane_names(manifest.cached)

    def bind(self, first: int, count: int) -> Binding:
        """Bind slots first … first + count − 1 of each cache tensor, as `past` and as `present`."""
        state_layers = [] if self.states is None else self.states.layout.layers
        binding = CpuBinding(self._session, state_layers)
        for plane, name in enumerate(self._names):
            piece = self.cache.piece(plane, first, count)
            binding.bind_in_place(f"past.{name}", f"present.{name}", piece)
        return binding


def graph_form(session: Any) -> tuple[bool, dict[str, int]]:
    """Return whether the graph takes several slots per run, and its output widths by name."""
    batches = any(item.name == "unpack" for item in session.get_inputs())
    shapes = {item.name: item.shape for item in session.get_outputs()}
    answers = (name for name in shapes if not name.startswith(("present.", "settled.")))
    return batches, {name: shapes[name][1] for name in answers}


class CpuBinding(Binding):
    """An IOBinding for neighbouring slots, with the arrays of its small inputs."""

    def __init__(self, session: Any, state_layers: Sequence[int]) -> None:
        self._session = session
        self._state_layers = state_layers
        self._binding = session.io_binding()
        self._inputs: dict[str, NDArray[Any]] = {}
        # small arrays by name and shape, with the OrtValues that bind them
        self._spares: dict[tuple[str, tuple[int, ...]], tuple[NDArray[Any], Any]] = {}
        self._spare_bytes = 0
        self._bound_rows: tuple[int, int, int] | None = (
            # the output rows that are bound now: first row, number of rows, length of the arrays
            None
        )

    def input(self, name: str, shape: tuple[int, ...], dtype: Any = np.int64) -> NDArray[Any]:
        """Return the array that the graph will read as `name`; the caller fills all of it."""
        array = self._inputs.get(name)
        if array is None or array.shape != shape:
            array, value = self._spares.get((name, shape)) or self._make(name, shape, dtype)
            self._inputs[name] = array
            self._binding.bind_ortvalue_input(name, value)
        return array

    def _make(self, name: str, shape: tuple[int, ...], dtype: Any) -> tuple[NDArray[Any], Any]:
        """Make an input array and the OrtValue that shares its memory; keep both if small."""
        from onnxruntime import OrtValue

        array = np.zeros(shape, dtype)
        made = array, OrtValue.ortvalue_from_numpy(array)
        if array.nbytes <= _MOST_SPARE_BYTES:
            self._spare_bytes += array.nbytes
            if self._spare_bytes > _SPARE_BYTES:
                self._spares.clear()
                self._spare_bytes = array.nbytes
            self._spares[name, shape] = made
        return made

    def bind_in_place(self, past: str, present: str, array: NDArray[Any]) -> None:
        """Make the graph read `past` from `array` and write `present` over it."""
        pointer = array.ctypes.data
        self._binding.bind_input(past, "cpu", 0, array.dtype.type, array.shape, pointer)
        self._binding.bind_output(present, "cpu", 0, array.dtype.type, array.shape, pointer)

    def bind_states(self, step: StateStep) -> None:
        """Make the next run read and write these states."""
        self._step = step  # a reference that keeps the bound arrays alive
        for name, array in state_arrays(self._state_layers, step):
            bind = (
                self._binding.bind_input if name.startswith("past.") else self._binding.bind_output
            )
            bind(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)

    def run(self, answers: Answers, row: int, rows: int) -> None:
        """Run the graph once."""
        size = len(next(iter(answers.values())))
        # arrays of equal size are the same arrays, since a new array is always longer
        bound_rows = (row, rows, size)
        if self._bound_rows != bound_rows:
            self._bound_rows = bound_rows
            for name, answer in answers.items():
                part = answer[row : row + rows]
                self._binding.bind_output(name, "cpu", 0, np.float32, part.shape, part.ctypes.data)
        self._session.run_with_iobinding(self._binding)


def state_arrays(
    layers: Sequence[int], step: StateStep
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the graph's inputs `past` and outputs `settled` and `present`, with their arrays."""
    places = [
        ("past", "inputs", step.earlier),
        ("present", "inputs", step.inputs),
        ("past", "state", step.past),
        ("settled", "state", step.settled),
        ("present", "state", step.present),
    ]
    for side, role, arrays in places:
        for layer, array in zip(layers, () if arrays is None else arrays, strict=False):
            yield f"{side}.{layer}.{role}", array if role == "inputs" else array[None]

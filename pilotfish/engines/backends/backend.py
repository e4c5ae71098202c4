"""The interface between `Slots` and the runtime that computes passes.

A backend has loaded one artifact and holds the keys and values of all slots. `bind` prepares a run
of the graph over neighbouring slots: `engines.passes` fills its inputs, which are host arrays, and
`Binding.run` computes the outputs and writes them into host arrays. The backend decides where keys
and values are stored and what is copied. Not thread-safe: only one thread may use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.kv import KVCache
from pilotfish.engines.manifest import CachedLayer, Manifest
from pilotfish.engines.states import StateCache, StateStep

KEY_VALUE = ("key", "value")

# Output arrays by output name, without the cache's outputs: f32 [rows, width], with equal rows.
Answers: TypeAlias = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Load:
    """A model to load, and the options for loading it.

    Attributes:
        context: required number of positions per slot.
        flexible: whether a TensorRT engine that was built for fewer positions is acceptable.
        build: whether a TensorRT engine may be built now, which takes minutes.
    """

    artifact: Artifact
    slots: int
    context: int
    flexible: bool = False
    threads: int | None = None
    build: bool = True


class Binding(ABC):
    """The inputs of runs over the same neighbouring slots; `run` runs the graph."""

    @abstractmethod
    def input(self, name: str, shape: tuple[int, ...], dtype: Any = np.int64) -> NDArray[Any]:
        """Return the array that the graph will read as `name`; the caller fills all of it.

        A backend may return integers narrower than `dtype`.
        """

    def bind_states(self, step: StateStep) -> None:
        """Make the next run read and write these states.

        `Slots` calls this only if `Backend.states` is not None; such a backend overrides this
        method.
        """
        raise NotImplementedError  # unreachable: other backends refuse models with states

    @abstractmethod
    def run(self, answers: Answers, row: int, rows: int) -> None:
        """Run the graph; write `rows` rows of each output into `answers`, from `row` on."""


class Backend(ABC):
    """A loaded graph, and the keys and values of all slots.

    Attributes:
        cache: keys and values.
        context: positions per slot.
        batches: whether a run can cover several slots.
        widths: row width of each output, by its name.
        narrow: maximum tokens of a pass that may share a run with other passes; None = no limit.
        widest: maximum tokens of a pass in one run; None = no limit.
        states: recurrent states; None if the model has none. A run of a model with states covers
        one slot.
        trusted: whether `Slots` may skip the check that a run reads the cells which an earlier run
            wrote.
    """

    cache: KVCache
    context: int
    batches: bool
    widths: Mapping[str, int]
    narrow: int | None = None
    widest: int | None = None
    states: StateCache | None = None
    trusted: bool = False

    @abstractmethod
    def bind(self, first: int, count: int) -> Binding:
        """Prepare runs over slots first … first + count − 1.

        The binding is valid until the cache's buffers move.
        """

    def answers(self, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Allocate an output array in the memory that the backend can write fastest."""
        return np.empty(shape, np.float32)


def kv_names(layers: Iterable[int]) -> list[str]:
    """List the names of these layers' cache tensors: key, value, …; without `past.`, `present.`."""
    return [f"{layer}.{role}" for layer in layers for role in KEY_VALUE]


def plane_names(cached: Iterable[CachedLayer]) -> list[str]:
    """List the names of these cached layers' tensors, in the order of the cache."""
    return kv_names(each.layer for each in cached)


def refuse_states(manifest: Manifest) -> None:
    """Raise `ProviderError` if the model has recurrent states."""
    if manifest.states is not None:
        raise ProviderError(
            f"{manifest.architecture} has recurrent states, which only the CPU backend supports: "
            "choose --provider cpu"
        )

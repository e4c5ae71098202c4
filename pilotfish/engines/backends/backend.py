"""The interface between slots and the runtime that computes their passes.

A backend has loaded one artifact and holds the keys and values of its slots. `bind` returns the
inputs of a run over neighbouring slots as host arrays, which `engines.passes` fills; `Binding.run`
computes and writes the answers into host arrays. The backend decides where keys and values are
stored and what it copies. Not thread-safe: one owner.
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

# Answer arrays by output name (cache outputs excluded), f32 [rows, width]; all have equal rows.
Answers: TypeAlias = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Load:
    """A model to load, and how to load it.

    Attributes:
        context: least number of positions per slot.
        flexible: accept an engine that was built for fewer positions.
        build: allow building an engine now, which takes minutes.
    """

    artifact: Artifact
    slots: int
    context: int
    flexible: bool = False
    threads: int | None = None
    build: bool = True


class Binding(ABC):
    """One run over neighbouring slots."""

    @abstractmethod
    def input(self, name: str, shape: tuple[int, ...], dtype: Any = np.int64) -> NDArray[Any]:
        """Return the array that the graph will read as `name`; the caller fills all of it.

        A backend may hold integers narrower than `dtype`.
        """

    def bind_states(self, step: StateStep) -> None:
        """Make the next run read and write these states.

        Slots call this only if `Backend.states` is set; a backend that sets it overrides this.
        """
        raise NotImplementedError  # unreachable: other backends refuse such models at load

    @abstractmethod
    def run(self, answers: Answers, row: int, rows: int) -> None:
        """Run the graph; write `rows` rows of each answer to `answers`, starting at `row`."""


class Backend(ABC):
    """A loaded graph with the keys and values of its slots.

    Attributes:
        cache: keys and values.
        context: positions per slot.
        batches: whether one run can cover several slots.
        widths: row width of each answer, by its name.
        narrow: most tokens of a pass that shares a run; None = no limit.
        widest: most tokens that a run takes from one pass; None = no limit.
        states: recurrent states, for models that have them; a run then covers one slot.
        trusted: whether the probe may assume that the graph reads the cache as it was written.
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

        Valid until the cache's buffers move.
        """

    def answers(self, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Allocate an array for answers, in the memory that the backend writes fastest."""
        return np.empty(shape, np.float32)


def kv_names(layers: Iterable[int]) -> list[str]:
    """Name the planes of these layers, key and value alternating, without `past.`/`present.`."""
    return [f"{layer}.{role}" for layer in layers for role in KEY_VALUE]


def plane_names(cached: Iterable[CachedLayer]) -> list[str]:
    """Name the planes of a cache in order."""
    return kv_names(each.layer for each in cached)


def refuse_states(manifest: Manifest) -> None:
    """Raise `ProviderError` for a model with recurrent states."""
    if manifest.states is not None:
        raise ProviderError(
            f"{manifest.architecture} has recurrent states, which only the CPU backend supports: "
            "choose --provider cpu"
        )

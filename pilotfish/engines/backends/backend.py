"""The interface between slots and whatever computes their passes.

A backend has loaded one artifact and holds the keys and values of its slots. `bind` returns the
inputs of a run over neighbouring slots as arrays in the host's memory, for `engines.passes` to
fill; `Binding.run` computes and writes the answers into host arrays. Where keys and values lie, and
what is copied, is up to the backend. Not thread-safe: one owner.
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

# By the names of a graph's outputs but for the cache, f32 [rows, width] each; equally many rows.
Answers: TypeAlias = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Load:
    """What to load.

    Attributes:
        context: positions of each slot, at least.
        flexible: fewer positions will do, where an engine was built for fewer.
        build: an engine may be built now, which takes minutes.
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

    def step(self, step: StateStep) -> None:
        """Make the next run read and write these states.

        Called only if `Backend.states` is set; a backend that sets it overrides this.
        """
        raise NotImplementedError  # never called: it refuses such models when they load

    @abstractmethod
    def run(self, answers: Answers, row: int, rows: int) -> None:
        """Compute; write `rows` rows of each answer to `answers` from `row` on."""


class Backend(ABC):
    """A loaded graph with the keys and values of its slots.

    Attributes:
        cache: keys and values.
        context: positions of each slot.
        batches: whether a run may hold several slots.
        widths: numbers in a row of each answer, by its name.
        narrow: passes of more tokens have a run of their own; None = none do.
        widest: tokens that a run takes of one pass; None = any number.
        states: what layers without keys and values keep, of models that have such; a run then holds
            one slot.
        trusted: whether the probe may take it for granted that the cache is read as written.
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

        Valid until the cache moves.
        """

    def answers(self, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Allocate an array for answers, in the memory that this backend writes to fastest."""
        return np.empty(shape, np.float32)


def kv_names(layers: Iterable[int]) -> list[str]:
    """Name these layers' planes without `past.` or `present.`: their keys and values by turns."""
    return [f"{layer}.{what}" for layer in layers for what in KEY_VALUE]


def plane_names(cached: Iterable[CachedLayer]) -> list[str]:
    """Name the planes of a cache in their order."""
    return kv_names(each.layer for each in cached)


def refuse_states(manifest: Manifest) -> None:
    """Raise `ProviderError` for a model some of whose layers keep no keys and values."""
    if manifest.states is not None:
        raise ProviderError(
            f"{manifest.architecture} keeps states besides keys and values, which only the CPU "
            "backend does: choose --provider cpu"
        )

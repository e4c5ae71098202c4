"""Batch the passes of two models over many texts.

In:  procedures, one for each question: generators that yield read requests and are sent the
     results. Out: the return value of each procedure when it ends.

The steps of one question depend on each other, so passes batch over questions: each has a slot in
both models, and a pass serves all waiting requests. A slot keeps the cache of the common prefix, so
a procedure requests whole texts and pays only for new tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.language_model import open_model
from pilotfish.engines.passes import Pass

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

DRAFTER, TARGET = "drafter", "target"
CHUNK = 64  # tokens of one text in one pass

R = TypeVar("R")


class ReadRequest(NamedTuple):
    """A request to read ``ids`` [n] of the model; the result covers the last ``rows`` tokens."""

    model: str
    ids: Ids
    rows: int = 1


class ReadResult(NamedTuple):
    """logits: f32 [rows, V]; hidden: f32 [rows, d]. The next read overwrites these views."""

    logits: Floats
    hidden: Floats


Procedure = Generator[ReadRequest, ReadResult, R]


class Reader:
    """One model with a slot for each text."""

    def __init__(
        self, artifact: Path, slots: int, context: int, engine: EngineSettings, *, drafts: bool
    ) -> None:
        self._decoder = open_model(
            artifact,
            slots=slots,
            context=context,
            threads=engine.threads,
            provider=engine.provider,
            drafts=drafts,
        )
        self._cached_ids: list[Ids] = [np.empty(0, np.int64)] * slots
        self.tokens = 0  # read so far

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, ReadResult]:
        """Make one pass for requests by slot; return the results of those that it completes."""
        passes = []
        for slot, (_, ids, rows) in requests.items():
            end = len(ids)
            base = min(_common_length(self._cached_ids[slot], ids), end - rows)
            if end - base > max(CHUNK, rows):
                end, rows = min(base + CHUNK, end - rows), 0
            self._decoder.rollback(slot, base)
            passes.append(Pass(slot, ids[base:end], rows))
            self._cached_ids[slot] = ids[:end]
            self.tokens += end - base
        outputs = self._decoder.forward(passes)
        return {
            pass_.slot: ReadResult(output.logits, output.hidden)
            for pass_, output in zip(passes, outputs, strict=True)
            if pass_.rows
        }


class Readers:
    """Drafter and target, with ``slots`` slots each.

    context: tokens of the longest text in either vocabulary. engine: options of both models.
    """

    def __init__(
        self, drafter: Path, target: Path, *, slots: int, context: int, engine: EngineSettings
    ) -> None:
        if slots < 1:
            raise UnsupportedError(f"There is at least one question at a time, not {slots}.")
        self.slots = slots
        self.drafter = Reader(drafter, slots, context, engine, drafts=True)
        self.target = Reader(target, slots, context, engine, drafts=False)

    def run(
        self, procedures: Iterable[tuple[str, Callable[[], Procedure[R]]]]
    ) -> Iterator[tuple[str, R]]:
        """Yield each procedure's key and return value, in the order of their ends."""
        waiting, free = deque(procedures), [*range(self.slots)]
        running: dict[int, tuple[str, Procedure[R]]] = {}  # by slot
        requests: dict[int, ReadRequest] = {}  # the request each slot waits for
        while waiting or running:
            while waiting and free:
                key, begin = waiting.popleft()
                steps = begin()
                try:
                    requests[free[0]] = next(steps)
                except StopIteration as end:  # there was nothing to read
                    yield key, end.value
                    continue
                running[free.pop(0)] = key, steps
            # the drafter's requests first: the requests that follow share one pass of the target
            drafting = {
                slot: request for slot, request in requests.items() if request.model == DRAFTER
            }
            reader = self.drafter if drafting else self.target
            for slot, result in (reader.read(drafting or requests) if requests else {}).items():
                key, steps = running[slot]
                try:
                    requests[slot] = steps.send(result)
                except StopIteration as end:
                    free.append(slot)
                    del running[slot], requests[slot]
                    yield key, end.value


def _common_length(cached: Ids, wanted: Ids) -> int:
    shorter = min(len(cached), len(wanted))
    differing = np.flatnonzero(cached[:shorter] != wanted[:shorter])
    return int(differing[0]) if len(differing) else shorter

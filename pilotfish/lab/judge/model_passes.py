"""Batch the passes of two models over many texts.

In:  procedures, one for each question. A procedure is a generator: it yields read requests and
     receives read results. Out: each procedure's return value when it ends.

The steps of one question depend on each other, so a pass batches over questions. Each question has
a slot in both models, and a pass serves all waiting requests of one model. A slot's cache keeps the
prefix that two requests share. So a procedure requests whole texts, and only new tokens are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.engines.engine import Work, open_engine
from pilotfish.engines.engine_settings import EngineSettings

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

DRAFTER, TARGET = "drafter", "target"
CHUNK = 64  # maximum number of one text's tokens in one pass, unless more rows are requested

R = TypeVar("R")


class ReadRequest(NamedTuple):
    """A request that a model read a text.

    model: `DRAFTER` or `TARGET`. ids: the text's token ids, i64 [n]. rows: number of last tokens
    for which the result has outputs.
    """

    model: str
    ids: Ids
    rows: int = 1


class ReadResult(NamedTuple):
    """The model's outputs at the last tokens of a text. The next read overwrites both arrays.

    logits: f32 [rows, V]. hidden: states of the last layer, f32 [rows, d].
    """

    logits: Floats
    hidden: Floats


Procedure = Generator[ReadRequest, ReadResult, R]


class Reader:
    """One model, with a cache slot for each text."""

    def __init__(
        self, artifact: Path, slots: int, context: int, settings: EngineSettings, *, drafts: bool
    ) -> None:
        self._engine = open_engine(
            artifact,
            slots=slots,
            context=context,
            threads=settings.threads,
            provider=settings.provider,
            drafts=drafts,
        )
        self.tokens = 0  # number of tokens read so far

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, ReadResult]:
        """Make one pass for the requests of several slots; return the completed results by slot.

        A request of more than `CHUNK` new tokens needs several passes, and so several calls.
        """
        works = []
        for slot, (_, ids, rows) in requests.items():
            cached, end = self._engine.cached(slot, ids, rows), len(ids)
            if end - cached > max(CHUNK, rows):
                end, rows = min(cached + CHUNK, end - rows), 0
            works.append(Work(slot, ids[:end], rows))
            self.tokens += end - cached
        outputs = self._engine.run(works)
        return {
            work.slot: ReadResult(output.logits, output.hidden)
            for work, output in zip(works, outputs, strict=True)
            if work.rows
        }


class Readers:
    """The drafter and the target, each with ``slots`` slots.

    context: length of the longest text, in tokens of either model. engine: options of both models.
    """

    def __init__(
        self, drafter: Path, target: Path, *, slots: int, context: int, engine: EngineSettings
    ) -> None:
        if slots < 1:
            raise UnsupportedError(f"At least one question must run at a time, not {slots}.")
        self.slots = slots
        self.drafter = Reader(drafter, slots, context, engine, drafts=True)
        self.target = Reader(target, slots, context, engine, drafts=False)

    def run(
        self, procedures: Iterable[tuple[str, Callable[[], Procedure[R]]]]
    ) -> Iterator[tuple[str, R]]:
        """Run the procedures; yield each one's key and return value as soon as it ends."""
        waiting, free = deque(procedures), [*range(self.slots)]
        running: dict[int, tuple[str, Procedure[R]]] = {}  # key and procedure of each busy slot
        requests: dict[int, ReadRequest] = {}  # the pending request of each slot
        while waiting or running:
            while waiting and free:
                key, begin = waiting.popleft()
                steps = begin()
                try:
                    requests[free[0]] = next(steps)
                except StopIteration as end:  # this procedure makes no request
                    yield key, end.value
                    continue
                running[free.pop(0)] = key, steps
            # Serve the drafter's requests first: then more procedures wait for the target, and one
            # pass of the target serves all of them.
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

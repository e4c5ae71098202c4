"""Two models that read many texts at once.

In:  procedures, one a question: generators that say what they want read and are sent what the model
     makes of it. Out: what each returns, as soon as it is done.

A question's steps follow from each other, so it is the questions that are batched: each has a slot
in both models, and a pass serves all that wait. A slot keeps what it has read as far as it agrees
with what is wanted, so a procedure names whole texts and pays for what is new in them.
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
    """Read ``ids`` [n], the model's own, and show what it makes of the last ``rows`` of them."""

    model: str
    ids: Ids
    rows: int = 1


class ReadResult(NamedTuple):
    """logits: f32 [rows, V]; hidden: f32 [rows, d]. Views that the next look overwrites."""

    logits: Floats
    hidden: Floats


Procedure = Generator[ReadRequest, ReadResult, R]


class Reader:
    """One model, a slot for each text that is being read."""

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
        self._held: list[Ids] = [np.empty(0, np.int64)] * slots
        self.tokens = 0  # read so far

    def read(self, requests: Mapping[int, ReadRequest]) -> dict[int, ReadResult]:
        """Make one pass for these looks, by slot; leave out those that it does not finish."""
        passes = []
        for slot, (_, ids, rows) in requests.items():
            end = len(ids)
            base = min(_agreeing(self._held[slot], ids), end - rows)
            if end - base > max(CHUNK, rows):
                end, rows = min(base + CHUNK, end - rows), 0
            self._decoder.rollback(slot, base)
            passes.append(Pass(slot, ids[base:end], rows))
            self._held[slot] = ids[:end]
            self.tokens += end - base
        outputs = self._decoder.forward(passes)
        return {
            pass_.slot: ReadResult(output.logits, output.hidden)
            for pass_, output in zip(passes, outputs, strict=True)
            if pass_.rows
        }


class Readers:
    """Drafter and target, with a slot in each for every text that is read at once.

    context: tokens of the longest text of either. engine: how the models are run.
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
        """Yield what each procedure returns, by its key, in the order in which they end."""
        waiting, free = deque(procedures), [*range(self.slots)]
        running: dict[int, tuple[str, Procedure[R]]] = {}  # by slot
        requests: dict[int, ReadRequest] = {}  # what each waits for
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
            # the drafter's looks first: what follows from them goes into one pass of the target
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


def _agreeing(cached: Ids, wanted: Ids) -> int:
    shorter = min(len(cached), len(wanted))
    differing = np.flatnonzero(cached[:shorter] != wanted[:shorter])
    return int(differing[0]) if len(differing) else shorter

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.decoder import Decoder, Pass
from pilotfish.wire.errors import UnsupportedError

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

DRAFTER, TARGET = "drafter", "target"
CHUNK = 64  # tokens of one text in one pass

R = TypeVar("R")


class Look(NamedTuple):
    """Read ``ids`` [n], the model's own, and show what it makes of the last ``rows`` of them."""

    model: str
    ids: Ids
    rows: int = 1


class Sight(NamedTuple):
    """logits: f32 [rows, V]; hidden: f32 [rows, d]. Views that the next look overwrites."""

    logits: Floats
    hidden: Floats


Procedure = Generator[Look, Sight, R]


class Reader:
    """One model, a slot for each text that is being read."""

    def __init__(
        self, artifact: Path, slots: int, context: int, threads: int | None, provider: str
    ) -> None:
        opened = Artifact.open(artifact)
        self.manifest = opened.manifest
        self._decoder = Decoder(
            opened, slots=slots, context=context, threads=threads, provider=provider
        )
        self.context = self._decoder.context
        self._held: list[Ids] = [np.empty(0, np.int64)] * slots
        self.tokens = 0  # read so far
        self.passes = 0

    def read(self, looks: Mapping[int, Look]) -> dict[int, Sight]:
        """One pass for these looks, by slot; those that it has not finished are left out."""
        passes, finished = [], []
        for slot, look in looks.items():
            base = min(_agreeing(self._held[slot], look.ids), len(look.ids) - look.rows)
            end = len(look.ids)
            if end - base > max(CHUNK, look.rows):
                end = min(base + CHUNK, end - look.rows)
            self._decoder.rollback(slot, base)
            rows = look.rows if end == len(look.ids) else 0
            passes.append(Pass(slot, look.ids[base:end], rows))
            finished.append(rows > 0)
        outputs = self._decoder.forward(passes)
        seen = {}
        for (slot, look), one, output, whole in zip(
            looks.items(), passes, outputs, finished, strict=True
        ):
            self._held[slot] = look.ids[: self._decoder.length(slot)]
            self.tokens += len(one.tokens)
            if whole:
                seen[slot] = Sight(output.logits, output.hidden)
        self.passes += 1
        return seen


@dataclass(eq=False)
class _Running(Generic[R]):
    """A procedure that has a slot, and what it waits for."""

    key: str
    steps: Procedure[R]
    look: Look


@dataclass(eq=False)
class Readers:
    """Drafter and target, with as many slots each."""

    drafter: Reader
    target: Reader
    slots: int
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._free = list(range(self.slots))

    @classmethod
    def open(
        cls,
        drafter: Path,
        target: Path,
        *,
        slots: int,
        context: int,
        threads: int | None = None,
        provider: str = "auto",
    ) -> Readers:
        """Load both; ``context`` is the longest text of either in tokens."""
        if slots < 1:
            raise UnsupportedError(f"There is at least one question at a time, not {slots}.")
        return cls(
            Reader(drafter, slots, context, threads, provider),
            Reader(target, slots, context, threads, provider),
            slots,
        )

    def run(
        self, procedures: Iterable[tuple[str, Callable[[], Procedure[R]]]]
    ) -> Iterator[tuple[str, R]]:
        """What each procedure returns, in the order in which they end."""
        waiting = deque(procedures)
        running: dict[int, _Running[R]] = {}
        while waiting or running:
            while waiting and self._free:
                key, begin = waiting.popleft()
                steps = begin()
                try:
                    running[self._free[0]] = _Running(key, steps, next(steps))
                except StopIteration as end:  # there was nothing to read
                    yield key, end.value
                    continue
                self._free.pop(0)
            # the drafter's looks first: what is behind them goes into one pass of the target
            drafting = {s: one.look for s, one in running.items() if one.look.model == DRAFTER}
            reader = self.drafter if drafting else self.target
            looks = drafting or {slot: one.look for slot, one in running.items()}
            for slot, seen in (reader.read(looks) if looks else {}).items():
                try:
                    running[slot].look = running[slot].steps.send(seen)
                except StopIteration as end:
                    self._free.append(slot)
                    yield running.pop(slot).key, end.value


def _agreeing(held: Ids, wanted: Ids) -> int:
    shorter = min(len(held), len(wanted))
    differing = np.flatnonzero(held[:shorter] != wanted[:shorter])
    return int(differing[0]) if len(differing) else shorter

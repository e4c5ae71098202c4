"""An edge daemon whose target is counted, and may be a replayed one; for benchmarks only.

    python _ahead_edge.py RECORDING|- BASE:SLOPE COUNTS edge serve …

The daemon is the product's. What it opens as its target is put into a `Counted` here, over the real
target ("-") or a `ReplayedTarget`, whose pass takes BASE seconds and SLOPE more for each row beyond
the first. COUNTS is a file of `WORDS` float64 that another process may read at any time.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _ahead_replayed import Pace, Recorded, load

from pilotfish import EdgeServer
from pilotfish.edge_runtime.steps import record_works
from pilotfish.edge_runtime.targets.target import Scores, Target, TargetOptions
from pilotfish.engines.contents import SlotContents
from pilotfish.engines.engine import Work
from pilotfish.engines.onnx_decoder import Output

WORDS = 3


class Counts(NamedTuple):
    """Of the passes that were not prompts: their number, their rows, and their seconds."""

    passes: float
    rows: float
    busy_s: float

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class BenchEdge(EdgeServer):
    """`EdgeServer` with a counted target; recording: what it replays, at this pace; else real."""

    def __init__(
        self, target: Path, *, counts: Path, recording: Path | None = None, pace: Pace, **info: Any
    ) -> None:
        super().__init__(target, **info)
        self._counts = np.memmap(counts, np.float64, "w+", shape=WORDS)
        entry = [str(Path(__file__)), str(recording or "-")]
        entry += [f"{pace.base_s}:{pace.slope_s}", str(counts)]
        assert self._command[1:3] == ["-m", "pilotfish"]
        self._command[1:3] = entry

    def counts(self) -> Counts:
        """So far."""
        return Counts(*map(float, self._counts))


class ReplayedTarget(Target):
    """Knows the texts: the next token of each has all of the probability."""

    def __init__(self, opening: TargetOptions, recording: Sequence[Recorded], pace: Pace) -> None:
        manifest = opening.artifact.manifest
        limits = opening.config.limits
        self._recording, self._pace = recording, pace
        self._vocab, self._hidden = manifest.vocab_size, manifest.dimensions.hidden
        self._end = manifest.eos_ids[0]
        self.recording_of: dict[int, int] = {}
        self._done: list[Scores] = []
        self.context = min(limits.context, manifest.dimensions.context)
        self.digest = manifest.digest
        self._contents = SlotContents(limits.sessions, self.context)

    def start(self, number: int, works: Sequence[Work]) -> None:
        """Sleep for as long as the pass takes."""
        begun_s = time.perf_counter()
        outputs = [self._answer(work) for work in works]
        # by positions, as a target's passes go; prompts are free: a device that has its answer
        # sooner asks sooner, and what that costs is not the cost of its hints
        positions = sum(
            len(work.tokens) - self.cached(work.slot, work.tokens, work.rows)
            for work in works
            if work.rows
        )
        record_works(works, self._contents)
        if positions:
            time.sleep(max(0.0, begun_s + self._pace.of(positions) - time.perf_counter()))
        self._done.append(Scores(number, outputs))

    def _answer(self, work: Work) -> Output:
        logits = np.zeros((work.rows, self._vocab), np.float32)
        if work.rows:
            first = len(work.tokens) - work.rows + 1  # tokens before the first row's answer
            text = self._text(work.slot, work.tokens[:first])
            for row in range(work.rows):
                known = text is not None and first + row < len(text)
                logits[row, text[first + row] if known else self._end] = 1e4
        return Output(logits, np.zeros((work.rows, self._hidden), np.float32))

    def _text(self, slot: int, tokens: Any) -> Any:
        """The text that goes on behind these tokens; None: no text does."""
        held = self._recording[self.recording_of.get(slot, 0)]
        if not held.holds(tokens):
            fits = [at for at, item in enumerate(self._recording) if item.holds(tokens)]
            if not fits:
                return None
            self.recording_of[slot] = fits[0]
            held = self._recording[fits[0]]
        return held.text

    def cached(self, slot: int, tokens: Any, rows: int) -> int:
        """Return the number of first tokens that the slot holds, as an engine would."""
        return self._contents.find(slot, tokens, rows).tokens

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        self._contents.clear(slot)

    def collect_scores(self) -> Sequence[Scores]:
        done, self._done = self._done, []
        return done


def counted(target: Target, counts: Any) -> Target:
    """The same target, whose passes are counted from now on."""
    start = target.start

    def started(number: int, works: Sequence[Work]) -> None:
        begun_s = time.perf_counter()
        start(number, works)
        rows = sum(work.rows for work in works)
        if rows:
            counts[:3] += 1.0, float(rows), time.perf_counter() - begun_s

    target.start = started  # counted from outside: the product has no such counter
    return target


def main() -> int:
    from pilotfish.cli import main as pilotfish
    from pilotfish.edge_runtime import edge_daemon as daemon

    recording, pace, counts, *words = sys.argv[1:]
    real = daemon.open_target
    shared = np.memmap(counts, np.float64, "r+", shape=WORDS)

    def opened(opening: TargetOptions) -> Target:
        if recording == "-":
            return counted(real(opening), shared)
        base_s, slope_s = map(float, pace.split(":"))
        replayed = ReplayedTarget(opening, load(Path(recording)), Pace(base_s, slope_s))
        return counted(replayed, shared)

    daemon.open_target = opened  # all else of the edge is the product's
    return pilotfish(words)


if __name__ == "__main__":
    sys.exit(main())

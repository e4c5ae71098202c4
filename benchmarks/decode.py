"""How long one pass takes: Pilotfish against onnxruntime-genai's graph and llama.cpp.

    python benchmarks/decode.py [--json PATH] [--quick] [--source SOURCE] [--work DIR]

One slot, S new tokens on a context of so many, logits of all S positions, for fp32 and int4
(llama.cpp: f32 and Q4_1). All engines take turns within each repetition, so that a noisy machine
is noisy for all. Peers are optional and skipped by name:

    onnxruntime-genai   pip install onnxruntime-genai onnx-ir torch transformers
    llama.cpp           pip install llama-cpp-python

Goal: at most 1.05 times the faster peer, for every precision, context and S.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _common import Goal, Rows, Steps, at_most, conclude, options
from _peers import GenAI, LlamaCpp, Step, Tokens

from pilotfish.engines.manifest import Precision
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.model import export_model
from pilotfish.export.sources import WeightSource, open_source
from tests.support.prefill import prefill

PRECISIONS: tuple[Precision, ...] = ("fp32", "int4")
CONTEXTS = (200, 1500)
WINDOWS = (1, 4, 8, 16)
GOAL = 1.05
SETTLE_S = 0.06  # onnxruntime's workers spin for 40 ms after a run, on everyone's cores
COLUMNS = ("precision", "context", "tokens", "engine", "p50_ms", "min_ms")


class Pilotfish:
    """The engine under test."""

    name = "pilotfish"

    def __init__(self, source: WeightSource, precision: Precision, work: Path) -> None:
        artifact = export_model(source, work / f"pilotfish-{precision}", precision=precision)
        self._decoder = Decoder(artifact)

    def prepare(self, context: int, tokens: Tokens) -> Step:
        decoder = self._decoder
        decoder.rollback(0, 0)
        prefill(decoder, 0, tokens[:context])

        def step(size: int) -> None:
            decoder.forward([Pass(slot=0, tokens=tokens[context : context + size])])
            decoder.rollback(0, context)

        return step


def load(precision: Precision, source: WeightSource, work: Path, steps: Steps) -> list[Any]:
    """Every engine that can be had; the others are named."""
    engines: list[Any] = []
    for kind in (Pilotfish, GenAI, LlamaCpp):
        steps.next(f"{precision}: loading {kind.name}")
        try:
            engines.append(kind(source, precision, work))
        except ImportError as error:
            print(f"{kind.name} skipped, for {error}: see --help", file=sys.stderr)
    return engines


def measure(
    engines: list[Any], precision: str, tokens: Tokens, repetitions: int, steps: Steps
) -> Rows:
    """One row per context, S and engine; in every repetition all engines have a turn."""
    rows: Rows = []
    for context in CONTEXTS:
        steps.next(f"{precision}: context {context}")
        prepared: list[Step] = [engine.prepare(context, tokens) for engine in engines]
        for size in WINDOWS:
            seconds: list[list[float]] = [[] for _ in engines]
            for _ in range(repetitions):
                for step, selection in zip(prepared, seconds, strict=True):
                    selection += turn(step, size)
            rows += [
                {
                    "precision": precision,
                    "context": context,
                    "tokens": size,
                    "engine": engine.name,
                    "p50_ms": median(selection) * 1e3,
                    "min_ms": min(selection) * 1e3,
                }
                for engine, selection in zip(engines, seconds, strict=True)
            ]
    return rows


def turn(step: Step, size: int) -> list[float]:
    """Seconds of three passes, after one that brings weights and threads back."""
    time.sleep(SETTLE_S)
    step(size)
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        step(size)
        taken.append(time.perf_counter() - begin)
    return taken


def judge(rows: Rows) -> list[Goal]:
    """One goal per precision, context and S: our median over the faster peer's."""
    cells: dict[str, dict[str, float]] = {}
    for row in rows:
        cell = f"{row['precision']}, context {row['context']}, S={row['tokens']}"
        cells.setdefault(cell, {})[row["engine"]] = row["p50_ms"]
    goals = []
    for cell, times in cells.items():
        ours = times.pop(Pilotfish.name)
        if times:
            goals.append(
                at_most(f"{cell}: time over the faster peer's", ours / min(times.values()), GOAL)
            )
    return goals


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--source", default="default", help="what `pilotfish export model` takes")
    parser.add_argument("--work", type=Path, help="keep the peers' files here for the next time")
    args = parser.parse_args()
    steps = Steps(len(PRECISIONS) * (3 + len(CONTEXTS)))
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        source = open_source(args.source)
        tokens = np.random.default_rng(0).integers(
            0, source.vocabulary.vocab_size, max(CONTEXTS) + 64
        )
        for precision in PRECISIONS:
            engines = load(precision, source, work, steps)
            rows += measure(engines, precision, tokens, 4 if args.quick else 15, steps)
    return conclude(args, "one pass", COLUMNS, rows, judge(rows))


if __name__ == "__main__":
    sys.exit(main())

"""A federated target: what top-K answers and their rebuilding cost (specfed's figures 2 and 3).

    python benchmarks/federated.py [--json PATH] [--out DIR] [--quick] [--draft DIR]
                                   [--workers DIR DIR … --weights W W …]

The workers run in this process. By default there are two federations: the default weights in fp32
and int8, weights ½ and ½; and these with a third worker that is truly another model, the same
weights cut to their first 27 layers, weights 0.4, 0.4 and 0.2. Each writes its own texts at each
temperature, sampled from its uncompressed average (§V-A). Over these, in windows of γ + 1 = 9
positions, each worker's logits are cut to the top K, encoded, decoded, rebuilt and averaged by the
code that serves, for K from 32 to the whole vocabulary.

"rho_m" is worker m's retained mass, "bias" ‖p̃_agg − p_agg‖₁ (9), "vary" |β̃ − β| with the drafter's
q (10); _5 renormalises, _6 spreads, _17 and _19 bound them. All are means over the positions, with
values in fp32. "fp16" and "levels" are the bytes of a worker's frame for a window with values in
these formats; "of_paper" and "of_full" are fp16's over the paper's K(16 + ⌈log₂V⌉) bits and over
full distributions of 16 bits. "ms" is what an edge computes for a window: decoding, average and
logits. JSON has these by format, and each worker's error (8) with (11) and (12). With --out the
figures are drawn (extra ``field``).

Goals: nothing at any position is beyond its bound, whatever K, temperature, reconstruction and
format, where a format may add what its codec states; with K = V in fp32 the average is that of the
uncompressed distributions bit by bit; spreading has no larger bias than renormalising; and at
K = 64 a worker uploads at most 0.5 % of full distributions.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from _common import PROMPTS, Goal, Rows, Steps, at_most, conclude, options
from _ensemble import Authors, Federation, Window

from pilotfish.cli.export import default_artifact
from pilotfish.lab.field.papers.specfed import upload_bits
from pilotfish.lab.field.papers.specfed_measured import draw
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.speculation.ensemble import (
    SCHEMES,
    Scheme,
    TopRows,
    acceptance_bound,
    acceptance_variation,
    aggregate,
    as_logits,
    bias_bound,
    rebuild,
    reconstruction_error,
    renormalised_error,
    spread_error_bound,
    top_rows,
)
from pilotfish.speculation.theory import Values, beta
from pilotfish.wire.codecs.topk import MAX_ERROR, TOPK_FORMATS, decode_topk, encode_topk

TEMPERATURES = (0.5, 1.0, 1.5)
SIZES = (32, 64, 128, 320, 640, 1280, 3200, 8192, 16384)  # and the vocabulary
QUICK_SIZES = (32, 64, 320, 3200)
POSITIONS = 9  # γ + 1
CUT_TO = 27  # of the third worker's 30 layers
ROUNDING = 2e-6  # in L1; float32's, over a vocabulary
NUMBER = {"renormalise": 5, "spread": 6}
COLUMNS = (
    *("workers", "T", "K", "rho_1", "rho_2", "rho_3", "bias_5", "bias_6", "bias_17"),
    *("vary_5", "vary_6", "vary_19", "fp16", "levels", "of_paper", "of_full", "ms"),
)


class Tally:
    """What was measured of one federation at one temperature and K."""

    def __init__(self, federation: Federation, temperature: float, top_k: int, vocab: int) -> None:
        self._federation, self._temperature = federation, temperature
        self._top_k, self._vocab = top_k, vocab
        self._weights = np.array(federation.weights) / sum(federation.weights)
        # by name, f64 [n] of each window
        self._results: dict[str, list[Values]] = defaultdict(list)
        self._bytes: dict[str, list[int]] = defaultdict(list)
        self._seconds: list[float] = []

    def take(self, window: Window) -> None:
        """Measure a window, with every format and reconstruction."""
        law = Sampling(temperature=self._temperature)
        # f64 [n, V]; exact, so that only what serves has float32's rounding
        exact = [probabilities(z.astype(np.float64), law) for z in window.workers]
        average = np.tensordot(self._weights, np.stack(exact), 1)
        q = probabilities(window.drafter.astype(np.float64), law)
        info = [top_rows(z, self._temperature, self._top_k) for z in window.workers]
        # [M, n]; rounding may have it above 1
        self._bound(np.minimum([rows.retained_mass for rows in info], 1.0))
        self._note("beta", beta(average, q))
        for form in TOPK_FORMATS:
            frames = [encode_topk(rows, self._vocab, form) for rows in info]
            if len(window) == POSITIONS:
                self._bytes[form] += map(len, frames)
            for scheme in SCHEMES:
                answers, merged = self._serve(frames, len(window), scheme)
                self._note(name_of("bias", scheme, form), reconstruction_error(merged, average))
                varied = acceptance_variation(merged, average, q)
                self._note(name_of("vary", scheme, form), varied)
                for index, (rows, p) in enumerate(zip(answers, exact, strict=True), start=1):
                    error = reconstruction_error(rebuild(rows, self._vocab, scheme), p)
                    self._note(name_of(f"error_{index}", scheme, form), error)
                if form == "fp32" and self._top_k == self._vocab:
                    unlike = (merged != uncompressed(self._weights, info)).any(axis=1)
                    self._note("inexact", unlike.astype(np.float64))

    def _bound(self, retained: Values) -> None:
        """Note ρ [M, n] and the bounds that follow from it."""
        self._note("bias_17", bias_bound(self._weights, retained))
        self._note("vary_19", acceptance_bound(self._weights, retained))
        for index, rho in enumerate(retained, start=1):
            self._note(f"rho_{index}", rho)
            self._note(f"error_{index}_11", renormalised_error(rho))
            self._note(f"error_{index}_12", spread_error_bound(rho, self._vocab - self._top_k))

    def _note(self, name: str, values: Values) -> None:
        self._results[name].append(values)

    def _serve(
        self, frames: Sequence[bytes], rows: int, scheme: Scheme
    ) -> tuple[list[TopRows], Floats]:
        """What an edge makes of the workers' frames: their answers, and the average, [n, V]."""
        begun = time.perf_counter()
        answers = [decode_topk(frame, rows, self._top_k, self._vocab) for frame in frames]
        merged = aggregate(self._weights, answers, self._vocab, scheme)
        as_logits(merged, self._temperature)
        if rows == POSITIONS:
            self._seconds.append(time.perf_counter() - begun)
        return answers, merged

    def row(self) -> dict[str, Any]:
        """The means over all positions, and how many of the figures are beyond their bounds."""
        figures = {name: np.concatenate(parts) for name, parts in self._results.items()}
        sizes = {form: round(float(np.mean(result))) for form, result in self._bytes.items()}
        window = partial(upload_bits, POSITIONS, vocabulary=self._vocab, probability_bits=16)
        paper, full = window(top_k=self._top_k) / 8.0, window(top_k=self._vocab) / 8.0
        return {
            "who": self._federation.name,
            "workers": len(self._weights),
            "T": self._temperature,
            "K": self._top_k,
            "positions": len(figures["beta"]),
            **{name: float(values.mean()) for name, values in figures.items()},
            **sizes,
            "paper": paper,
            "full": full,
            "of_paper": sizes["fp16"] / paper,
            "of_full": sizes["fp16"] / full,
            "ms": float(np.median(self._seconds)) * 1e3,
            "beyond": sum(beyond(figures, form) for form in TOPK_FORMATS),
        }


def name_of(what: str, scheme: Scheme, form: str) -> str:
    """The name of a figure; that of fp32 has no format behind it."""
    return f"{what}_{NUMBER[scheme]}" + ("" if form == "fp32" else f"_{form}")


def beyond(figures: dict[str, Values], form: str) -> int:
    """How many figures of a format are above their bounds, its own error added to these."""
    # in L1; a distribution that is off by so much in total variation moves acceptance by half
    slack = 2.0 * MAX_ERROR[form] + ROUNDING
    count = 0
    for scheme in SCHEMES:
        limits = {"bias": figures["bias_17"] + slack, "vary": figures["vary_19"] + slack / 2.0}
        for name in figures:
            if name.startswith("rho_"):
                worker = name.removeprefix("rho_")
                local = figures[f"error_{worker}_{11 if scheme == 'renormalise' else 12}"]
                limits[f"error_{worker}"] = local + slack
        count += sum(
            int((figures[name_of(what, scheme, form)] > limit).sum())
            for what, limit in limits.items()
        )
    return count


def uncompressed(weights: Values, message: Sequence[TopRows]) -> Floats:
    """Σ w_m p_m of answers that keep all tokens, in float32, one worker after the other; [n, V]."""
    total = np.zeros_like(message[0].values)
    for weight, rows in zip(weights, message, strict=True):
        total += np.float32(weight) * rows.values
    return total


def measure(
    federation: Federation, drafter: Path, prompts: Sequence[str], quick: bool, steps: Steps
) -> Rows:
    """A row for each temperature and K."""
    authors = Authors(federation, drafter)
    selection = [size for size in (QUICK_SIZES if quick else SIZES) if size < authors.vocab]
    rows: Rows = []
    for temperature in TEMPERATURES:
        tallies = [
            Tally(federation, temperature, size, authors.vocab)
            for size in (*selection, authors.vocab)
        ]
        for seed, prompt in enumerate(prompts):
            steps.next(f"{federation.name}, temperature {temperature}: an answer")
            most = 36 if quick else 99
            for window in authors.write(prompt, temperature, seed, most=most, positions=POSITIONS):
                for metrics in tallies:
                    metrics.take(window)
        rows += [metrics.row() for metrics in tallies]
    return rows


def judge(rows: Rows) -> list[Goal]:
    """The goals."""
    inexact = sum(row.get("inexact", 0.0) * row["positions"] for row in rows)
    more = max(row["bias_6"] - row["bias_5"] for row in rows)
    return [
        at_most("figures beyond their bounds", sum(row["beyond"] for row in rows), 0),
        at_most("positions where K = V is not the uncompressed average", inexact, 0),
        at_most("bias by spreading above that by renormalising", more, ROUNDING),
        at_most(
            "K = 64, fp16: bytes over full distributions",
            max((row["of_full"] for row in rows if row["K"] == 64), default=0.0),
            0.005,
        ),
    ]


def federations(args: argparse.Namespace) -> list[Federation]:
    """Those of the command line, or the default ones."""
    if args.workers:
        weights = args.weights or [1.0] * len(args.workers)
        return [Federation(" + ".join(path.name for path in args.workers), args.workers, weights)]
    pair = [default_artifact("fp32"), default_artifact("int8")]
    third = default_artifact("int8", CUT_TO)
    return [
        Federation("fp32, int8", pair, [0.5, 0.5]),
        Federation(f"fp32, int8, {CUT_TO} layers", [*pair, third], [0.4, 0.4, 0.2]),
    ]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--draft", type=Path, metavar="DIR", help="the drafter's artifact")
    parser.add_argument("--workers", type=Path, nargs="+", metavar="DIR", help="the workers'")
    parser.add_argument("--weights", type=float, nargs="+", metavar="W", help="theirs")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to draw figures 2 and 3")
    args = parser.parse_args()
    if args.weights and len(args.weights) != len(args.workers or []):
        parser.error("--weights wants one for each of --workers")
    if args.out and find_spec("matplotlib") is None:
        parser.error("drawing needs matplotlib: pip install 'pilotfish[field]'.")
    prompts = PROMPTS[:2] if args.quick else PROMPTS
    wanted = federations(args)
    drafter = args.draft or default_artifact("int4")
    steps = Steps(len(wanted) * len(TEMPERATURES) * len(prompts))
    rows = [row for each in wanted for row in measure(each, drafter, prompts, args.quick, steps)]
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for each in wanted:
            draw([row for row in rows if row["who"] == each.name], args.out)
    title = f"federated targets, windows of {POSITIONS}"
    return conclude(args, title, COLUMNS, rows, judge(rows))


if __name__ == "__main__":
    sys.exit(main())

"""Payloads and bounds of specfed, for two workers with Zipf distributions.

This module computes both reconstructions for distributions that we chose, and compares them with
the bounds, which hold for all distributions. The paper's figures 2 and 3 come from real models;
`field.papers.specfed_runs` measures them for ours.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.lab.field.papers.paper import Paper
from pilotfish.lab.field.papers.sheet import Constant, Sheet, Value
from pilotfish.lab.field.papers.specfed import (
    eq_1_aggregate,
    eq_4_retained,
    eq_5_renormalised,
    eq_6_spread,
    eq_8_error,
    eq_10_acceptance_variation,
    eq_11_renormalised_error,
    eq_12_spread_error_bound,
    eq_17_bias_bound,
    eq_19_acceptance_bound,
    upload_bits,
)
from pilotfish.lab.field.papers.specfed_runs import FIGURE2, FIGURE3
from pilotfish.speculation.latency import transfer_s
from pilotfish.speculation.theory import Values, beta
from pilotfish.speculation.truncation import largest

VOCABULARY = 32000
PROBABILITY_BITS = 16
# The constants from here on are our choice.
LENGTH = 8
WEIGHTS = np.array([0.5, 0.5])
KEPT = (32, 64, 128, 320, 640, 1280, 3200, 32000)
RATES_MBPS = (10, 50, 100)

_CONSTANTS = (
    Constant("|V|", VOCABULARY, "tokens", "paper", "LLaMA's vocabulary; §I: 32K or more"),
    Constant("b_prob", PROBABILITY_BITS, "bit", "paper", "§I: FP16"),
    Constant("workers", len(WEIGHTS), "", "paper", "§V-A"),
    Constant("weights", "0.5, 0.5", "", "ours", "missing in the text of the paper"),
    Constant("L", LENGTH, "tokens", "ours", "not printed; a window has L + 1 positions"),
    Constant(
        "workers' p", "Zipf 1.4, 1.3", "", "ours", "the second worker's ranks are mixed by a sine"
    ),
    Constant("drafter's q", "Zipf 1.2", "", "ours", "ranks mixed by another sine"),
)
_REMARKS = (
    "Renormalising has an L1 error of exactly 2(1 − ρ) for every distribution. Spreading has a "
    "smaller error, but may change the acceptance more. (19) bounds the change for both.",
    "With a 15-bit id for each 16-bit probability, truncation saves bits only below "
    f"K = {VOCABULARY * PROBABILITY_BITS // (PROBABILITY_BITS + 15):,}.",
    "The bonus position is averaged, too, so a worker uploads L + 1 distributions, not L.",
    "Figures 2 and 3 can be measured (`--run`), with other models than the paper's, which are "
    "not part of Pilotfish. The paper's figures have no numbers in our copy.",
)


def zipf(exponent: float, wobble: float) -> Values:
    """Compute a distribution by Zipf's law, with ranks mixed by a sine, f64 [V].

    p ∝ (id + 1)^−exponent · e^{sin(wobble·id)}.
    """
    ids = np.arange(VOCABULARY, dtype=np.float64)
    weights: Values = np.power(ids + 1.0, -exponent) * np.exp(np.sin(wobble * ids))
    normalised: Values = weights / weights.sum()
    return normalised


def workers() -> Values:
    """Compute the distributions of both workers, [2, V]."""
    return np.stack([zipf(1.4, 0.0), zipf(1.3, 1.0)])


def drafter() -> Values:
    """Compute the drafter's distribution, [V]."""
    return zipf(1.2, 2.0)


def payloads() -> Sheet:
    """Tabulate the bytes and the upload time of a worker's window, for each K."""
    full = upload_bits(LENGTH + 1, VOCABULARY, VOCABULARY, PROBABILITY_BITS) / 8.0
    rows: list[dict[str, Value]] = []
    for top_k in KEPT:
        size = upload_bits(LENGTH + 1, top_k, VOCABULARY, PROBABILITY_BITS) / 8.0
        times = {f"uplink_{m}mbps_ms": transfer_s(size, m * 1e6) * 1e3 for m in RATES_MBPS}
        rows.append({"kept": top_k, "upload_bytes": size, "share": size / full, **times})
    columns: dict[str, tuple[str, int | None]] = {
        "kept": ("K", 0),
        "upload_bytes": ("bytes", 0),
        "share": ("of full", 4),
        **{f"uplink_{mbps}mbps_ms": (f"ms at {mbps} Mbit/s", 1) for mbps in RATES_MBPS},
    }
    return Sheet("payloads", "Upload of a worker per window", columns, rows)


def _rebuild(p: Values, top_ids: list[NDArray[np.integer]], scheme: str) -> Values:
    rebuild = eq_5_renormalised if scheme == "renormalised" else eq_6_spread
    return np.stack([rebuild(*worker) for worker in zip(p, top_ids, strict=True)])


def distortion(top_k: int) -> dict[str, Value]:
    """Compute the errors of both reconstructions with K = ``top_k``, and their bounds."""
    p, q = workers(), drafter()
    top_ids = [largest(worker, top_k) for worker in p]
    retained = np.array([eq_4_retained(*worker) for worker in zip(p, top_ids, strict=True)])
    aggregate = eq_1_aggregate(WEIGHTS, p)
    row: dict[str, Value] = {"kept": top_k, "retained_1": retained[0], "retained_2": retained[1]}
    for scheme in ("renormalised", "spread"):
        rebuilt = _rebuild(p, top_ids, scheme)
        merged = eq_1_aggregate(WEIGHTS, rebuilt)
        row[f"local_error_1_{scheme}"] = eq_8_error(rebuilt[0], p[0])
        row[f"bias_{scheme}"] = eq_8_error(merged, aggregate)
        row[f"acceptance_{scheme}"] = float(beta(merged, q))
        row[f"acceptance_variation_{scheme}"] = eq_10_acceptance_variation(merged, aggregate, q)
    others = VOCABULARY - top_k
    row["local_error_1_spread_bound"] = eq_12_spread_error_bound(float(retained[0]), others)
    row["acceptance_full"] = float(beta(aggregate, q))
    row["bias_bound"] = eq_17_bias_bound(WEIGHTS, retained)
    row["acceptance_bound"] = eq_19_acceptance_bound(WEIGHTS, retained)
    return row


def distortions() -> Sheet:
    """Tabulate the result of `distortion` for each K."""
    columns: dict[str, tuple[str, int | None]] = {
        "kept": ("K", 0),
        "retained_1": ("ρ₁", 3),
        "retained_2": ("ρ₂", 3),
        "bias_renormalised": ("bias (5)", 4),
        "bias_spread": ("bias (6)", 4),
        "bias_bound": ("bound (17)", 4),
        "acceptance_variation_renormalised": ("Δβ (5)", 4),
        "acceptance_variation_spread": ("Δβ (6)", 4),
        "acceptance_bound": ("bound (19)", 4),
    }
    title = "Two Zipf workers (ours): bias in L1 and change of acceptance"
    return Sheet("distortions", title, columns, [distortion(top_k) for top_k in KEPT])


def bounds() -> Sheet:
    """Tabulate the bounds, for some retained masses ρ and some weights of the first worker."""
    rows: list[dict[str, Value]] = []
    for retained in ((0.8, 0.8), (0.9, 0.9), (0.9, 0.98), (0.95, 0.95), (0.99, 0.99)):
        for first in (0.5, 0.8):
            weights = np.array([first, 1.0 - first])
            rows.append(
                {
                    "retained_1": retained[0],
                    "retained_2": retained[1],
                    "weight_1": first,
                    "local_error_1": eq_11_renormalised_error(retained[0]),
                    "bias_bound": eq_17_bias_bound(weights, np.array(retained)),
                    "acceptance_bound": eq_19_acceptance_bound(weights, np.array(retained)),
                }
            )
    columns: dict[str, tuple[str, int | None]] = {
        "retained_1": ("ρ₁", 2),
        "retained_2": ("ρ₂", 2),
        "weight_1": ("w₁", 1),
        "local_error_1": ("2(1 − ρ₁)", 3),
        "bias_bound": ("bias ≤ (17)", 3),
        "acceptance_bound": ("Δβ ≤ (19)", 3),
    }
    return Sheet("bounds", "Bounds by Lemma 1 and Theorems 2 and 3", columns, rows)


def draw(folder: Path) -> list[Path]:
    """Draw uplink time and computed error against K; return the files' paths."""
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    time_path, bias_path = folder / "specfed_uplink.png", folder / "specfed_bias.png"
    title = f"Upload of a worker, L = {LENGTH}\nclosed form; the last point is the full vocabulary"
    with plot(time_path, title, "kept tokens K", "uplink time of a window (ms)") as axes:
        for mbps, colour, marker in zip(RATES_MBPS, PALETTE, MARKERS, strict=False):
            sizes = [upload_bits(LENGTH + 1, k, VOCABULARY, PROBABILITY_BITS) / 8.0 for k in KEPT]
            times = [transfer_s(size, mbps * 1e6) * 1e3 for size in sizes]
            axes.plot(KEPT, times, marker=marker, color=colour, label=f"{mbps} Mbit/s")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([32, 320, 3200, 32000], ["32", "320", "3200", "32000"])
        axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axes.legend()
    rows = [distortion(top_k) for top_k in KEPT[:-1]]
    title = "Bias of the aggregate\nclosed form, two Zipf workers (ours)"
    lines = {"bias_bound": "bound (17)", "bias_renormalised": "renormalised (5)"}
    lines["bias_spread"] = "spread (6)"
    with plot(bias_path, title, "kept tokens K", "‖p̃ − p‖₁ (probability mass)") as axes:
        for (key, label), colour, marker in zip(lines.items(), PALETTE, MARKERS, strict=False):
            values = [float(str(row[key])) for row in rows]
            axes.plot(KEPT[:-1], values, marker=marker, color=colour, label=label)
        axes.set_xscale("log")
        axes.set_xticks([32, 320, 3200], ["32", "320", "3200"])
        axes.set_ylim(bottom=0)
        axes.legend()
    return [time_path, bias_path]


PAPER = Paper(
    title="SpecFed: Federated Inference with Speculative Decoding and Compressed Transmission",
    constants=_CONSTANTS,
    sheets=lambda: [payloads(), distortions(), bounds()],
    remarks=_REMARKS,
    draw=draw,
    measurable=(FIGURE2, FIGURE3),
)

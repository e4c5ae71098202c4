"""Figures 5 and 6 of tslt and its two misprints as tables, computed with `field.papers.tslt`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pilotfish.lab.field.papers.paper import Paper
from pilotfish.lab.field.papers.sheet import Constant, Sheet, Value
from pilotfish.lab.field.papers.tslt import (
    break_even_bps,
    eq_3_distribution_bits,
    eq_4_communication_s,
    eq_5_oracle_s,
    eq_9_as_printed,
    eq_9_throughput,
    eq_10_speed_up,
    eq_27_distributions,
    eq_28_as_printed,
    eq_41_total_s,
    speed_up,
)
from pilotfish.lab.field.papers.tslt_acceptance import FIGURE3, FIGURE4
from pilotfish.lab.field.papers.tslt_speed_up import FIGURE5, FIGURE6
from pilotfish.speculation.theory import theta, tokens_per_round

VOCABULARY = 32000
PROBABILITY_BITS = 16
KEPT = (32000, 3200, 320, 32)
EXPANSION = (2, 2, 2)
LEVELS = len(EXPANSION)
# The constants from here on are our choice.
ALPHA = {32000: 0.60, 3200: 0.60, 320: 0.58, 32: 0.45}
SECOND = 0.5
DRAFT_S = 0.002
VERIFY_S = 0.025
RATES_MBPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
TOKENS = 128


@dataclass(frozen=True)
class _Candidates:
    """One of the paper's two settings: a chain or a tree of candidates."""

    figure: str
    name: str
    distributions: int

    def alpha(self, top_k: int) -> float:
        first = ALPHA[top_k]
        return first if self.name == "SC" else float(theta(np.array([first, SECOND * first])))

    def speed_up(self, top_k: int, rate_bps: float) -> float:
        bits = _bits(top_k)
        return speed_up(
            self.alpha(top_k), LEVELS, self.distributions, bits, rate_bps, DRAFT_S, VERIFY_S
        )


SINGLE = _Candidates("figure5", "SC", LEVELS)
MULTIPLE = _Candidates("figure6", "MC", eq_27_distributions(EXPANSION))

_CONSTANTS = (
    Constant("|V|", VOCABULARY, "tokens", "paper", "§5: 32K"),
    Constant(
        "b_prob",
        PROBABILITY_BITS,
        "bit",
        "paper",
        "§5: FP16; gives D_V = 0.512 Mbit, printed as 0.5",
    ),
    Constant(
        "b_idx",
        math.ceil(math.log2(VOCABULARY)),
        "bit",
        "paper",
        "⌈log₂|V|⌉; sent only if truncated",
    ),
    Constant("K", "32000, 3200, 320, 32", "tokens", "paper", "§5.1–5.3"),
    Constant("expansion, MC", "2,2,2", "", "paper", "§5; a tree of depth 3"),
    Constant("L, SC", LEVELS, "tokens", "ours", "not printed; equals the tree's depth"),
    Constant(
        "α(K)",
        "0.60, 0.60, 0.58, 0.45",
        "",
        "ours",
        "figure 4 prints no numbers; §5.2 describes it",
    ),
    Constant(
        "α⁽²⁾/α⁽¹⁾",
        SECOND,
        "",
        "ours",
        "second candidate relative to the first; gives MC's α by (40)",
    ),
    Constant("T_SLM", DRAFT_S * 1e3, "ms", "ours", "a 68M model on an A800; not printed"),
    Constant("T_LLM", VERIFY_S * 1e3, "ms", "ours", "a 7B model on an A800; not printed"),
    Constant("tokens", TOKENS, "tokens", "ours", "tokens of an answer in (41)"),
)
_REMARKS = (
    "(9) as printed leaves T_LLM outside the factor (1 − α); N/T is correct. With free "
    "communication and drafting, the printed form gives Θ = (1 − α^{L+1})/T_LLM, less than the "
    "target alone.",
    "(28) as printed uses N = Lα + 1, and 1 in place of 1/N. So it cannot exceed 1, although "
    "figures 5 and 6 show speed-ups.",
    "(3) counts an index for every probability, but D_V = 0.5 Mbit counts none. Here the full "
    "vocabulary needs no indices. A truncated distribution has an index of 15 bits per token, "
    "in total K·31 bits.",
    "(41) calls the number of oracle calls N_oracle, but in (8) N_oracle is the number of "
    "tokens of one call.",
    "§1 says 500 KB per token for 32K entries in FP16; the correct size is 64 kB, or 0.5 Mbit "
    "as in §5.",
    "§5.3, by the latency model: as the paper says, truncation gains most on slow uplinks, and "
    "K = 32 falls behind at high rates. MC is not always faster than SC: ⟨2,2,2⟩ uploads 7 "
    "distributions, a chain only 3, so MC is slower where uploads take long.",
)


def _bits(top_k: int) -> float:
    return eq_3_distribution_bits(top_k, VOCABULARY, PROBABILITY_BITS)


def figure(candidates: _Candidates) -> Sheet:
    """Tabulate the speed-up against the uplink rate, with a column for each K."""
    rows: list[dict[str, Value]] = [
        {
            "uplink_mbps": mbps,
            **{f"speed_up_k{top_k}": candidates.speed_up(top_k, mbps * 1e6) for top_k in KEPT},
        }
        for mbps in RATES_MBPS
    ]
    columns: dict[str, tuple[str, int | None]] = {
        "uplink_mbps": ("uplink, Mbit/s", 0),
        **{f"speed_up_k{top_k}": (f"K = {top_k}", 2) for top_k in KEPT},
    }
    number, name = candidates.figure[-1], candidates.name
    title = f"Figure {number}: speed-up of {name}-DSD against uplink rate"
    return Sheet(candidates.figure, title, columns, rows)


def payloads() -> Sheet:
    """Tabulate for each K a round's upload, its tokens, and the break-even uplink rate."""
    rows: list[dict[str, Value]] = []
    for candidates in (SINGLE, MULTIPLE):
        for top_k in KEPT:
            alpha, bits, count = candidates.alpha(top_k), _bits(top_k), candidates.distributions
            even_bps = break_even_bps(alpha, LEVELS, count, bits, DRAFT_S, VERIFY_S)
            rows.append(
                {
                    "candidates": candidates.name,
                    "kept": top_k,
                    "distribution_bits": bits,
                    "distributions": count,
                    "alpha": alpha,
                    "tokens_per_round": tokens_per_round(alpha, LEVELS),
                    "upload_bytes": count * bits / 8.0,
                    "break_even_mbps": even_bps / 1e6 if math.isfinite(even_bps) else None,
                }
            )
    columns: dict[str, tuple[str, int | None]] = {
        "candidates": ("", None),
        "kept": ("K", 0),
        "distribution_bits": ("D_V, bit", 0),
        "distributions": ("a round", 0),
        "alpha": ("α (ours)", 3),
        "tokens_per_round": ("N (8)", 2),
        "upload_bytes": ("up, bytes", 0),
        "break_even_mbps": ("pays from, Mbit/s", 2),
    }
    return Sheet("payloads", "A round: (2), (3), (8), (27)", columns, rows)


def totals() -> Sheet:
    """Tabulate equation 41: an answer's seconds of computing and of communicating, by rate."""
    rows: list[dict[str, Value]] = []
    for candidates in (SINGLE, MULTIPLE):
        for top_k in KEPT:
            rounds = TOKENS / tokens_per_round(candidates.alpha(top_k), LEVELS)
            compute_s = rounds * eq_5_oracle_s(LEVELS, DRAFT_S, 0.0, VERIFY_S)
            row: dict[str, Value] = {
                "candidates": candidates.name,
                "kept": top_k,
                "rounds": rounds,
                "compute_s": compute_s,
            }
            for mbps in (1, 10, 100):
                communication_s = eq_4_communication_s(
                    candidates.distributions, _bits(top_k), mbps * 1e6
                )
                row[f"total_{mbps}mbps_s"] = eq_41_total_s(compute_s, rounds, communication_s)
            rows.append(row)
    columns: dict[str, tuple[str, int | None]] = {
        "candidates": ("", None),
        "kept": ("K", 0),
        "rounds": ("rounds", 1),
        "compute_s": ("T_comp, s", 2),
        "total_1mbps_s": ("at 1 Mbit/s, s", 2),
        "total_10mbps_s": ("10 Mbit/s", 2),
        "total_100mbps_s": ("100 Mbit/s", 2),
    }
    return Sheet("totals", f"Seconds for {TOKENS} tokens (41)", columns, rows)


def misprints(rates_mbps: Sequence[int] = (1, 10, 100, 1000)) -> Sheet:
    """Compare the speed-ups by equations 9 and 28, as printed, with the correct one; K = 320."""
    rows: list[dict[str, Value]] = []
    for candidates in (SINGLE, MULTIPLE):
        alpha, bits = candidates.alpha(320), _bits(320)
        for mbps in rates_mbps:
            up_s = eq_4_communication_s(candidates.distributions, bits, mbps * 1e6)
            oracle_s = eq_5_oracle_s(LEVELS, DRAFT_S, up_s, VERIFY_S)
            printed_9 = eq_9_as_printed(alpha, LEVELS, DRAFT_S, up_s, VERIFY_S)
            corrected = eq_9_throughput(alpha, LEVELS, oracle_s)
            rows.append(
                {
                    "candidates": candidates.name,
                    "uplink_mbps": mbps,
                    "speed_up": eq_10_speed_up(corrected, VERIFY_S),
                    "eq_9_as_printed": eq_10_speed_up(printed_9, VERIFY_S),
                    "eq_28_as_printed": eq_28_as_printed(alpha, LEVELS, DRAFT_S, up_s, VERIFY_S),
                }
            )
    columns: dict[str, tuple[str, int | None]] = {
        "candidates": ("", None),
        "uplink_mbps": ("uplink, Mbit/s", 0),
        "speed_up": ("N/T", 3),
        "eq_9_as_printed": ("(9) as printed", 3),
        "eq_28_as_printed": ("(28) as printed", 3),
    }
    return Sheet("misprints", "Speed-up for K = 320: N/T and the printed forms", columns, rows)


def draw(folder: Path) -> list[Path]:
    """Draw figures 5 and 6; return the files' paths."""
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    paths = []
    for candidates in (SINGLE, MULTIPLE):
        path = folder / f"tslt_{candidates.figure}.png"
        shape = f"L = {LEVELS}" if candidates is SINGLE else "⟨2,2,2⟩"
        title = f"Speed-up of {candidates.name}-DSD, {shape}\nclosed form; α and T are ours"
        with plot(
            path, title, "uplink rate (Mbit/s)", "speed-up over the target alone (×)"
        ) as axes:
            for top_k, colour, marker in zip(KEPT, PALETTE, MARKERS, strict=False):
                values = [candidates.speed_up(top_k, mbps * 1e6) for mbps in RATES_MBPS]
                axes.plot(RATES_MBPS, values, marker=marker, color=colour, label=f"K = {top_k}")
            axes.axhline(1.0, color="#888888", linewidth=0.8)
            axes.set_xscale("log")
            axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
            axes.set_ylim(bottom=0)
            axes.legend()
        paths.append(path)
    return paths


PAPER = Paper(
    title="TSLT: Fast Collaborative Inference via Distributed Speculative Decoding",
    constants=_CONSTANTS,
    sheets=lambda: [figure(SINGLE), figure(MULTIPLE), payloads(), totals(), misprints()],
    remarks=_REMARKS,
    draw=draw,
    measurable=(FIGURE3, FIGURE4, FIGURE5, FIGURE6),
)

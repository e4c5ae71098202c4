"""Table I and figure 4 of wisv: the printed numbers, and the model of `field.papers.wisv`."""

import math
from pathlib import Path

from pilotfish.lab.field.papers.paper import Paper
from pilotfish.lab.field.papers.sheet import Constant, Sheet, Value
from pilotfish.lab.field.papers.wisv import (
    DecoderDimensions,
    MessageBits,
    eq_3_hidden_bits,
    eq_4_feedback_bits,
    eq_5_full_upload_bits,
    eq_6_exchange_s,
    eq_7_first_upload_bits,
    eq_10_selective_s,
    eq_11_compute_s,
    eq_12_draft_flops,
    eq_15_verify_flops,
    eq_17_head_flops,
    eq_18_round_s,
    eq_20_accepted_length,
    eq_22_latency_s,
)
from pilotfish.lab.field.papers.wisv_accuracy import FIGURE3
from pilotfish.lab.field.papers.wisv_printed import (
    CELLS,
    RATES_MBPS,
    SETTINGS,
    TABLE1_RTT_MS,
    WINDOWS,
)
from pilotfish.lab.field.papers.wisv_runs import FIGURE4, FIGURE5, FIGURE7, TABLE1
from pilotfish.speculation.latency import Link
from pilotfish.speculation.theory import tokens_per_round

FIGURE4_METHODS = ("greedy", "reject", "fh", "sh")
DRAFTER = DecoderDimensions(
    layers=16, hidden=2048, feed_forward=8192, vocabulary=128256, heads=32, key_heads=8
)
TARGET = DecoderDimensions(
    layers=32, hidden=4096, feed_forward=14336, vocabulary=128256, heads=32, key_heads=8
)
PROBABILITY_BITS = 16
SIZES = MessageBits(
    token=math.ceil(math.log2(DRAFTER.vocabulary)),
    position=8,
    hidden=eq_3_hidden_bits(DRAFTER.hidden, 16),
)
# The constants from here on are our choice.
CONTEXT = 256
DEVICE_PEAK = 42.5e12
EDGE_PEAK = 149.7e12
EDGE_UTILISATION = 0.4
DEVICE_UTILISATION = 0.003167
HEAD_WIDTH = 64

_CONSTANTS = (
    Constant(
        "drafter, target",
        "Llama-3.2-1B, Llama-3.1-8B",
        "",
        "paper",
        "§VI; dimensions from the model cards",
    ),
    Constant("b_h", 16, "bit", "paper", "§IV-A, FP16"),
    Constant("RTT", TABLE1_RTT_MS, "ms", "paper", "Table I"),
    Constant("b_tok", SIZES.token, "bit", "paper", "⌈log₂ 128,256⌉"),
    Constant("b_pos", SIZES.position, "bit", "ours", "not printed"),
    Constant("O_up, O_down, PER", 0, "", "ours", "not printed"),
    Constant(
        "b_prob",
        PROBABILITY_BITS,
        "bit",
        "ours",
        "of 32 and 16, the value that Table I's reject implies",
    ),
    Constant("R_down", "R_up", "", "ours", "not printed"),
    Constant(
        "context", CONTEXT, "tokens", "ours", "mean prefix: the prompt and half of the 211 tokens"
    ),
    Constant("peak, device", DEVICE_PEAK / 1e12, "TFLOP/s", "ours", "AGX Orin, FP16 dense"),
    Constant("peak, edge", EDGE_PEAK / 1e12, "TFLOP/s", "ours", "A40, FP16 dense"),
    Constant("η, edge", EDGE_UTILISATION, "", "ours", "assumed; gives 0.25 ms per token"),
    Constant(
        "η, device",
        DEVICE_UTILISATION,
        "",
        "ours",
        "the only fitted value: to greedy at 500 Mbit/s",
    ),
    Constant("m", "L(1 − α)", "", "ours", "with the α for which (8) of tslt gives greedy's AAL"),
    Constant(
        "head width",
        HEAD_WIDTH,
        "",
        "ours",
        "not in the paper; the time of this step is negligible",
    ),
)
_REMARKS = (
    "Table I, AAL: throughput × latency / rounds gives every cell within 0.04 %, so AAL "
    "includes the correction.",
    "Table I, latency: with one fitted constant, the model is within 0.3 % of 26 of the 30 "
    "cells. In the other cells, WISV at 20 Mbit/s and L = 10, 24, 32, 64, it is off by +1.6, "
    "−1.9, −3.2 and −5.2 %. A round of greedy takes L·18.9 ms + RTT, without a constant time "
    "per pass, although real hardware reads the target's weights once per pass.",
    "η of the device is 0.3 %, because drafting is bound by memory, not by FLOPs; (11) can "
    "express this only by η.",
    "§VI-B calls latency non-monotonic in L, but in Table I it rises from the first window on.",
    "§VI-B says that SH is slightly slower than greedy at RTT 50 ms; with our m, SH is faster, "
    "by up to a third at L = 64. As the paper says, SH is faster than FH at 20 Mbit/s and 5 "
    "ms, and slower at 500 Mbit/s and 50 ms.",
    "§VII-B's single threshold, 10 ms, fits few cases: FH and SH take equally long at an RTT "
    "that falls with the rate and rises with L.",
)


def acceptance(aal: float, window: int) -> float:
    """Find the α with which a round commits ``aal`` tokens (tslt, equation 8), by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_round(middle, window) < aal else (low, middle)
    return low


def mismatches(window: int, mbps: int) -> tuple[float, float]:
    """Compute the expected number of mismatches in a window, and the probability of at least one.

    A mismatch is a draft that differs from the target's argmax.
    """
    alpha = acceptance(CELLS[window, "greedy", mbps].aal, window)
    return window * (1.0 - alpha), 1.0 - alpha**window


def communication_s(method: str, window: int, mbps: int, rtt_ms: float) -> float:
    """Compute T_comm of a round. method: greedy, reject, fh or sh."""
    link = Link(rtt_s=rtt_ms / 1e3, up_bps=mbps * 1e6, down_bps=mbps * 1e6)
    ids, feedback = eq_7_first_upload_bits(window, SIZES), eq_4_feedback_bits(SIZES)
    if method == "greedy":
        return eq_6_exchange_s(ids, feedback, link)
    if method == "reject":
        full = window * DRAFTER.vocabulary * PROBABILITY_BITS
        return eq_6_exchange_s(ids + full, feedback, link)
    if method == "fh":
        return eq_6_exchange_s(eq_5_full_upload_bits(window, SIZES), feedback, link)
    positions, any_mismatch = mismatches(window, mbps)
    without_request = eq_10_selective_s(window, 0, SIZES, link)
    with_request = eq_10_selective_s(window, positions / any_mismatch, SIZES, link)
    return any_mismatch * with_request + (1.0 - any_mismatch) * without_request


def round_s(method: str, window: int, mbps: int, rtt_ms: float) -> float:
    """Compute the seconds of a round (18, 19)."""
    draft = eq_12_draft_flops(DRAFTER, CONTEXT, window)
    verify = eq_15_verify_flops(TARGET, CONTEXT, window)
    head = 0.0
    if method in ("fh", "sh"):
        features = DRAFTER.hidden + TARGET.hidden + 4
        head = mismatches(window, mbps)[0] * eq_17_head_flops(features, HEAD_WIDTH)
    return eq_18_round_s(
        eq_11_compute_s(draft, DEVICE_UTILISATION, DEVICE_PEAK),
        communication_s(method, window, mbps, rtt_ms),
        eq_11_compute_s(verify, EDGE_UTILISATION, EDGE_PEAK),
        eq_11_compute_s(head, EDGE_UTILISATION, EDGE_PEAK),
    )


def latency_s(method: str, window: int, mbps: int, rtt_ms: float) -> float:
    """Compute the seconds of an answer (22), with the number of rounds that Table I prints."""
    cell = CELLS[window, "wisv" if method in ("fh", "sh") else method, mbps]
    return eq_22_latency_s(cell.rounds, round_s(method, window, mbps, rtt_ms))


def table1() -> Sheet:
    """Tabulate Table I: the printed numbers, AAL by equation 20, and the modelled latency."""
    rows: list[dict[str, Value]] = []
    for (window, method, mbps), cell in CELLS.items():
        aal = eq_20_accepted_length(cell.throughput, cell.latency_s, cell.rounds)
        model_s = latency_s("fh" if method == "wisv" else method, window, mbps, TABLE1_RTT_MS)
        rows.append(
            {
                "window": window,
                "method": method,
                "rate_mbps": mbps,
                "latency_s": cell.latency_s,
                "aal": cell.aal,
                "rounds": cell.rounds,
                "throughput_tps": cell.throughput,
                "aal_by_20": aal,
                "aal_deviation_percent": 100.0 * (aal / cell.aal - 1.0),
                "latency_model_s": model_s,
                "latency_deviation_percent": 100.0 * (model_s / cell.latency_s - 1.0),
            }
        )
    columns: dict[str, tuple[str, int | None]] = {
        "window": ("L", 0),
        "method": ("", None),
        "rate_mbps": ("Mbit/s", 0),
        "rounds": ("rounds", 3),
        "aal": ("AAL", 3),
        "aal_by_20": ("by (20)", 3),
        "aal_deviation_percent": ("off, %", 2),
        "latency_s": ("T, s", 3),
        "latency_model_s": ("model", 3),
        "latency_deviation_percent": ("off, %", 1),
    }
    return Sheet(
        "table1",
        "Table I: as printed, AAL by (20), latency by (22); WISV uploads as FH",
        columns,
        rows,
    )


def figure4() -> Sheet:
    """Tabulate latency for each window and link, and which of FH and SH is faster."""
    rows: list[dict[str, Value]] = []
    for mbps, rtt_ms in SETTINGS:
        for window in WINDOWS:
            seconds = {m: latency_s(m, window, mbps, rtt_ms) for m in FIGURE4_METHODS}
            row: dict[str, Value] = {"rate_mbps": mbps, "rtt_ms": rtt_ms, "window": window}
            row |= {f"{method}_s": value for method, value in seconds.items()}
            row["quicker"] = min(("fh", "sh"), key=seconds.__getitem__)
            rows.append(row)
    columns: dict[str, tuple[str, int | None]] = {
        "rate_mbps": ("Mbit/s", 0),
        "rtt_ms": ("RTT, ms", 0),
        "window": ("L", 0),
        **{f"{method}_s": (f"{method}, s", 2) for method in FIGURE4_METHODS},
        "quicker": ("quicker upload", None),
    }
    note = (
        "The numbers of rounds are Table I's (RTT 50 ms) at each rate; for RTT 5 ms the "
        "paper prints none."
    )
    return Sheet("figure4", "Figure 4: latency of an answer, by the model", columns, rows, note)


def break_even_rtt_ms(window: int, mbps: int) -> float:
    """Compute the RTT (ms) at which FH and SH take equally long; below it, SH is faster."""
    full, selective = (communication_s(method, window, mbps, 0.0) for method in ("fh", "sh"))
    return max(0.0, full - selective) * 1e3 / mismatches(window, mbps)[1]


def thresholds() -> Sheet:
    """Tabulate the break-even RTT for each rate and window.

    The paper has a single threshold: FH at RTTs above 10 ms (§VII-B).
    """
    rows: list[dict[str, Value]] = [
        {"rate_mbps": mbps, "window": window, "rtt_ms": break_even_rtt_ms(window, mbps)}
        for mbps in RATES_MBPS
        for window in WINDOWS
    ]
    columns: dict[str, tuple[str, int | None]] = {
        "rate_mbps": ("Mbit/s", 0),
        "window": ("L", 0),
        "rtt_ms": ("RTT, ms", 2),
    }
    title = "RTT above which FH (full upload) is faster than SH; the paper's rule: 10 ms"
    return Sheet("thresholds", title, columns, rows)


def draw(folder: Path) -> list[Path]:
    """Draw the four panels of figure 4; return the files' paths."""
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    paths = []
    for mbps, rtt_ms in SETTINGS:
        path = folder / f"wisv_figure4_{mbps}mbps_{rtt_ms}ms.png"
        title = f"Latency of an answer, {mbps} Mbit/s, RTT {rtt_ms} ms\nclosed form (22), GSM8K"
        with plot(path, title, "draft window L (tokens)", "latency (s)") as axes:
            for method, colour, marker in zip(FIGURE4_METHODS, PALETTE, MARKERS, strict=False):
                values = [latency_s(method, window, mbps, rtt_ms) for window in WINDOWS]
                axes.plot(WINDOWS, values, marker=marker, color=colour, label=method)
            axes.set_yscale("log")
            axes.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
            axes.set_yticks([], minor=True)
            axes.set_ylim(4, 200)
            axes.legend()
        paths.append(path)
    return paths


PAPER = Paper(
    title="WISV: Wireless-Informed Semantic Verification",
    constants=_CONSTANTS,
    sheets=lambda: [table1(), figure4(), thresholds()],
    remarks=_REMARKS,
    draw=draw,
    measurable=(FIGURE3, TABLE1, FIGURE4, FIGURE5, FIGURE7),
    drafter="default-28",
    head="default",
)

"""Figures 5 and 6 of tslt, with measured rounds and a modelled uplink.

For each K, the pair answers the prompts under `tslt` (SC, a chain of 3) or `tree` (MC, ⟨2,2,2⟩),
and under `stream` (the target alone). The tokens of a round, the bytes, and the times of both
models are measured. Only the time on the uplink is modelled, by equation 4, since the figures vary
its rate; as in the paper, downlink and RTT take no time. The target's pass over a window takes
longer than a pass for one token, and both are measured.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.measured_rounds import (
    AnswerProgress,
    RoundSums,
    connected,
    point,
    resampled,
    take_turns,
)
from pilotfish.lab.field.papers.sheet import Row, interval, interval_columns
from pilotfish.lab.field.papers.tslt import eq_3_distribution_bits, eq_27_distributions
from pilotfish.lab.field.papers.tslt_plots import draw_speed_up
from pilotfish.wire.protocols import STREAM

EXPANSION = (2, 2, 2)
_LEVELS = len(EXPANSION)
_RATES_MBPS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_SIZES = (32, 320, 3200, 32000)
_PROBABILITY_BITS = 16
_TOKENS = 48
_PROMPTS = 16
_LABEL = "answering prompts"


@dataclass(frozen=True)
class _Setting:
    """One of the paper's two settings. distributions: number that a round uploads."""

    options: Mapping[str, Any]
    distributions: int


_SINGLE = _Setting({"protocol": "tslt", "window": _LEVELS}, _LEVELS)
_MULTIPLE = _Setting({"protocol": "tree", "expansion": EXPANSION}, eq_27_distributions(EXPANSION))


def _measured(bench: Bench, done: Container[Identity], *, setting: _Setting) -> Iterator[Row]:
    """Measure the rounds of all K, then yield a row for each rate and K."""
    vocabulary = bench.pair.target.vocab_size
    sizes = sorted({min(size, vocabulary) for size in _SIZES})
    if all((mbps, top_k) in done for mbps in _RATES_MBPS for top_k in sizes):
        return
    cases: dict[str, Mapping[str, Any]] = {STREAM: {"protocol": STREAM}}
    cases |= {str(top_k): {**setting.options, "draft_top_k": top_k} for top_k in sizes}
    prompts = bench.prompts[:_PROMPTS]
    progress = AnswerProgress(bench.report, _LABEL, len(prompts) * len(cases))
    with connected(bench) as (device, _):
        for options in cases.values():  # the first passes of an engine are slow
            device.generate(prompts[0], temperature=1.0, max_tokens=8, **options)
        sums = take_turns(
            device, prompts, cases, tokens=_TOKENS, seed=bench.seed, progress=progress
        )
    alone = resampled(sums[STREAM])
    for top_k in sizes:
        rounds = resampled(sums[str(top_k)])
        bits = eq_3_distribution_bits(top_k, vocabulary, _PROBABILITY_BITS)
        for mbps in _RATES_MBPS:
            if (mbps, top_k) not in done:
                yield {
                    "uplink_mbps": mbps,
                    "kept": top_k,
                    "n": len(prompts),
                    **_row(rounds, alone, mbps * 1e6, setting.distributions * bits),
                }


def _row(rounds: RoundSums, alone: RoundSums, rate_bps: float, printed_bits: float) -> Row:
    """Compute the speed-ups at one rate.

    printed_bits: bits of a round's upload by equations 2 and 3.
    """
    alone_s = alone.edge_s / alone.tokens
    tokens = rounds.tokens / rounds.rounds
    compute_s = rounds.compute_s / rounds.rounds
    sent_bits = 8.0 * rounds.up_bytes / rounds.rounds
    sent = tokens * alone_s / (compute_s + sent_bits / rate_bps)
    printed = tokens * alone_s / (compute_s + printed_bits / rate_bps)
    return {
        **interval("speed_up", sent),
        **interval("speed_up_paper_bits", printed),
        "alpha": point(rounds.alpha),
        "tokens_per_round": point(tokens),
        "upload_bytes": point(sent_bits / 8.0),
        "upload_bytes_paper": printed_bits / 8.0,
        "draft_ms": 1e3 * point(rounds.draft_s / rounds.rounds),
        "verify_ms": 1e3 * point(rounds.edge_s / rounds.rounds),
        "compute_ms": 1e3 * point(compute_s),
        "alone_ms": 1e3 * point(alone_s),
    }


_COLUMNS: dict[str, tuple[str, int | None]] = {
    "uplink_mbps": ("uplink, Mbit/s", 0),
    "kept": ("K", 0),
    **interval_columns("speed_up", "speed-up", 2),
    "speed_up_paper_bits": ("by (3)", 2),
    "alpha": ("α", 3),
    "tokens_per_round": ("N", 2),
    "upload_bytes": ("up, bytes", 0),
}
_NOTE = (
    "The paper prints no numbers. Measured: the rounds, their bytes and the times of both models; "
    "modelled: the time on the uplink. By (3): the speed-up if a round uploaded the paper's bits. "
    "JSON has the times."
)


def _figure(number: int, name: str, setting: _Setting) -> Figure:
    return Figure(
        key=f"figure{number}",
        title=f"Figure {number}, measured: speed-up of {name} against uplink rate",
        columns=_COLUMNS,
        identity=("uplink_mbps", "kept"),
        measure=partial(_measured, setting=setting),
        draw=partial(draw_speed_up, number, name),
        minutes=1.0,
        note=_NOTE,
    )


FIGURE5 = _figure(5, "SC-DSD (a chain of 3)", _SINGLE)
FIGURE6 = _figure(6, "MC-DSD (a tree ⟨2,2,2⟩)", _MULTIPLE)

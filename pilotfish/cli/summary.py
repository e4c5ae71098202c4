"""Compute statistics of a generation from its rounds, and make a table of several generations."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from rich.table import Table

from pilotfish.device_runtime.record import STAGES, Generation
from pilotfish.wire.protocols import RoundCounter, counters, streams
from pilotfish.wire.protocols.ahead import SOURCES

GenerationFigures = dict[str, Any]
_Figures = TypeVar("_Figures")


def summary(generation: Generation) -> GenerationFigures:
    """Compute the statistics of one generation.

    Bytes are the sizes of the frames that were sent. Timings are medians in ms.
    """
    rounds = generation.rounds
    count = max(1, len(rounds))
    # seconds of each stage in each round, [rounds, stages]
    stages = np.array([[getattr(r.timings, stage) for stage in STAGES] for r in rounds])
    medians = np.median(stages, axis=0) * 1e3 if len(rounds) else np.zeros(len(STAGES))
    return {
        "protocol": generation.protocol,
        "text": generation.text,
        "window": max((r.window for r in rounds), default=0),
        "tokens": len(generation.tokens),
        "prompt_tokens": generation.prompt_tokens,
        "finish_reason": generation.finish_reason,
        "rounds": len(rounds),
        "acceptance": round(generation.acceptance, 4),
        "forced": generation.forced,
        **generation.rounded_notes,
        "key_positions": generation.key_positions,
        "hints": {
            source: {"drafted": drafted, "accepted": accepted}
            for source, (drafted, accepted) in generation.hints.items()
        },
        "inquiries": sum(r.inquired > 0 for r in rounds),
        "accepted_per_round": round(sum(r.accepted for r in rounds) / count, 3),
        "tokens_per_round": round(len(generation.tokens) / count, 3),
        "uplink_bytes_per_round": round(sum(r.uplink_bytes for r in rounds) / count, 1),
        "downlink_bytes_per_round": round(sum(r.downlink_bytes for r in rounds) / count, 1),
        "tokens_per_s": round(generation.tokens_per_s, 2),
        "first_token_ms": round(generation.first_token_s * 1e3, 2),
        "link": None if generation.link is None else asdict(generation.link),
        "choice": None if generation.choice is None else asdict(generation.choice),
        "probing": generation.probing._asdict(),
        "timings_ms": {
            stage: round(float(value), 3) for stage, value in zip(STAGES, medians, strict=True)
        },
    }


# The table's rows. Each has a heading, and a function that formats the value ("": no value).
_ROWS: tuple[tuple[str, Callable[[GenerationFigures], str]], ...] = (
    ("window γ", lambda f: "" if streams(f["protocol"]) else f"{f['window']}"),
    ("tokens", lambda f: f"{f['tokens']}"),
    ("forced tokens", lambda f: f"{f['forced'] or ''}"),
    ("rounds", lambda f: f"{f['rounds']}"),
    ("rounds with a request for states", lambda f: f"{f['inquiries'] or ''}"),
    ("acceptance α", lambda f: f"{f['acceptance']:.2f}"),
    ("tokens per round", lambda f: f"{f['tokens_per_round']:.2f}"),
    ("bytes up per round", lambda f: f"{f['uplink_bytes_per_round']:,.0f}"),
    ("bytes down per round", lambda f: f"{f['downlink_bytes_per_round']:,.0f}"),
    ("tokens/s", lambda f: f"{f['tokens_per_s']:.1f}"),
    ("speed-up over stream", lambda f: f"{f['speedup']:.2f} ×" if "speedup" in f else ""),
    ("first token, ms", lambda f: f"{f['first_token_ms']:.0f}"),
)


def _hints_row(source: str) -> tuple[str, Callable[[GenerationFigures], str]]:
    """Make the row for one source of hints; a cell is "" if the generation had no hints."""

    def cell(figures: GenerationFigures) -> str:
        counts = figures["hints"].get(source)
        return f"{counts['accepted']} of {counts['drafted']}" if counts else ""

    return f"accepted hints of {source}", cell


def _counter_row(counter: RoundCounter) -> tuple[str, Callable[[GenerationFigures], str]]:
    """Make the row for one counter; a cell is "" if the counter is 0."""
    form = "d" if counter.counts_tokens else ".4f"
    return counter.heading, lambda f: format(value, form) if (value := f[counter.name]) else ""


def add_rows(
    table: Table, rows: Iterable[tuple[str, Callable[[_Figures], str]]], columns: Sequence[_Figures]
) -> None:
    """Add a row for each heading, with a cell for each column; leave out empty rows."""
    for heading, cell in rows:
        cells = [cell(column) for column in columns]
        if any(cells):
            table.add_row(heading, *cells)


def report(figures: Sequence[GenerationFigures]) -> Table:
    """Make a table with a column for each generation."""
    table = Table(
        "", caption="bytes are the sizes of the frames sent; times are medians over rounds"
    )
    for column in figures:
        table.add_column(column["protocol"], justify="right")
    add_rows(table, _ROWS, figures)
    add_rows(table, map(_hints_row, SOURCES), figures)
    add_rows(table, map(_counter_row, counters().values()), figures)
    table.add_section()
    for stage in STAGES:
        table.add_row(f"{stage}, ms", *(f"{f['timings_ms'][stage]:.2f}" for f in figures))
    return table

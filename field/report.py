"""From the rounds of a generation to figures, and from figures to a table."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from device_runtime.record import STAGES, Generation


def summary(generation: Generation, window: int) -> dict[str, Any]:
    """The figures of one generation. Bytes are frames as sent; timings are p50 in milliseconds."""
    rounds = generation.rounds
    count = max(1, len(rounds))
    # [rounds, stages], seconds
    stages = np.array([[getattr(r.timings, stage) for stage in STAGES] for r in rounds])
    medians = np.median(stages, axis=0) * 1e3 if len(rounds) else np.zeros(len(STAGES))
    return {
        "protocol": generation.protocol,
        "text": generation.text,
        "window": window if any(r.window for r in rounds) else 0,
        "tokens": len(generation.tokens),
        "prompt_tokens": generation.prompt_tokens,
        "finish_reason": generation.finish_reason,
        "rounds": len(rounds),
        "acceptance": round(generation.acceptance, 4),
        "accepted_per_round": round(sum(r.accepted for r in rounds) / count, 3),
        "tokens_per_round": round(len(generation.tokens) / count, 3),
        "uplink_bytes_per_round": round(sum(r.uplink_bytes for r in rounds) / count, 1),
        "downlink_bytes_per_round": round(sum(r.downlink_bytes for r in rounds) / count, 1),
        "tokens_per_s": round(generation.tokens_per_s, 2),
        "first_token_ms": round(generation.first_token_s * 1e3, 2),
        "timings_ms": {
            stage: round(float(value), 3) for stage, value in zip(STAGES, medians, strict=True)
        },
    }


def report(figures: Sequence[dict[str, Any]]) -> Table:
    """A table of generations, one row each."""
    table = Table(caption="bytes are frames as sent, a round; times are medians of a round in ms")
    for heading in ("protocol", "window", "tokens", "rounds", "α", "tokens/round"):
        table.add_column(heading, justify="right")
    for heading in ("up B", "down B", "tokens/s", "first ms", *STAGES):
        table.add_column(heading, justify="right")
    for row in figures:
        times = row["timings_ms"]
        table.add_row(
            row["protocol"],
            str(row["window"]),
            str(row["tokens"]),
            str(row["rounds"]),
            f"{row['acceptance']:.2f}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['uplink_bytes_per_round']:.0f}",
            f"{row['downlink_bytes_per_round']:.0f}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['first_token_ms']:.0f}",
            *(f"{times[stage]:.2f}" for stage in STAGES),
        )
    return table

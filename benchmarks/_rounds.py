"""Rounds of one session over stages, beside the model of a round and the paper's."""

from statistics import median
from typing import Any

import numpy as np
from _common import PROMPTS, Rows, Steps
from _stages import Bench, Edge

from pilotfish import Device
from pilotfish.device_runtime.record import Round
from pilotfish.lab.field.papers.decentralized_measured import compare

PROMPT = PROMPTS[3]  # of which the default pair accepts about half
NODES = (2, 4, 8)
RATIOS = (0, 1, 3, 10)  # t₁ over a stage's compute
WINDOWS = (0, 4, 8)  # 0: `stream`


def rounds(bench: Bench, steps: Steps) -> Rows:
    """Rounds of one session against the model."""
    rows: Rows = []
    for stages in NODES:
        with bench.pipeline(stages) as pipeline, pipeline.edge() as edge:
            seen: list[Round] = []
            with bench.device(edge, on_round=seen.append) as device:
                for window in WINDOWS:  # fresh engines are slow
                    answer(device, edge, seen, window, 3)
                stage_s = 0.0
                for ratio in RATIOS:
                    steps.next(f"{stages} stages, t₁ {ratio} times a stage's compute")
                    pipeline.set_latency(ratio * stage_s)
                    result = [
                        measured(device, edge, seen, window, 6 if bench.quick else 12)
                        for window in WINDOWS
                    ]
                    if ratio == 0:
                        stage_s = result[WINDOWS.index(4)]["compute_ms"] * 1e-3 / stages
                    rows += [
                        {"nodes": stages, "t1_over_c": ratio, "t1_ms": 1e3 * ratio * stage_s, **row}
                        for row in result
                    ]
    return compare(rows)


def answer(
    device: Device, edge: Edge, seen: list[Round], window: int, count: int
) -> tuple[list[Round], float]:
    """So many rounds, after two that do not count; and seconds of compute of a pass meanwhile."""
    wish: dict[str, Any] = (
        {"protocol": "greedy", "window": window} if window else {"protocol": "stream"}
    )
    seen.clear()
    pieces = device.stream(PROMPT, max_tokens=(window + 1) * (count + 2) + 2, **wish)
    while len(seen) < 2:
        next(pieces)
    before, first = edge.spent(), len(seen)
    while len(seen) < first + count:
        next(pieces)
    spent = edge.spent().since(before)
    pieces.close()
    return seen[first : first + count], spent.pass_s


def measured(
    device: Device, edge: Edge, seen: list[Round], window: int, count: int
) -> dict[str, Any]:
    """What the rounds of a window took; times in milliseconds."""
    result, pass_s = answer(device, edge, seen, window, count)
    return {
        "window": window,
        "rounds": len(result),
        "tokens": float(np.mean([len(item.tokens) for item in result])),
        "measured_ms": 1e3 * median(item.timings.total for item in result),
        "draft_ms": 1e3 * median(item.timings.draft for item in result),
        "compute_ms": 1e3 * pass_s,
    }

"""Measure rounds over N nodes, for decentralized's node scaling (§3.2), beside two models.

In:  a bench. Out: a row for each number of stages N, window γ and hop time t₁. γ = 0 is `stream`;
     other windows are drafted under `greedy`.

The target runs in N stages with emulated hops (`field.papers.emulated_pipeline`). t₁ is 0, 1, 3 or
10 times c, the computing time of a stage for a window of 4. Σ c, the computing time of a pass by
all stages and the head, is what edge and stages count. Times are medians over prompts; each prompt
contributes the mean of its rounds after the first one.
"""

import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.record import Round
from pilotfish.lab.field.papers.decentralized import (
    eq_4_speculative_s,
    eq_5_reduction,
    eq_9_speed_up,
    hops,
)
from pilotfish.lab.field.papers.decentralized_plots import draw_nodes
from pilotfish.lab.field.papers.emulated_pipeline import (
    EmulatedPipeline,
    PipelineEdge,
    make_keys,
)
from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.sheet import Row, Value, interval_columns, number
from pilotfish.lab.statistics import median_interval

NODES = (2, 4, 8)
WINDOWS = (0, 4, 8)
RATIOS = (0, 1, 3, 10)  # t₁/c
PROMPTS = 12
ROUNDS = 3  # rounds of each prompt that are counted
IDENTITY = ("nodes", "window", "t1_over_c")
MODELLED_NODES = 16
_STAGE_WINDOW = 4  # window whose pass defines c


def measure_nodes(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    """Yield the rows of each N that has a row not in ``done``; they are measured together."""
    with tempfile.TemporaryDirectory(prefix="pilotfish-nodes-") as name:
        folder = Path(name)
        make_keys(folder)
        for nodes in NODES:
            cases = [(nodes, window, ratio) for ratio in RATIOS for window in WINDOWS]
            if all(case in done for case in cases):
                continue
            rows = compare(list(_measure_pipeline(bench, nodes, folder)))
            yield from (row for row in rows if tuple(row[key] for key in IDENTITY) not in done)


def _measure_pipeline(bench: Bench, nodes: int, folder: Path) -> Iterator[Row]:
    draft, target = bench.pair.paths
    rounds: list[Round] = []
    with (
        EmulatedPipeline(target, nodes, folder) as pipeline,
        pipeline.edge() as edge,
        Device(draft, edge.endpoint, folder, threads=1, on_round=rounds.append) as device,
    ):
        connected = _PipelineDevice(device, edge, rounds)
        for window in WINDOWS:  # the first passes of new engines are slow
            connected.measure(bench.prompts[:1], window)
        stage_s = 0.0
        for at, ratio in enumerate(RATIOS):
            bench.report(f"rounds over {nodes} nodes", at, len(RATIOS))
            pipeline.set_hop(ratio * stage_s)
            rows = {
                window: connected.measure(bench.prompts[:PROMPTS], window) for window in WINDOWS
            }
            if ratio == 0:
                stage_s = number(rows[_STAGE_WINDOW], "compute_ms") * 1e-3 / nodes
            for window, row in rows.items():
                case = {"nodes": nodes, "window": window, "t1_over_c": ratio}
                yield {**case, "t1_ms": 1e3 * ratio * stage_s, **row}
        bench.report(f"rounds over {nodes} nodes", len(RATIOS), len(RATIOS))


class _PipelineDevice:
    """A device, its edge in front of the stages, and the rounds that the device reports."""

    def __init__(self, device: Device, edge: PipelineEdge, rounds: list[Round]) -> None:
        self._device, self._edge, self._rounds = device, edge, rounds

    def measure(self, prompts: Sequence[str], window: int) -> dict[str, Value]:
        """Return k, and medians over prompts in ms, of rounds with this window."""
        options: Mapping[str, Any] = {"protocol": "greedy", "window": window, "temperature": 0.0}
        if not window:
            options = {"protocol": "stream", "temperature": 0.0}
        means = np.array([self._answer(prompt, window, options) for prompt in prompts])
        round_ms, draft_ms, compute_ms = np.median(means[:, 1:], axis=0).tolist()
        row: dict[str, Value] = {"n": len(prompts), "tokens": float(means[:, 0].mean())}
        low, high = median_interval(means[:, 1].tolist())
        row |= {"round_ms": round_ms, "round_ms_low": low, "round_ms_high": high}
        return row | {"draft_ms": draft_ms, "compute_ms": compute_ms}

    def _answer(self, prompt: str, window: int, options: Mapping[str, Any]) -> list[float]:
        """Measure `ROUNDS` rounds after the first: tokens; ms of a round, of drafting, of Σ c."""
        # the prompt is read before, so that all passes between the two counts are those of rounds
        self._device.generate(prompt, max_tokens=1, **options)
        self._rounds.clear()
        before = self._edge.computed()
        length = (window + 1) * (ROUNDS + 2)
        with self._device.stream(prompt, max_tokens=length, **options) as pieces:
            self._wait_for(1 + ROUNDS, pieces)
            compute_s = self._edge.computed().pass_s(before)
        rounds = self._rounds[1 : 1 + ROUNDS] or self._rounds[:1]  # a very short answer
        return [
            float(np.mean([len(each.tokens) for each in rounds])),
            1e3 * float(np.mean([each.timings.total for each in rounds])),
            1e3 * float(np.mean([each.timings.draft for each in rounds])),
            1e3 * compute_s,
        ]

    def _wait_for(self, count: int, pieces: Iterator[object]) -> None:
        while len(self._rounds) < count and list(islice(pieces, 1)):
            pass


def compare(rows: Sequence[Row]) -> list[Row]:
    """Add modelled times and the paper's equations 4, 5 and 9 to each measured row.

    The added columns are: ``hops_ms``: time of all hops. ``model_ms``: modelled round T.
    ``off``: T / round − 1. ``fixed_ms``: part of the round at t₁ = 0 that T omits. ``off_fixed``:
    (T + fixed) / round − 1. ``eq4_ms``: equation 4 for k tokens. ``gain``: tokens/s relative to
    γ = 0. ``eq9``: the gain by equation 9. ``reduction``: 1 − 1/gain. ``eq5``: the same by equation
    5. In the equations, t₀ is Σ c at γ = 0.
    """
    return [{**row, **_model(row, rows)} for row in rows]


def _model(row: Row, rows: Sequence[Row]) -> dict[str, Value]:
    nodes, window = int(number(row, "nodes")), int(number(row, "window"))
    k, t1_ms, round_ms = (number(row, key) for key in ("tokens", "t1_ms", "round_ms"))
    fixed_ms = _fixed_ms(_matching_row(rows, row, t1_over_c=0))
    by_token = _matching_row(rows, row, window=0)
    t0_ms = number(by_token, "compute_ms")
    model_ms = number(row, "draft_ms") + number(row, "compute_ms") + hops(nodes) * t1_ms
    gain = k / round_ms * number(by_token, "round_ms") / number(by_token, "tokens")
    return {
        "hops_ms": hops(nodes) * t1_ms,
        "model_ms": model_ms,
        "off": model_ms / round_ms - 1.0,
        "fixed_ms": fixed_ms,
        "off_fixed": (model_ms + fixed_ms) / round_ms - 1.0,
        "eq4_ms": eq_4_speculative_s(k, nodes, t0_ms, t1_ms),
        "gain": gain,
        "eq9": eq_9_speed_up(k, window, nodes, t0_ms, t1_ms),
        "reduction": 1.0 - 1.0 / gain,
        "eq5": eq_5_reduction(k, nodes, t0_ms, t1_ms),
    }


def _fixed_ms(row: Row) -> float:
    return number(row, "round_ms") - number(row, "draft_ms") - number(row, "compute_ms")


def _matching_row(rows: Sequence[Row], row: Row, **changes: Value) -> Row:
    """Find the row with the identity of ``row``, except for the ``changes``."""
    values = {key: row[key] for key in IDENTITY} | changes
    return next(other for other in rows if all(other[key] == values[key] for key in values))


def extrapolate(rows: Sequence[Row]) -> list[Row]:
    """Model 16 nodes from the rows measured with the most nodes; nothing of it is measured.

    Drafting, Σ c and k are those of the measured rows; the hops, and the fixed part of a round, are
    those of 16 nodes with the same t₁.
    """
    most = max((number(row, "nodes") for row in rows), default=0)
    measured = [row for row in rows if row["nodes"] == most]
    modelled: list[dict[str, Value]] = []
    for row in measured:
        fixed_ms = number(row, "fixed_ms") * MODELLED_NODES / most
        computed_ms = number(row, "draft_ms") + number(row, "compute_ms")
        round_ms = computed_ms + fixed_ms + hops(MODELLED_NODES) * number(row, "t1_ms")
        modelled.append({**row, "nodes": MODELLED_NODES, "round_ms": round_ms})
    return [
        {
            **{key: row[key] for key in (*IDENTITY, "t1_ms", "tokens", "round_ms")},
            **{key: model[key] for key in ("gain", "eq9", "reduction", "eq5")},
        }
        for row in modelled
        for model in [_model(row, modelled)]
    ]


NODE_COLUMNS: Mapping[str, tuple[str, int | None]] = {
    "nodes": ("N", 0),
    "window": ("γ", 0),
    "t1_over_c": ("t₁/c", 0),
    "t1_ms": ("t₁", 1),
    "tokens": ("k", 1),
    **interval_columns("round_ms", "round", 0),
    "model_ms": ("T", 0),
    "off": ("off", 3),
    "off_fixed": ("(+)", 3),
    "eq4_ms": ("(4)", 0),
    "gain": ("gain", 2),
    "eq9": ("(9)", 2),
    "reduction": ("saved", 2),
    "eq5": ("(5)", 2),
    "n": ("prompts", 0),
}
NODES_FIGURE = Figure(
    key="nodes",
    title="Node scaling (§3.2), measured: rounds over N stages with emulated hops",
    columns=NODE_COLUMNS,
    identity=IDENTITY,
    measure=measure_nodes,
    draw=draw_nodes,
    minutes=10.0,
    note=(
        "Times are in ms. T = γ·T_draft + Σ c + H·t₁; off: T / round − 1; (+): the same, with the "
        "round's other time at t₁ = 0 added to T. gain: tokens/s relative to γ = 0; saved: "
        "1 − 1/gain, which (5) computes; the paper prints 0.37 at 8 nodes. Each prompt gives one "
        "mean; intervals are of the medians over prompts."
    ),
)

"""Rounds of a target in N stages: measurements by `benchmarks/pipeline.py`, and the paper's model.

The target is SmolLM2-135M-Instruct (fp32, 30 layers). Each stage is a process with one thread; all
run on one machine with two cores, and CURVE encrypts the connections between them. The time of a
hop, t₁, is emulated on each of a round's N hops: 0, 1, 3 or 10 times the compute time of a stage
for a window of 4. The int4 export of the same model drafts under `greedy`; γ = 0 is `stream`. All
times are medians of 12 rounds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pilotfish.lab.field.papers.decentralized import eq_4_speculative_s, eq_9_speed_up, hops
from pilotfish.lab.field.papers.sheet import Sheet, Value, number, read_measurements

CASE = ("nodes", "window", "t1_over_c")  # columns that identify a row


def compare(rows: Sequence[Mapping[str, Value]]) -> list[dict[str, Value]]:
    """Add modelled times and the paper's equations 4 and 9 to each measured row.

    A measured row has N, γ, t₁ (in ms, and relative to a stage's compute time c), k, and medians in
    ms of the round, of its drafting and of Σ c. The added columns are:
    ``hops_ms``: time of all hops. ``model_ms``: modelled round T. ``off``: T / round − 1.
    ``fixed_ms``: part of the round at t₁ = 0 that T omits. ``off_fixed``: (T + fixed) / round − 1.
    ``eq4_ms``: equation 4 for k tokens. ``gain``: tokens/s relative to γ = 0. ``eq9``: the gain by
    equation 9. In both equations, t₀ is Σ c at γ = 0.
    """
    results = []
    for row in rows:
        nodes, t1_ms, k = int(number(row, "nodes")), number(row, "t1_ms"), number(row, "tokens")
        window, round_ms = int(number(row, "window")), number(row, "measured_ms")
        computed_ms = number(row, "draft_ms") + number(row, "compute_ms")
        without_hops = _matching_row(rows, row, t1_over_c=0)
        fixed_ms = number(without_hops, "measured_ms") - number(without_hops, "draft_ms")
        fixed_ms -= number(without_hops, "compute_ms")
        token_by_token = _matching_row(rows, row, window=0)
        t0_ms = number(token_by_token, "compute_ms")
        model_ms = computed_ms + hops(nodes) * t1_ms
        results.append(
            {
                **row,
                "hops_ms": hops(nodes) * t1_ms,
                "model_ms": model_ms,
                "off": model_ms / round_ms - 1.0,
                "fixed_ms": fixed_ms,
                "off_fixed": (model_ms + fixed_ms) / round_ms - 1.0,
                "eq4_ms": eq_4_speculative_s(k, nodes, t0_ms, t1_ms),
                "gain": k
                / round_ms
                * number(token_by_token, "measured_ms")
                / number(token_by_token, "tokens"),
                "eq9": eq_9_speed_up(k, window, nodes, t0_ms, t1_ms),
            }
        )
    return results


def _matching_row(
    rows: Sequence[Mapping[str, Value]], row: Mapping[str, Value], **changes: Value
) -> Mapping[str, Value]:
    """Find the row that equals ``row`` in the columns `CASE`, except for the ``changes``."""
    values = {key: row[key] for key in CASE} | changes
    return next(
        candidate for candidate in rows if all(candidate[key] == values[key] for key in values)
    )


def measurements() -> Sheet:
    """Tabulate the measurements."""
    columns: dict[str, tuple[str, int | None]] = {
        "nodes": ("N", 0),
        "window": ("γ", 0),
        "t1_over_c": ("t₁/c", 0),
        "t1_ms": ("t₁", 0),
        "measured_ms": ("round", 0),
        "model_ms": ("T", 0),
        "off": ("off", 3),
        "off_fixed": ("(+)", 3),
        "eq4_ms": ("(4)", 0),
        "tokens": ("k", 1),
        "gain": ("gain", 2),
        "eq9": ("(9)", 2),
    }
    note = (
        "Times are in ms. off: T / measured round − 1, with T = γ·T_draft + Σ c + H·t₁. off "
        "(+): the same, with the round's other time at t₁ = 0 added to T. gain: tokens/s "
        "relative to γ = 0. JSON also has the parts of T, and the rows for t₁ = 0."
    )
    title = "Rounds measured on SmolLM2-135M in N stages, and the model"
    return Sheet("measured", title, columns, ROWS, note, lambda row: bool(row["t1_over_c"]))


def draw(rows: Sequence[Mapping[str, Value]], folder: Path) -> list[Path]:
    """Draw the time of a round against N, and the gain against t₁; return the files' paths."""
    return [_draw_rounds(rows, folder), _draw_gain(rows, folder)]


def _draw_rounds(rows: Sequence[Mapping[str, Value]], folder: Path) -> Path:
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    path, window = folder / "decentralized_rounds.png", 4
    title = f"A round over N stages, γ = {window}, medians of {rows[0]['rounds']}"
    title += "\npoints: measured; solid: model; dotted: equation 4"
    with plot(path, title, "nodes N", "round (ms)") as axes:
        ratios = sorted({number(row, "t1_over_c") for row in rows})
        for ratio, colour, marker in zip(ratios, PALETTE, MARKERS, strict=False):
            chosen = [row for row in rows if (row["window"], row["t1_over_c"]) == (window, ratio)]
            nodes = [number(row, "nodes") for row in chosen]
            label = f"t₁ = {ratio:g} c"
            axes.plot(
                nodes, [number(r, "measured_ms") for r in chosen], marker, color=colour, label=label
            )
            axes.plot(nodes, [number(r, "model_ms") for r in chosen], "-", color=colour)
            axes.plot(nodes, [number(r, "eq4_ms") for r in chosen], ":", color=colour)
        axes.set_xticks(sorted({number(row, "nodes") for row in rows}))
        axes.set_ylim(bottom=0)
        axes.legend(ncols=2)
    return path


def _draw_gain(rows: Sequence[Mapping[str, Value]], folder: Path) -> Path:
    from pilotfish.lab.drawing import MARKERS, PALETTE, plot

    path, nodes = folder / "decentralized_gain.png", max(number(row, "nodes") for row in rows)
    title = f"Speculation over {nodes:g} stages, medians of {rows[0]['rounds']} rounds"
    title += "\nsolid: measured; dotted: equation 9"
    with plot(
        path, title, "t₁ / compute time of a stage", "tokens/s relative to token by token (×)"
    ) as axes:
        windows = sorted({number(row, "window") for row in rows} - {0.0})
        for window, colour, marker in zip(windows, PALETTE, MARKERS, strict=False):
            chosen = [row for row in rows if (row["nodes"], row["window"]) == (nodes, window)]
            ratios = [number(row, "t1_over_c") for row in chosen]
            k = number(chosen[0], "tokens")
            gains = [number(row, "gain") for row in chosen]
            axes.plot(
                ratios, gains, f"-{marker}", color=colour, label=f"γ = {window:g}, k = {k:.1f}"
            )
            axes.plot(ratios, [number(row, "eq9") for row in chosen], ":", color=colour)
        axes.axhline(1.0, color="#888888", linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.legend()
    return path


ROWS = compare(read_measurements("decentralized_measured.csv", {"rounds", *CASE}))

"""Tables for decentralized: scaling to 16 nodes, the paper's claims, and its printed tables.

`field.papers.decentralized` has the equations. `field.papers.decentralized_nodes` measures rounds
of a real pipeline, `field.papers.decentralized_printed` has the paper's tables.
"""

import math
from pathlib import Path

from pilotfish.lab.field.papers import decentralized_printed
from pilotfish.lab.field.papers.decentralized import (
    eq_3_standard_s,
    eq_4_speculative_s,
    eq_5_reduction,
    eq_9_speed_up,
    hops,
    pipeline_speed_up,
    tokens_for_reduction,
)
from pilotfish.lab.field.papers.decentralized_nodes import MODELLED_NODES, NODES_FIGURE, extrapolate
from pilotfish.lab.field.papers.decentralized_printed import WINDOW
from pilotfish.lab.field.papers.decentralized_runs import TABLE1
from pilotfish.lab.field.papers.decentralized_tau import TAU
from pilotfish.lab.field.papers.figure_file import shipped_figure
from pilotfish.lab.field.papers.paper import Paper
from pilotfish.lab.field.papers.sheet import Constant, Sheet, Value

NODES = range(1, 17)
SHOWN = (1, 2, 4, 8, 16)
LENGTH = 3.86  # of DSD at 2.56×
K = (2.0, LENGTH, 6.0)
T1_OVER_T0 = (0.1, 1.0, 3.0, 10.0)
CLAIM_NODES, CLAIM_REDUCTION, CLAIM_SPEED_UP = 8, 0.37, 2.56
# The constants from here on are our choice. Times are in units of t₀: no ratio below depends on t₀.
T0 = 1.0
DRAFT = 0.1
SLOPE = 0.05

_CONSTANTS = (
    Constant("γ", WINDOW, "tokens", "paper", "Table 2"),
    Constant("k", LENGTH, "tokens", "paper", "Table 1, average length at 2.56×"),
    Constant("k, others", "2, 6", "tokens", "ours", "for comparison"),
    Constant("t₁/t₀", "0.1, 1, 3, 10", "", "ours", "§2.2: gain is most pronounced from 3 to 10"),
    Constant("T_draft", DRAFT, "t₀", "ours", "not printed; the paper omits drafting"),
    Constant(
        "slope of c",
        SLOPE,
        "t₀/token",
        "ours",
        "a pass over 9 tokens costs 1.4 t₀; in the paper it is linear",
    ),
    Constant("H", "N", "hops", "ours", "N − 1 hops and the hop back; the paper counts N − 1"),
)
_REMARKS = (
    "37 % at 8 nodes (§3.2): (5) gives 37 % for k = 1.6 if t₁ is 3 to 10 t₀, and for k = 3.86 "
    "only if t₁ = 0.14 t₀. With the paper's k and t₁, (5) gives 71 to 73 %. Moreover, (5) "
    "compares with token-by-token decoding, while §3.2 compares with standard speculative "
    "decoding, which makes as many hops as DSD.",
    "2.56× at k = 3.86 and γ = 8: (9) gives 2.56× at 8 nodes for t₁ = 2.1 t₀. The speed-up by "
    "(9) ranges from ρ = 0.43, a loss, if hops take no time, to k, if only hops take time.",
    "(9) charges t₀ for every verified token, so without latency speculation would be slower "
    "than decoding token by token. (3)–(5) leave out rejected tokens; (9) includes them in ρ. "
    "None of these equations includes drafting and the hop back.",
    "Pipeline: T = γ·T_draft + Σ c(γ + 1) + H·t₁. A pass over γ + 1 tokens costs little more "
    "than a pass over one token, so speculation gains at small t₁, too. Since T includes "
    "drafting, the speed-up stays below k at any t₁.",
)


def node_scaling() -> Sheet:
    """Tabulate speed-up against N, by equation 9 and the pipeline model, for each k and t₁/t₀."""
    rows: list[dict[str, Value]] = []
    for k in K:
        for ratio in T1_OVER_T0:
            for nodes in NODES:
                t1 = ratio * T0
                rows.append(
                    {
                        "k": k,
                        "t1_over_t0": ratio,
                        "nodes": nodes,
                        "hops": hops(nodes),
                        "standard_t0": eq_3_standard_s(k, nodes, T0, t1),
                        "speculative_t0": eq_4_speculative_s(k, nodes, T0, t1),
                        "reduction": eq_5_reduction(k, nodes, T0, t1),
                        "speed_up_eq_9": eq_9_speed_up(k, WINDOW, nodes, T0, t1),
                        "speed_up_pipeline": pipeline_speed_up(
                            k, WINDOW, nodes, DRAFT * T0, t1, T0, SLOPE
                        ),
                    }
                )
    columns: dict[str, tuple[str, int | None]] = {
        "k": ("k", 2),
        "t1_over_t0": ("t₁/t₀", 1),
        "nodes": ("N", 0),
        "hops": ("H", 0),
        "standard_t0": ("(3), t₀", 1),
        "speculative_t0": ("(4), t₀", 1),
        "reduction": ("(5)", 3),
        "speed_up_eq_9": ("(9), ×", 2),
        "speed_up_pipeline": ("pipeline, ×", 2),
    }
    title = f"Node scaling, γ = {WINDOW}; k tokens committed per round"
    note = "JSON has every N from 1 to 16."
    return Sheet("node_scaling", title, columns, rows, note, lambda row: row["nodes"] in SHOWN)


def claims() -> Sheet:
    """Tabulate the paper's claims for each t₁/t₀.

    The columns are the k at which equation 5 gives 37 % at 8 nodes, and the values of equations 5
    and 9 at k = 3.86.
    """
    rows: list[dict[str, Value]] = []
    for ratio in (0.1, 0.14, 1.0, 2.1, 3.0, 5.0, 10.0):
        needed = tokens_for_reduction(CLAIM_REDUCTION, CLAIM_NODES, T0, ratio)
        rows.append(
            {
                "t1_over_t0": ratio,
                "k_for_37_percent": needed if math.isfinite(needed) else None,
                "reduction_at_k_3_86": eq_5_reduction(LENGTH, CLAIM_NODES, T0, ratio),
                "speed_up_eq_9_at_k_3_86": eq_9_speed_up(LENGTH, WINDOW, CLAIM_NODES, T0, ratio),
                "speed_up_pipeline_at_k_3_86": pipeline_speed_up(
                    LENGTH, WINDOW, CLAIM_NODES, DRAFT, ratio, T0, SLOPE
                ),
            }
        )
    columns: dict[str, tuple[str, int | None]] = {
        "t1_over_t0": ("t₁/t₀", 2),
        "k_for_37_percent": ("k for 37 %", 2),
        "reduction_at_k_3_86": ("(5), k 3.86", 2),
        "speed_up_eq_9_at_k_3_86": ("(9), k 3.86", 2),
        "speed_up_pipeline_at_k_3_86": ("pipeline, k 3.86", 2),
    }
    title = f"The claims at {CLAIM_NODES} nodes: 37 % less communication, {CLAIM_SPEED_UP}×"
    return Sheet("claims", title, columns, rows)


def modelled_nodes() -> Sheet:
    """Tabulate 16 nodes as modelled from the measured rows that this version ships."""
    shipped = shipped_figure("decentralized", "nodes")
    rows = [] if shipped is None else extrapolate(shipped.rows)
    columns: dict[str, tuple[str, int | None]] = {
        "nodes": ("N", 0),
        "window": ("γ", 0),
        "t1_over_c": ("t₁/c", 0),
        "t1_ms": ("t₁, ms", 1),
        "tokens": ("k", 1),
        "round_ms": ("round, ms", 0),
        "gain": ("gain", 2),
        "eq9": ("(9)", 2),
        "reduction": ("saved", 2),
        "eq5": ("(5)", 2),
    }
    note = (
        "Nothing of this table is measured over 16 nodes: drafting, Σ c and k are those measured "
        "with the most nodes, and 16 hops take 16 times the measured time of a hop."
    )
    title = f"{MODELLED_NODES} nodes, modelled from the measured rounds"
    return Sheet("nodes_modelled", title, columns, rows, note)


def sheets() -> list[Sheet]:
    """Compute all tables; the modelled nodes only if measured ones are shipped."""
    modelled = modelled_nodes()
    return [
        decentralized_printed.table1(),
        decentralized_printed.settings(),
        decentralized_printed.table2(),
        node_scaling(),
        claims(),
        *([modelled] if modelled.rows else []),
    ]


def draw(folder: Path) -> list[Path]:
    """Draw the speed-up against nodes; return the files' paths."""
    from pilotfish.lab.drawing import PALETTE, plot

    paths = []
    for ratio in (0.1, 3.0):
        path = folder / f"decentralized_nodes_{ratio:g}.png"
        title = f"Node scaling, t₁ = {ratio:g} t₀\nclosed form; (9) dashed, pipeline solid"
        with plot(path, title, "nodes N", "speed-up over decoding token by token (×)") as axes:
            for k, colour in zip(K, PALETTE, strict=False):
                paper = [eq_9_speed_up(k, WINDOW, nodes, T0, ratio) for nodes in NODES]
                ours = [
                    pipeline_speed_up(k, WINDOW, nodes, DRAFT, ratio, T0, SLOPE) for nodes in NODES
                ]
                axes.plot(NODES, paper, "--", color=colour)
                axes.plot(NODES, ours, "-", color=colour, label=f"k = {k:g}")
            axes.axhline(1.0, color="#888888", linewidth=0.8)
            axes.set_ylim(bottom=0)
            axes.legend()
        paths.append(path)
    return paths


PAPER = Paper(
    title="Decentralized speculative decoding (DSD): communication latency into throughput",
    constants=_CONSTANTS,
    sheets=sheets,
    remarks=(*_REMARKS, *decentralized_printed.REMARKS),
    draw=draw,
    measurable=(NODES_FIGURE, TAU, TABLE1),
)

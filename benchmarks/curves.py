"""The curves of tslt's figures 3 and 4 for the default pair, as PNG: what truncation costs.

    python benchmarks/curves.py [--out DIR] [--json PATH] [--quick] [--draft DIR] [--target DIR]

topk_mass.png: the mass of q's K most probable tokens against K, mean and the middle half of the
positions. acceptance.png: acceptance against K of one candidate, β̂ = 1 − TV(p, q̂), and of two, θ
(tslt (39)); q̂ as in the paper (top-K, renormalised) and as shipped (quantised as well). The band is
Theorem 3.2's: β of the untruncated q, ± E[σ], where σ is the mass cut off.

Nothing is sampled: all is computed from both models' logits on recorded rows, texts of the target
at temperature 1. K goes from 1 to the whole vocabulary. Needs matplotlib (the extra ``field``).

Goal: no position, at any K, leaves Theorem 3.2: |β̂ − β| ≤ σ, but for float64's rounding.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from _common import PROMPTS, Rows, Steps, at_most, conclude, options, pair, pair_options
from _recorded import Chat, record
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.theory import beta, betas, sigma, theta
from pilotfish.speculation.truncation import truncate

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 320, 640, 1024, 3200, 8192, 16384)  # and the vocabulary
CANDIDATES = 2
ROUNDING = 1e-9
COLUMNS = (
    *("K", "mass", "sigma", "beta_hat", "low", "high", "theta_hat", "shipped_beta"),
    *("shipped_theta", "beyond_bound"),
)
# what is computed of a position at one K
MASS, ONE, TWO, SHIPPED_ONE, SHIPPED_TWO, BEYOND = range(6)
Values = NDArray[np.float64]


def measure(chat: Chat, index: int, sizes: Sequence[int]) -> Values:
    """The figures at one position for each K, f64 [sizes, 6]."""
    p, q = chat.p(index), chat.q(index)
    order = np.argsort(-q, kind="stable")
    untruncated = float(beta(p, q))
    results = []
    for size in sizes:
        selection = order[:size]
        q_hat = np.zeros_like(q)
        q_hat[selection] = q[selection] / q[selection].sum()
        cut_off = sigma(q, selection)
        each = betas(p, q_hat, CANDIDATES)
        shipped = truncate(chat.drafter[index], Sampling(temperature=1.0, top_k=size)).row(0)
        shipped_q = np.zeros(len(p))
        shipped_q[shipped.support] = shipped.probabilities()
        each_shipped = betas(p, shipped_q, CANDIDATES)
        beyond = abs(each[0] - untruncated) - cut_off
        results.append(
            (
                *(1.0 - cut_off, each[0], float(theta(each))),
                *(each_shipped[0], float(theta(each_shipped)), beyond),
            )
        )
    return np.array(results)


def rows_of(sizes: Sequence[int], figures: Values, betas: Values) -> Rows:
    """One row for each K; ``figures`` [n, sizes, 6], ``betas`` [n] of the untruncated q."""
    means = figures.mean(axis=0)
    rows: Rows = []
    for at, size in enumerate(sizes):
        cut_off = 1.0 - float(means[at, MASS])
        rows.append(
            {
                "K": size,
                "mass": float(means[at, MASS]),
                "mass_quarter": float(np.quantile(figures[:, at, MASS], 0.25)),
                "mass_three_quarters": float(np.quantile(figures[:, at, MASS], 0.75)),
                "sigma": cut_off,
                "beta": float(betas.mean()),
                "beta_hat": float(means[at, ONE]),
                "low": max(0.0, float(betas.mean()) - cut_off),
                "high": min(1.0, float(betas.mean()) + cut_off),
                "theta_hat": float(means[at, TWO]),
                "shipped_beta": float(means[at, SHIPPED_ONE]),
                "shipped_theta": float(means[at, SHIPPED_TWO]),
                "beyond_bound": int((figures[:, at, BEYOND] > ROUNDING).sum()),
            }
        )
    return rows


def axes(title: str, label: str, vocab: int) -> tuple[Any, Any]:
    """A figure and its axes, K on a log scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.4), dpi=160, layout="constrained")
    ax = figure.subplots()
    ax.set_xscale("log")
    ax.set_xlim(1, vocab)
    ticks = [*(k for k in (1, 4, 16, 64, 320, 1024, 3200) if k < vocab / 2), vocab]
    ax.set_xticks(ticks, [f"{k:,}" for k in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("K, tokens kept (log scale)")
    ax.set_ylabel(label)
    ax.set_title(title, loc="left")
    ax.grid(alpha=0.25)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return figure, ax


def draw_mass(columns: dict[str, list[float]], path: Path) -> None:
    """tslt's figure 3."""
    sizes = columns["K"]
    title = "Probability mass of the drafter's top K tokens"
    figure, ax = axes(title, "mass kept, 1 − σ", int(sizes[-1]))
    quartiles = columns["mass_quarter"], columns["mass_three_quarters"]
    ax.fill_between(sizes, *quartiles, alpha=0.2, lw=0, label="middle half of the positions")
    ax.plot(sizes, columns["mass"], "o-", ms=4, clip_on=False, label="mean")
    ax.set_ylim(0.0, 1.0)
    ax.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def draw_acceptance(columns: dict[str, list[float]], path: Path) -> None:
    """tslt's figure 4, with the bound of Theorem 3.2."""
    sizes = columns["K"]
    figure, ax = axes("Acceptance under truncation", "acceptance rate α", int(sizes[-1]))
    for k, colour, exact, shipped in (
        ("two candidates", "tab:orange", "theta_hat", "shipped_theta"),
        ("one candidate", "tab:blue", "beta_hat", "shipped_beta"),
    ):
        style = {"color": colour, "clip_on": False}
        ax.plot(sizes, columns[exact], "-", label=f"{k}, top-K of q", **style)
        ax.plot(sizes, columns[shipped], "x", ms=6, label=f"{k}, q̂ as shipped", **style)
    ax.axhline(columns["beta"][0], color="tab:blue", lw=1, ls=":", label="one, untruncated q")
    bound = "Theorem 3.2 for one candidate: within E[σ]"
    band = columns["low"], columns["high"]
    ax.fill_between(sizes, *band, color="tab:blue", alpha=0.13, lw=0, label=bound)
    ax.set_ylim(0.2, 1.0)
    ax.legend(loc="lower right", frameon=False, fontsize=9)
    figure.savefig(path)


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="where the PNGs go (default: here)"
    )
    args = parser.parse_args()
    if find_spec("matplotlib") is None:
        parser.error("drawing needs matplotlib: pip install 'pilotfish[field]'.")
    drafter, target = pair(args)
    steps = Steps(2 * len(PROMPTS))
    chats = record(drafter, target, quick=args.quick, steps=steps)
    vocab = chats[0].target.shape[1]
    sizes = [*(size for size in SIZES if size < vocab), vocab]
    figures, untruncated = [], []
    for chat in chats:
        steps.next("truncating at every K")
        for index in range(len(chat)):
            figures.append(measure(chat, index, sizes))
            untruncated.append(float(beta(chat.p(index), chat.q(index))))
    rows = rows_of(sizes, np.array(figures), np.array(untruncated))
    args.out.mkdir(parents=True, exist_ok=True)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    draw_mass(columns, args.out / "topk_mass.png")
    draw_acceptance(columns, args.out / "acceptance.png")
    left = sum(row["beyond_bound"] for row in rows)
    goals = [at_most("positions that leave the bound of Theorem 3.2, over all K", left, 0)]
    title = f"truncation, {len(figures)} positions, untruncated α = {rows[0]['beta']:.3f}"
    return conclude(args, title, COLUMNS, rows, goals)


if __name__ == "__main__":
    sys.exit(main())

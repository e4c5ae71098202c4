"""Figures 3 and 4 of tslt, measured: mass and acceptance by K, from the logits of both models.

Nothing is sampled. At each position of the target's answers (temperature 1), the functions of
`speculation.theory` compute the retained mass 1 − σ, the acceptance of one candidate
β̂ = 1 − TV(p, q̂), and of two candidates of a tree's node, θ (39). q̂ is the top K of q, renormalised,
as in the paper; or what the protocols `tslt` and `tree` send, which is also quantised.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.model_rows import ModelRows, model_rows
from pilotfish.lab.field.papers.sheet import Row, Value, interval, interval_columns
from pilotfish.lab.field.papers.tslt_plots import draw_acceptance, draw_mass
from pilotfish.lab.field.resampling import resample_weights
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.theory import beta, betas, sigma, theta
from pilotfish.speculation.truncation import truncate

TOKENS = 96
_SIZES = (8, 32, 64, 128, 320, 1024, 3200, 8192)  # and the whole vocabulary
_CANDIDATES = 2  # children of each node of the paper's tree ⟨2,2,2⟩
_ROUNDING = 1e-9  # largest rounding error of a bound
_Values = NDArray[np.float64]
_MeasurePosition = Callable[[ModelRows, int, Sequence[int]], _Values]

_PRINTED_MASS = ({"kept": 320, "mass_printed": 0.85},)


def _mass(rows: ModelRows, position: int, sizes: Sequence[int]) -> _Values:
    """Compute the mass of the top K at one position, f64 [K, 1]."""
    descending = -np.sort(-rows.distribution(1, position))
    masses: _Values = descending.cumsum()[np.array(sizes) - 1, None]
    return masses


def acceptance_at(rows: ModelRows, position: int, sizes: Sequence[int]) -> _Values:
    """Compute the acceptances at one position, f64 [K, 5].

    The columns are one and two candidates, the same with the quantised q̂, and whether the position
    violates Theorem 3.2.
    """
    p, q = rows.distribution(0, position), rows.distribution(1, position)
    order = np.argsort(-q, kind="stable")
    untruncated = float(beta(p, q))
    values = []
    for top_k in sizes:
        top = order[:top_k]
        exact = _acceptances(p, top, q[top] / q[top].sum())
        sent = truncate(rows.logits[1][position], Sampling(temperature=1.0, top_k=top_k)).row(0)
        shipped = _acceptances(p, sent.support, sent.probabilities())
        beyond = abs(exact[0] - untruncated) - sigma(q, top) > _ROUNDING
        values.append([*exact, *shipped, beyond])
    return np.array(values, dtype=np.float64)


def _acceptances(
    p: _Values, ids: NDArray[np.integer] | slice, q_hat: _Values
) -> tuple[float, float]:
    """Compute the acceptance of one and of two candidates from q̂, which has only these tokens.

    All other tokens count as one token: no draft is among them, so only their sum under p matters.
    """
    inside = p[ids]
    lumped_p = np.append(inside, max(0.0, 1.0 - inside.sum()))
    each = betas(lumped_p, np.append(q_hat, 0.0), _CANDIDATES)
    return float(each[0]), float(theta(each))


def _all_sizes(vocabulary: int) -> list[int]:
    return [*(size for size in _SIZES if size < vocabulary), vocabulary]


def _by_prompt(
    bench: Bench, sizes: Sequence[int], measure: _MeasurePosition
) -> tuple[_Values, _Values]:
    """Sum the values over each prompt's positions, f64 [prompts, K, values]; count positions."""
    sums, counts = [], []
    for rows in model_rows(bench, tokens=TOKENS):
        sums.append(sum(measure(rows, position, sizes) for position in range(len(rows))))
        counts.append(float(len(rows)))
    return np.array(sums), np.array(counts)


def _measured(
    bench: Bench,
    done: Container[Identity],
    *,
    measure: _MeasurePosition,
    row: Callable[[_Values, _Values], Mapping[str, Value]],
) -> Iterator[Row]:
    """Yield a row for each K.

    row: function of the sums over all prompts, f64 [values], and of the means in each resample, f64
    [values, 1 + resamples].
    """
    vocabulary = bench.pair.target.vocab_size
    sizes = [top_k for top_k in _all_sizes(vocabulary) if (top_k,) not in done]
    if not sizes:
        return
    sums, counts = _by_prompt(bench, sizes, measure)
    weights = resample_weights(len(counts))
    for index, top_k in enumerate(sizes):
        means = (weights @ sums[:, index]) / (weights @ counts)[:, None]
        yield {
            "kept": top_k,
            "share": top_k / vocabulary,
            "n": len(counts),
            "positions": int(counts.sum()),
            **row(sums[:, index].sum(axis=0), means.T),
        }


def _mass_row(_: _Values, means: _Values) -> Mapping[str, Value]:
    return interval("mass", means[0])


def _acceptance_row(sums: _Values, means: _Values) -> Mapping[str, Value]:
    names = ("chain", "tree", "chain_shipped", "tree_shipped")
    values: dict[str, Value] = {}
    for name, mean in zip(names, means, strict=False):
        values |= interval(name, mean)
    return {**values, "beyond_bound": int(sums[len(names)])}


_BEGIN: dict[str, tuple[str, int | None]] = {"kept": ("K", 0), "share": ("K/|V|", 4)}
_END: dict[str, tuple[str, int | None]] = {"n": ("prompts", 0), "positions": ("positions", 0)}

FIGURE3 = Figure(
    key="figure3",
    title="Figure 3, measured: mass of the drafter's top K tokens",
    columns={
        **_BEGIN,
        **interval_columns("mass", "mass", 4),
        "mass_printed": ("printed", 2),
        **_END,
    },
    identity=("kept",),
    printed=lambda: _PRINTED_MASS,
    measure=partial(_measured, measure=_mass, row=_mass_row),
    draw=partial(draw_mass, _PRINTED_MASS),
    minutes=2.0,
    note="The paper's vocabulary has 32,000 tokens, so its K = 320 is a share of 0.01.",
)
FIGURE4 = Figure(
    key="figure4",
    title="Figure 4, measured: acceptance by K, of a chain (SC) and of a tree ⟨2,2,2⟩ (MC)",
    columns={
        **_BEGIN,
        **interval_columns("chain", "SC", 4),
        **interval_columns("tree", "MC", 4),
        "chain_shipped": ("SC, as sent", 4),
        "tree_shipped": ("MC, as sent", 4),
        "beyond_bound": ("beyond bound", 0),
        **_END,
    },
    identity=("kept",),
    measure=partial(_measured, measure=acceptance_at, row=_acceptance_row),
    draw=draw_acceptance,
    minutes=2.0,
    note=(
        "The paper prints no numbers. As sent: with the quantised q̂ of the protocols tslt and "
        "tree. Beyond bound: positions that violate Theorem 3.2, |β̂ − β| ≤ σ."
    ),
)

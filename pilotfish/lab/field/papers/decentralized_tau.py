"""Measure decentralized's ablation of τ (§3.2): acceptance and deviation, from both models' logits.

In:  a bench. Out: a row for each λ and τ, with the built-in λ and with λ without key tokens.

Nothing is sampled but the target's answers at temperature 1. At each of their positions the rule of
`adaptive` has an exact acceptance and an exact deviation from the target's law
(`speculation.adaptive`). The tokens of a round with γ drafts are expected values: the mean over all
starts i of 1 + Σ_{k ≤ γ} Π_{j < k} α_{i+j}, as `judge calibrate` computes them. The time of a round
does not depend on τ, so the ratio of the tokens of a round is also the gain in speed.
"""

from collections.abc import Container, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.model_rows import ModelRows, model_rows
from pilotfish.lab.field.papers.sheet import Row, Value, interval, interval_columns
from pilotfish.lab.field.resampling import resample_weights
from pilotfish.speculation.adaptive import HIGHEST_RATIO, DistributionComparison, Relaxation
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.truncation import truncate
from pilotfish.wire.protocols.adaptive import BUILT_IN, Adaptive

TOKENS = 48  # tokens of an answer
TAUS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
LAMBDAS = {
    "built in": (BUILT_IN.lambda1, BUILT_IN.lambda2, BUILT_IN.lambda3),
    "no key token": (HIGHEST_RATIO, 1.0, 0.0),
}
WINDOWS = (4, 8)
_Values = NDArray[np.float64]


def relaxations() -> dict[tuple[str, float], Relaxation]:
    """Return the relaxation of each row, by λ's name and τ."""
    return {
        (name, tau): Relaxation(tau=tau, lambda1=first, lambda2=second, lambda3=third)
        for name, (first, second, third) in LAMBDAS.items()
        for tau in TAUS
    }


def read_answer(rows: ModelRows, rules: Sequence[Relaxation]) -> _Values:
    """Compute acceptance, deviation and share of key tokens, f64 [rules, positions, 3].

    The share of key tokens is the probability that a token drawn from q̂ is key.
    """
    law = Sampling(temperature=1.0, top_k=Adaptive.default_top_k)
    values = np.empty((len(rules), len(rows), 3))
    for position in range(len(rows)):
        row = truncate(rows.logits[1][position], law).row(0)
        comparison = DistributionComparison(rows.distribution(0, position), row)
        for index, rule in enumerate(rules):
            mass = comparison.accepted_mass(rule)
            key = comparison.drafter @ comparison.key_tokens(rule)
            values[index, position] = mass.sum(), comparison.deviation(mass), key
    return values


def expected_tokens(acceptance: _Values, window: int) -> _Values:
    """Compute the expected tokens of a round, f64 [rules], summed over its starts.

    acceptance: f64 [rules, positions]. A start has ``window`` positions after it.
    """
    starts = max(0, acceptance.shape[1] - window + 1)
    total = np.full(len(acceptance), float(starts))
    for start in range(starts):
        total += np.cumprod(acceptance[:, start : start + window], axis=1).sum(axis=1)
    return total


def measure(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    """Yield a row for each λ and τ that is not in ``done``; all are measured together."""
    rules = relaxations()
    missing = [name for name in rules if name not in done]
    if not missing:
        return
    # sums of each prompt, f64 [rules, values], and its numbers of positions and starts
    sums, counts = [], []
    for rows in model_rows(bench, tokens=TOKENS):
        values = read_answer(rows, list(rules.values()))
        tokens = [expected_tokens(values[:, :, 0], window) for window in WINDOWS]
        sums.append(np.column_stack([values.sum(axis=1), *tokens]))
        starts = [max(0, len(rows) - window + 1) for window in WINDOWS]
        counts.append([len(rows)] * 3 + starts)
    weights = resample_weights(len(sums))  # [1 + resamples, prompts]
    totals = np.tensordot(weights, np.array(sums), 1)  # [1 + resamples, rules, values]
    means = totals / (weights @ np.array(counts, np.float64))[:, None]
    for name in missing:
        index, strict = list(rules).index(name), list(rules).index((name[0], 0.0))
        row: dict[str, Value] = {"lambdas": name[0], "tau": name[1], "n": len(sums)}
        row["positions"] = int(np.array(counts)[:, 0].sum())
        columns = dict(zip(("acceptance", "deviation", "key"), means[:, index, :3].T, strict=True))
        for at, window in enumerate(WINDOWS, 3):
            columns[f"tokens_{window}"] = means[:, index, at]
            columns[f"longer_{window}"] = means[:, index, at] / means[:, strict, at]
        for column, values in columns.items():
            row |= interval(column, values)
        yield row


TAU = Figure(
    key="tau",
    title="Ablation of τ (§3.2), measured: `adaptive` at temperature 1",
    columns={
        "lambdas": ("λ", None),
        "tau": ("τ", 1),
        "key": ("key", 2),
        **interval_columns("acceptance", "α", 3),
        **interval_columns("deviation", "deviation", 4),
        "tokens_4": ("γ = 4", 2),
        **interval_columns("longer_4", "over τ = 0", 3),
        "tokens_8": ("γ = 8", 2),
        "longer_8": ("over τ = 0", 3),
        "n": ("prompts", 0),
    },
    identity=("lambdas", "tau"),
    measure=measure,
    minutes=1.0,
    note=(
        "The paper prints no numbers of this ablation but 15 to 20 % more speed for τ from 0.1 to "
        "0.3, and about 2.6× at most. key: share of drafts that are key tokens. Deviation: total "
        "variation of a position from the target's law, which the paper does not print. γ: "
        "expected tokens of a round with γ drafts; over τ = 0 is also the gain in speed."
    ),
)

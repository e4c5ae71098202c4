"""Estimate the acceptance of each level of a window, at any K and with any number of candidates.

In:  the rounds of all plans. Out: for a plan, the probability that a level's draft is accepted.

K is the number of tokens that the drafter's distributions keep, and k the number of candidates of
each node of a tree's level. `acceptance` counts what was accepted, by protocol and k. Rounds at any
K and k inform all others: counts are converted by the models of `speculation.cut_mass` (K) and
`speculation.more_candidates` (k). Both need σ(K), which the device measures (`top_k`).
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Final, NamedTuple

from pilotfish.device_runtime.choice.acceptance import Acceptance, Lost, level_runs
from pilotfish.device_runtime.choice.top_k import CutMasses
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.cut_mass import acceptance_change
from pilotfish.speculation.more_candidates import acceptance_of

_TYPICAL_LEVELS: Final = 4  # the first levels, from whose mean α changes are computed


class _Change(NamedTuple):
    """Changes of the acceptance of k candidates.

    by_top_k: at the plan's K, less that at the protocol's default K. by_candidates: of k candidates
    at the default K, less that of one.
    """

    by_top_k: float
    by_candidates: float


_NO_CHANGE: Final = _Change(0.0, 0.0)


class WindowAcceptance:
    """Acceptance by level of a window. prior: α before any evidence; vocabulary: its size."""

    def __init__(self, prior: float, vocabulary: int) -> None:
        self._acceptance, self._cut_masses = Acceptance(prior), CutMasses(vocabulary)
        self._forget()

    def _forget(self) -> None:
        """Drop the cached estimates."""
        self._changes: dict[tuple[str, float, float, int, int], _Change] = {}
        self._last_plan: Plan | None = None
        self._last_values: tuple[float, ...] = ()

    def add(self, plan: Plan, rounds: Sequence[Round]) -> None:
        """Add the rounds of an answer, complete or not."""
        self._forget()
        self._cut_masses.add(plan, rounds)
        lost = {}
        for _, _, candidates in level_runs(plan):
            change = self._change(plan, candidates)
            lost[candidates] = Lost(-change.by_top_k, -change.by_top_k - change.by_candidates)
        self._acceptance.add(plan, rounds, lost)
        self._forget()

    def by_depth(self, plan: Plan) -> tuple[float, ...]:
        """Estimate the acceptance at each depth, for drafts that reach this depth.

        Has a value for each level of a plan with windows, and `MAX_WINDOW` values for a stream.
        """
        if plan is not self._last_plan:
            self._last_plan, self._last_values = plan, self._estimate(plan)
        return self._last_values

    def _estimate(self, plan: Plan) -> tuple[float, ...]:
        values: list[float] = []
        for begin, end, candidates in level_runs(plan):
            sigma = self._default_sigma(plan) if candidates > 1 else 0.0
            level = self._acceptance.by_depth(plan, candidates, sigma)[begin:end]
            change = self._change(plan, candidates).by_top_k
            values += [value + change for value in level] if change else level
        # rounds at another K or k count as the models convert them, which may err
        return tuple([0.0 if value < 0.0 else 1.0 if value > 1.0 else value for value in values])

    def _default_sigma(self, plan: Plan) -> float:
        """Return σ at the protocol's default K."""
        default = 0 if plan.exchange is None else plan.exchange.default_top_k
        return self._cut_masses.sigma(plan, default)

    def _change(self, plan: Plan, candidates: int) -> _Change:
        """Return the changes for this number of candidates, at a typical level."""
        sampling, exchange = plan.drafting.sampling, plan.exchange
        top_k = default = 0 if exchange is None else exchange.default_top_k
        if default and sampling.top_k and not sampling.greedy:
            top_k = sampling.top_k
        if top_k == default and candidates == 1:
            return _NO_CHANGE
        key = plan.protocol, sampling.temperature, sampling.min_p, top_k, candidates
        if key not in self._changes:
            self._changes[key] = self._compute_change(plan, top_k, candidates)
        return self._changes[key]

    def _compute_change(self, plan: Plan, top_k: int, candidates: int) -> _Change:
        sigma = self._default_sigma(plan)
        alpha = fmean(self._acceptance.by_depth(plan)[:_TYPICAL_LEVELS])
        other_sigma = self._cut_masses.sigma(plan, top_k)
        other_alpha = max(0.0, alpha + acceptance_change(alpha, sigma, other_sigma))
        several = acceptance_of(candidates, alpha, sigma)
        return _Change(
            acceptance_of(candidates, other_alpha, other_sigma) - several, several - alpha
        )

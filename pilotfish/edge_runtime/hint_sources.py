"""Hint sources of a generation under `ahead`: they propose drafts for the session's next pass.

In:  the hints of each source. Out: when a pass starts, its drafts; when it ends, their outcome.

A pass takes the drafts of one source, the source with the highest expected gain. The gain is the
sum of the source's path acceptances times its reliability in this session, minus the drafts' cost.
Repeats in the text are compared with the committed tokens even if no pass took them, so they are
used only in texts in which earlier repeats were right. The same holds for the request's prediction,
which any generation under `ahead` may have.

Law: a source never costs the edge more than its budget, even if it claims false acceptances. The
budget is in tokens. Each draft is charged its cost (`edge_runtime.draft_cost`), and each accepted
draft earns one token. The budget also grows by 0.01 tokens with each committed token, so that a bad
source is tried again now and then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pilotfish.drafting.ahead import Proposal
from pilotfish.drafting.lookup import TextHints
from pilotfish.drafting.prediction import PredictionHints
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols import SpeculationProtocol
from pilotfish.wire.protocols.ahead import (
    DEVICE,
    EDGE,
    MOST_DRAFTS,
    PREDICTION,
    TEXT,
    Ahead,
    HintChain,
)
from pilotfish.wire.protocols.protocol import NO_IDS, Ids

_FIRST_BALANCE, _MOST_BALANCE = 4.0, 8.0  # initial and highest balance of a budget (tokens)
_ALLOWANCE = 0.01  # tokens that a budget earns with each committed token
_FADE = 0.95  # factor by which the weight of older passes shrinks at each pass
_PRIOR_TOKENS = 3.0  # initial value of the promised and of the accepted tokens
_MOST_RELIABILITY = 1.5  # upper limit of reliability
_FORGET = 0.01  # share by which both values return to their initial value, per committed token
_FIRST_TOKENS_PER_PASS = 2.0  # initial average of tokens per pass


class HintSource(Protocol):
    """Source of hints: proposes drafts, and is updated with the session's committed tokens."""

    def propose(self, limit: int) -> Proposal:
        """Return at most ``limit`` drafts that follow the committed tokens; may be empty."""

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Update the source with committed tokens."""


class RequestedHints(HintSource, Protocol):
    """Source that drafts only up to the last token that the device has requested."""

    def set_requested_end(self, last: int) -> None:
        """Limit drafts to positions before ``last``; 0 stops drafting."""


class DeviceHints:
    """Hints that the device has sent, stored in ``chain``."""

    def __init__(self, chain: HintChain) -> None:
        self.chain = chain

    def propose(self, limit: int) -> Proposal:
        """Return the first ``limit`` drafts of the chain."""
        return Proposal(self.chain.ids[:limit], self.chain.acceptances[:limit])

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Drop committed tokens from the chain."""
        self.chain.drop_committed(ids)


@dataclass(slots=True)
class SourceBudget:
    """Budget (``balance``, in tokens) and reliability of a source in this session."""

    source: HintSource
    name: str
    balance: float = _FIRST_BALANCE
    _accepted: float = _PRIOR_TOKENS
    _promised: float = _PRIOR_TOKENS

    @property
    def reliability(self) -> float:
        """Accepted tokens divided by the tokens that the acceptances promised."""
        return min(_MOST_RELIABILITY, self._accepted / self._promised)

    def record_pass(self, drafted: int, accepted: int, promised: float, cost: float) -> None:
        """Record a pass with drafts of this source.

        promised: sum of the path acceptances. cost: cost of each draft, in tokens.
        """
        self.balance = min(_MOST_BALANCE, self.balance + accepted - drafted * cost)
        self._accepted = _FADE * self._accepted + (1.0 - _FADE) * accepted
        self._promised = _FADE * self._promised + (1.0 - _FADE) * promised

    def record_tokens(self, tokens: int) -> None:
        """Record the number of tokens that the session committed."""
        self.balance = min(_MOST_BALANCE, self.balance + _ALLOWANCE * tokens)
        self._accepted += _FORGET * tokens * (_PRIOR_TOKENS - self._accepted)
        self._promised += _FORGET * tokens * (_PRIOR_TOKENS - self._promised)

    def copy_from(self, previous: "SourceBudget") -> None:
        """Copy the source's statistics from the session's previous generation."""
        self.balance, self._accepted, self._promised = (
            previous.balance,
            previous._accepted,
            previous._promised,
        )


class AttachedHints(NamedTuple):
    """Drafts of a pass.

    budget: budget of the drafts' source; None: no drafts. path_acceptance: for each draft, the
    probability that it and all drafts before it are accepted. cost: cost of each draft, in tokens.
    """

    budget: SourceBudget | None
    ids: Sequence[int]
    path_acceptance: Sequence[float]
    cost: float


NO_HINTS = AttachedHints(None, (), (), 0.0)


@dataclass
class HintSources:
    """Sources of one generation, and the drafts of its pass under way."""

    budgets: Sequence[SourceBudget]
    chain: HintChain | None  # the device's hints; None: the device sends no hints
    trail: RequestedHints | None = None  # the edge drafter's source; ``budgets`` has it, too
    tokens_per_pass: float = _FIRST_TOKENS_PER_PASS  # recent average of committed tokens per pass
    attached: AttachedHints = NO_HINTS
    _best: AttachedHints = NO_HINTS  # the latest proposal

    def set_requested_end(self, last: int) -> None:
        """Limit the edge drafter's drafts to positions before ``last``; 0 stops drafting."""
        if self.trail is not None:
            self.trail.set_requested_end(last)

    def add_device_hint(
        self, start: int, digest: bytes, frames: Sequence[Buffer], vocab_size: int
    ) -> bool:
        """Add a hint of the device to its chain; return False if the chain does not take it."""
        return self.chain is not None and self.chain.add(start, digest, frames, vocab_size)

    def propose(self, limit: int, cost: float) -> Sequence[float]:
        """Choose the next pass's proposal: at most ``limit`` drafts at ``cost`` tokens each.

        Returns the path acceptance of each draft.
        """
        self.attached = NO_HINTS
        limit = min(limit, MOST_DRAFTS)
        proposals = [_propose(budget, limit, cost) for budget in self.budgets]
        best = max(proposals, key=_gain, default=NO_HINTS)
        self._best = best if _gain(best) > 0.0 else NO_HINTS
        return self._best.path_acceptance

    def attach(self, count: int) -> Sequence[int]:
        """Attach the first ``count`` drafts of the latest proposal to the pass; return them."""
        best = self._best
        self.attached = best._replace(
            ids=best.ids[:count], path_acceptance=best.path_acceptance[:count]
        )
        return self.attached.ids

    def record_pass(self, ids: Sequence[int], accepted: int) -> AttachedHints:
        """Record a pass's committed tokens and accepted drafts; return its attached hints."""
        attached, self.attached = self.attached, NO_HINTS
        self.tokens_per_pass = _FADE * self.tokens_per_pass + (1.0 - _FADE) * len(ids)
        if attached.budget is not None:
            attached.budget.record_pass(
                len(attached.ids), accepted, sum(attached.path_acceptance), attached.cost
            )
        for budget in self.budgets:
            budget.record_tokens(len(ids))
            budget.source.record_tokens(ids)
        return attached


def _gain(attached: AttachedHints) -> float:
    """Return the expected number of accepted drafts minus the drafts' cost, in tokens."""
    if attached.budget is None:
        return 0.0
    return (
        sum(attached.path_acceptance) * attached.budget.reliability
        - len(attached.ids) * attached.cost
    )


def _propose(budget: SourceBudget, limit: int, cost: float) -> AttachedHints:
    """Return the drafts of a source that are worth their cost and within the budget."""
    if cost > 0.0:
        limit = int(min(limit, budget.balance / cost))
    if limit <= 0:
        return NO_HINTS
    proposal = budget.source.propose(limit)
    product, path_acceptance = 1.0, []
    for acceptance in proposal.acceptance:
        product *= acceptance
        if product * budget.reliability < cost:
            break
        path_acceptance.append(product)
    return AttachedHints(budget, proposal.ids[: len(path_acceptance)], path_acceptance, cost)


def create_hint_sources(
    protocol: SpeculationProtocol[Any] | None,
    committed: CommittedTokens,
    window: int,
    make_trail: Callable[[], RequestedHints] | None = None,
    previous: HintSources | None = None,
    prediction: Ids = NO_IDS,
) -> HintSources | None:
    """Create the sources of a generation; return None if its protocol takes no hints.

    window: upper limit of stored hints of the device (tokens). make_trail: function that starts the
    edge drafter. previous: sources of the session's previous generation; its statistics are copied.
    prediction: ids that the answer is expected to have, u32 [n].
    """
    if not isinstance(protocol, Ahead):
        return None
    budgets: list[SourceBudget] = []
    chain: HintChain | None = None
    trail: RequestedHints | None = None
    if len(prediction):
        budgets.append(SourceBudget(PredictionHints(prediction), PREDICTION))
    if protocol.device_drafts:
        chain = HintChain(committed, window)
        budgets.append(SourceBudget(DeviceHints(chain), DEVICE))
    if protocol.edge_drafts:
        budgets.append(SourceBudget(TextHints(committed), TEXT))
        if make_trail is not None:
            trail = make_trail()
            budgets.append(SourceBudget(trail, EDGE))
    for budget in budgets:
        for former in previous.budgets if previous is not None else ():
            if former.name == budget.name:
                budget.copy_from(former)
    return HintSources(budgets, chain, trail)

"""Hints of a generation under `ahead`: whose drafts ride on the session's next pass, and how many.

In:  the hints of each source. Out: at a pass's take-off, drafts; at its end, what became of them.

A pass has drafts of one source: of that whose offer promises most tokens, times what its promises
have been worth in this session. Repeats of the text are compared with what is committed whether
they are taken or not, so that they are taken only where they have shown to pay.

Law: no source costs the edge more than its purse, whatever it claims. A purse holds tokens: a draft
takes its price out of it (`edge_runtime.draft_cost`), and an accepted one puts a token in. A source that
is wrong all the time is thus soon not looked at, but for a hundredth of the tokens made since; by
and by its promises are believed again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pilotfish.speculation.acceptance import REPEAT_PRIOR, AcceptanceEstimator
from pilotfish.speculation.prompt_lookup import LookupMatch, find_match
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols import SpeculationProtocol
from pilotfish.wire.protocols.ahead import DEVICE, EDGE, MOST_DRAFTS, TEXT, Ahead, HintChain

_FIRST_BALANCE, _MOST_BALANCE = 4.0, 8.0  # tokens of a purse
_ALLOWANCE = 0.01  # for each token that the session commits
_FADE = 0.95  # a pass with drafts of the source
_PRIOR_TOKENS = 3.0  # promised tokens that are taken as kept at first
_MOST_RELIABILITY = 1.5  # the most that a promise counts for
_FORGET = 0.01  # of what promises were worth, for each token that the session commits
_MOST_REST = 4  # passes: the longest between two searches for repeats
_FIRST_TOKENS_PER_PASS = 2.0  # tokens a pass that are expected at first


class Proposal(NamedTuple):
    """Drafts behind the committed tokens, and the odds of each, given those before it."""

    ids: Sequence[int]
    acceptance: Sequence[float]


class HintSource(Protocol):
    """Where hints come from: it follows the session's committed tokens."""

    def propose(self, limit: int) -> Proposal:
        """Return at most so many drafts behind the committed tokens; none is an empty offer."""

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Note what was committed."""


class RequestedHints(HintSource, Protocol):
    """A source that drafts only as far as the device has requested tokens."""

    def set_requested_end(self, last: int) -> None:
        """Draft tokens before position ``last`` only; 0 stops drafting."""


class DeviceHints:
    """What the device has sent. chain: where it is kept."""

    def __init__(self, chain: HintChain) -> None:
        self.chain = chain

    def propose(self, limit: int) -> Proposal:
        """Return the first of the chain."""
        return Proposal(self.chain.ids[:limit], self.chain.acceptances[:limit])

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Drop from the chain what was committed."""
        self.chain.drop_committed(ids)


class TextHints:
    """What followed the last time that the text's last tokens stood in it: no model is needed.

    After searches that brought nothing it rests for a pass, then for two, at most for four.
    """

    def __init__(self, committed: CommittedTokens) -> None:
        self._committed = committed
        self._estimator = AcceptanceEstimator(REPEAT_PRIOR)
        self._match: LookupMatch | None = None
        self._expected: list[int] = []
        self._missed = self._rest = 0

    def propose(self, limit: int) -> Proposal:
        """Return what is expected to be repeated."""
        self._update_match()
        ids = self._expected[:limit]
        return Proposal(
            ids, self._estimator.estimate_each([self._match_length + at for at in range(len(ids))])
        )

    @property
    def _match_length(self) -> int:
        return self._match.length if self._match is not None else 0

    def _update_match(self) -> None:
        """Find the place in the text that may be repeated, unless it is found already."""
        ids = self._committed.ids
        if self._match is not None and self._match.end == len(ids):
            return
        continued = self._match.extend(ids) if self._match is not None else None
        self._expected = []
        if continued is None and self._rest > 0:
            self._match = None
            return
        self._match = continued or find_match(ids)
        if self._match is not None:
            self._expected = self._match.continuation(ids, MOST_DRAFTS).tolist()

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Learn by what was committed, whether these drafts were taken or not."""
        agreed = 0
        for at, (expected, id) in enumerate(zip(self._expected, ids, strict=False)):
            self._estimator.update(self._match_length + at, expected == id)
            if expected != id:
                break
            agreed += 1
        # where nothing repeats, not every pass is worth a search
        self._rest -= 1
        if agreed:
            self._missed = 0
        elif self._rest < 0:
            self._missed += 1
            self._rest = min(self._missed, _MOST_REST)
        self._expected = []


@dataclass(slots=True)
class SourceBudget:
    """A source, and what its promises were worth in this session."""

    source: HintSource
    name: str
    balance: float = _FIRST_BALANCE
    _accepted: float = _PRIOR_TOKENS
    _promised: float = _PRIOR_TOKENS

    @property
    def reliability(self) -> float:
        """Tokens won for each that the odds promised."""
        return min(_MOST_RELIABILITY, self._accepted / self._promised)

    def record_pass(self, drafted: int, accepted: int, promised: float, cost: float) -> None:
        """Settle a pass with drafts of this source."""
        self.balance = min(_MOST_BALANCE, self.balance + accepted - drafted * cost)
        self._accepted = _FADE * self._accepted + (1.0 - _FADE) * accepted
        self._promised = _FADE * self._promised + (1.0 - _FADE) * promised

    def record_tokens(self, tokens: int) -> None:
        """Note that the session committed so many tokens."""
        self.balance = min(_MOST_BALANCE, self.balance + _ALLOWANCE * tokens)
        self._accepted += _FORGET * tokens * (_PRIOR_TOKENS - self._accepted)
        self._promised += _FORGET * tokens * (_PRIOR_TOKENS - self._promised)

    def copy_from(self, previous: "SourceBudget") -> None:
        """Go on as in the session's last generation."""
        self.balance, self._accepted, self._promised = (
            previous.balance,
            previous._accepted,
            previous._promised,
        )


class AttachedHints(NamedTuple):
    """The drafts of a pass: whose, which, their odds along the path, and the price of each."""

    budget: SourceBudget | None
    ids: Sequence[int]
    path_acceptance: Sequence[float]
    cost: float


NO_HINTS = AttachedHints(None, (), (), 0.0)


@dataclass
class HintSources:
    """The sources of one generation, and what of theirs is under way."""

    budgets: Sequence[SourceBudget]
    chain: HintChain | None  # of the device's; None: it is to send none
    trail: RequestedHints | None = None  # the edge drafter's, which is among the budgets
    tokens_per_pass: float = _FIRST_TOKENS_PER_PASS  # tokens a pass lately
    attached: AttachedHints = NO_HINTS
    _best: AttachedHints = NO_HINTS  # of the last offer

    def set_requested_end(self, last: int) -> None:
        """Note that the tokens before this position are asked for; 0: none any more."""
        if self.trail is not None:
            self.trail.set_requested_end(last)

    def add_device_hint(
        self, start: int, digest: bytes, frames: Sequence[Buffer], vocab_size: int
    ) -> bool:
        """Take in a hint of the device, as `HintChain.add`."""
        return self.chain is not None and self.chain.add(start, digest, frames, vocab_size)

    def propose(self, limit: int, cost: float) -> Sequence[float]:
        """Choose what to offer the next pass, at most ``most`` drafts, each at this price.

        Returns the odds of each, along the path.
        """
        self.attached = NO_HINTS
        limit = min(limit, MOST_DRAFTS)
        proposals = [_propose(budget, limit, cost) for budget in self.budgets]
        best = max(proposals, key=_gain, default=NO_HINTS)
        self._best = best if _gain(best) > 0.0 else NO_HINTS
        return self._best.path_acceptance

    def attach(self, count: int) -> Sequence[int]:
        """Take the first ``count`` drafts of the last offer onto the pass; returns them."""
        best = self._best
        self.attached = best._replace(
            ids=best.ids[:count], path_acceptance=best.path_acceptance[:count]
        )
        return self.attached.ids

    def record_pass(self, ids: Sequence[int], accepted: int) -> AttachedHints:
        """Note what the pass committed, and how many of its drafts; returns what it had taken."""
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
    """Return the tokens that drafts are expected to win, less their price."""
    if attached.budget is None:
        return 0.0
    return (
        sum(attached.path_acceptance) * attached.budget.reliability
        - len(attached.ids) * attached.cost
    )


def _propose(budget: SourceBudget, limit: int, cost: float) -> AttachedHints:
    """Return the drafts of a source that are worth their price, and that its purse can pay."""
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
) -> HintSources | None:
    """Return the sources of a generation; None if it takes no hints.

    window: the most hints of a device that are kept. follow: has the edge's own drafter follow
    it. before: of the session's last generation: what a source has shown there still counts.
    """
    if not isinstance(protocol, Ahead):
        return None
    budgets: list[SourceBudget] = []
    chain: HintChain | None = None
    trail: RequestedHints | None = None
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

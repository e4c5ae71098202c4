"""Hints of a generation under `ahead`: whose drafts ride on the session's next pass, and how many.

In:  the hints of each source. Out: at a pass's take-off, drafts; at its end, what became of them.

A pass has drafts of one source: of that whose offer promises most tokens, times what its promises
have been worth in this session. Repeats of the text are compared with what is committed whether
they are taken or not, so that they are taken only where they have shown to pay.

Law: no source costs the edge more than its purse, whatever it claims. A purse holds tokens: a draft
takes its price out of it (`edge_runtime.price`), and an accepted one puts a token in. A source that
is wrong all the time is thus soon not looked at, but for a hundredth of the tokens made since; by
and by its promises are believed again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pilotfish.speculation.odds import REPEAT_PRIOR, AcceptanceEstimator
from pilotfish.speculation.repeats import LookupMatch, find_match
from pilotfish.wire.committed import CommittedTokens
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols import SpeculationProtocol
from pilotfish.wire.protocols.ahead import DEVICE, EDGE, MOST_DRAFTS, TEXT, Ahead, HintChain

if TYPE_CHECKING:
    from pilotfish.edge_runtime.beside import Trail

_FIRST, _MOST = 4.0, 8.0  # tokens of a purse
_ALLOWANCE = 0.01  # for each token that the session commits
_FADE = 0.95  # a pass with drafts of the source
_KEPT = 3.0  # promised tokens that are taken as kept at first
_TRUST = 1.5  # the most that a promise counts for
_FORGET = 0.01  # of what promises were worth, for each token that the session commits
_REST = 4  # passes: the longest between two searches for repeats
_PACE = 2.0  # tokens a pass that are expected at first


class Offer(NamedTuple):
    """Drafts behind the committed tokens, and the odds of each, given those before it."""

    ids: Sequence[int]
    odds: Sequence[float]


class HintSource(Protocol):
    """Where hints come from: it follows the session's committed tokens."""

    def offer(self, most: int) -> Offer:
        """Return at most so many drafts behind the committed tokens; none is an empty offer."""

    def meet(self, ids: Sequence[int]) -> None:
        """Note what was committed."""


class DeviceHints:
    """What the device has sent. chain: where it is kept."""

    def __init__(self, chain: HintChain) -> None:
        self.chain = chain

    def offer(self, most: int) -> Offer:
        """Return the first of the chain."""
        return Offer(self.chain.ids[:most], self.chain.acceptances[:most])

    def meet(self, ids: Sequence[int]) -> None:
        """Drop from the chain what was committed."""
        self.chain.drop_committed(ids)


class TextHints:
    """What followed the last time that the text's last tokens stood in it: no model is needed.

    After searches that brought nothing it rests for a pass, then for two, at most for four.
    """

    def __init__(self, committed: CommittedTokens) -> None:
        self._committed = committed
        self._odds = AcceptanceEstimator(REPEAT_PRIOR)
        self._repeat: LookupMatch | None = None
        self._expected: list[int] = []
        self._missed = self._resting = 0

    def offer(self, most: int) -> Offer:
        """Return what is expected to be repeated."""
        self._look()
        ids = self._expected[:most]
        return Offer(ids, self._odds.estimate_each([self._matched + at for at in range(len(ids))]))

    @property
    def _matched(self) -> int:
        return self._repeat.length if self._repeat is not None else 0

    def _look(self) -> None:
        """Find the place in the text that may be repeated, unless it is found already."""
        ids = self._committed.ids
        if self._repeat is not None and self._repeat.end == len(ids):
            return
        going = self._repeat.extend(ids) if self._repeat is not None else None
        self._expected = []
        if going is None and self._resting > 0:
            self._repeat = None
            return
        self._repeat = going or find_match(ids)
        if self._repeat is not None:
            self._expected = self._repeat.continuation(ids, MOST_DRAFTS).tolist()

    def meet(self, ids: Sequence[int]) -> None:
        """Learn by what was committed, whether these drafts were taken or not."""
        agreed = 0
        for at, (expected, id) in enumerate(zip(self._expected, ids, strict=False)):
            self._odds.update(self._matched + at, expected == id)
            if expected != id:
                break
            agreed += 1
        # where nothing repeats, not every pass is worth a search
        self._resting -= 1
        if agreed:
            self._missed = 0
        elif self._resting < 0:
            self._missed += 1
            self._resting = min(self._missed, _REST)
        self._expected = []


@dataclass(slots=True)
class Account:
    """A source, and what its promises were worth in this session."""

    source: HintSource
    name: str
    purse: float = _FIRST
    _kept: float = _KEPT
    _promised: float = _KEPT

    @property
    def trust(self) -> float:
        """Tokens won for each that the odds promised."""
        return min(_TRUST, self._kept / self._promised)

    def landed(self, drafted: int, accepted: int, promised: float, price: float) -> None:
        """Settle a pass with drafts of this source."""
        self.purse = min(_MOST, self.purse + accepted - drafted * price)
        self._kept = _FADE * self._kept + (1.0 - _FADE) * accepted
        self._promised = _FADE * self._promised + (1.0 - _FADE) * promised

    def went_on(self, tokens: int) -> None:
        """Note that the session committed so many tokens."""
        self.purse = min(_MOST, self.purse + _ALLOWANCE * tokens)
        self._kept += _FORGET * tokens * (_KEPT - self._kept)
        self._promised += _FORGET * tokens * (_KEPT - self._promised)

    def like(self, before: "Account") -> None:
        """Go on as in the session's last generation."""
        self.purse, self._kept, self._promised = before.purse, before._kept, before._promised


class Taken(NamedTuple):
    """The drafts of a pass: whose, which, their odds along the path, and the price of each."""

    account: Account | None
    ids: Sequence[int]
    odds: Sequence[float]
    price: float


NOTHING = Taken(None, (), (), 0.0)


@dataclass
class Hints:
    """The sources of one generation, and what of theirs is under way."""

    accounts: Sequence[Account]
    chain: HintChain | None  # of the device's; None: it is to send none
    trail: "Trail | None" = None  # of the edge's own drafter, which is among the accounts
    pace: float = _PACE  # tokens a pass lately
    taken: Taken = NOTHING
    _best: Taken = NOTHING  # of the last offer

    def pulled(self, last: int) -> None:
        """Note that the tokens before this position are asked for; 0: none any more."""
        if self.trail is not None:
            self.trail.pulled(last)

    def told(self, start: int, digest: bytes, frames: Sequence[Buffer], vocab_size: int) -> bool:
        """Take in a hint of the device, as `HintChain.add`."""
        return self.chain is not None and self.chain.add(start, digest, frames, vocab_size)

    def offer(self, most: int, price: float) -> Sequence[float]:
        """Choose what to offer the next pass, at most ``most`` drafts, each at this price.

        Returns the odds of each, along the path.
        """
        self.taken = NOTHING
        most = min(most, MOST_DRAFTS)
        offers = [_offered(account, most, price) for account in self.accounts]
        best = max(offers, key=_gain, default=NOTHING)
        self._best = best if _gain(best) > 0.0 else NOTHING
        return self._best.odds

    def take(self, count: int) -> Sequence[int]:
        """Take the first ``count`` drafts of the last offer onto the pass; returns them."""
        best = self._best
        self.taken = best._replace(ids=best.ids[:count], odds=best.odds[:count])
        return self.taken.ids

    def landed(self, ids: Sequence[int], accepted: int) -> Taken:
        """Note what the pass committed, and how many of its drafts; returns what it had taken."""
        taken, self.taken = self.taken, NOTHING
        self.pace = _FADE * self.pace + (1.0 - _FADE) * len(ids)
        if taken.account is not None:
            taken.account.landed(len(taken.ids), accepted, sum(taken.odds), taken.price)
        for account in self.accounts:
            account.went_on(len(ids))
            account.source.meet(ids)
        return taken


def _gain(taken: Taken) -> float:
    """Return the tokens that drafts are expected to win, less their price."""
    if taken.account is None:
        return 0.0
    return sum(taken.odds) * taken.account.trust - len(taken.ids) * taken.price


def _offered(account: Account, most: int, price: float) -> Taken:
    """Return the drafts of a source that are worth their price, and that its purse can pay."""
    if price > 0.0:
        most = int(min(most, account.purse / price))
    if most <= 0:
        return NOTHING
    offer = account.source.offer(most)
    path, worth = 1.0, []
    for odds in offer.odds:
        path *= odds
        if path * account.trust < price:
            break
        worth.append(path)
    return Taken(account, offer.ids[: len(worth)], worth, price)


def hints_of(
    exchange: SpeculationProtocol[Any] | None,
    committed: CommittedTokens,
    window: int,
    follow: "Callable[[], Trail] | None" = None,
    before: Hints | None = None,
) -> Hints | None:
    """Return the sources of a generation; None if it takes no hints.

    window: the most hints of a device that are kept. follow: has the edge's own drafter follow
    it. before: of the session's last generation: what a source has shown there still counts.
    """
    if not isinstance(exchange, Ahead):
        return None
    accounts: list[Account] = []
    chain = trail = None
    if exchange.device_drafts:
        chain = HintChain(committed, window)
        accounts.append(Account(DeviceHints(chain), DEVICE))
    if exchange.edge_drafts:
        accounts.append(Account(TextHints(committed), TEXT))
        if follow is not None:
            trail = follow()
            accounts.append(Account(trail, EDGE))
    for account in accounts:
        for last in before.accounts if before is not None else ():
            if last.name == account.name:
                account.like(last)
    return Hints(accounts, chain, trail)

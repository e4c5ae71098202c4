"""Hints of a generation under `ahead`: whose drafts ride on the session's next pass, and how many.

In:  the hints of each source. Out: at a pass's take-off, drafts; at its end, what became of them.

Law: no source costs the edge more than its purse, whatever it claims. A purse holds tokens: a draft
takes its price out of it (`edge_runtime.price`), and an accepted one puts a token in. A source that
is wrong all the time is thus soon not looked at, but for a hundredth of the tokens made since.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pilotfish.wire.committed import Committed
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols import Exchange
from pilotfish.wire.protocols.ahead import DEVICE, MOST_DRAFTS, Ahead, HintChain

_FIRST, _MOST = 4.0, 8.0  # tokens of a purse
_ALLOWANCE = 0.01  # for each token that the session commits
_FADE = 0.9  # a pass with drafts of the source
_WEIGHT = 2.0  # passes that the first guess counts for


class Offer(NamedTuple):
    """Drafts behind the committed tokens, and the odds of each, given those before it."""

    ids: Sequence[int]
    odds: Sequence[float]


class Source(Protocol):
    """Where hints come from: it follows the session's committed tokens."""

    def offer(self, most: int) -> Offer:
        """Return at most so many drafts behind the committed tokens; none is an empty offer."""

    def meet(self, ids: Sequence[int], drafted: int, accepted: int) -> None:
        """Note what was committed; drafted: of its own drafts in that pass."""


class DeviceHints:
    """What the device has sent. chain: where it is kept."""

    def __init__(self, chain: HintChain) -> None:
        self.chain = chain

    def offer(self, most: int) -> Offer:
        """Return the first of the chain."""
        return Offer(self.chain.ids[:most], self.chain.odds[:most])

    def meet(self, ids: Sequence[int], drafted: int, accepted: int) -> None:
        """Drop from the chain what was committed."""
        self.chain.meet(ids)


@dataclass(slots=True)
class Account:
    """What a source has shown in this generation. run: tokens that its drafts won a pass."""

    source: Source
    name: str
    run: float
    purse: float = _FIRST
    _won: float = 0.0
    _weight: float = 0.0

    def landed(self, drafted: int, accepted: int, price: float) -> None:
        """Settle a pass with drafts of this source."""
        self.purse = min(_MOST, self.purse + accepted - drafted * price)
        self._won = _FADE * self._won + accepted
        self._weight = _FADE * self._weight + 1.0

    @property
    def expected(self) -> float:
        """Return the tokens that a pass with its drafts is expected to win."""
        return (_WEIGHT * self.run + self._won) / (_WEIGHT + self._weight)


class Taken(NamedTuple):
    """The drafts of a pass: whose, which, and at what price."""

    account: Account | None
    ids: Sequence[int]
    price: float


NOTHING = Taken(None, (), 0.0)


@dataclass
class Hints:
    """The sources of one generation, and what of theirs is under way."""

    accounts: Sequence[Account]
    chain: HintChain | None  # of the device's; None: it is to send none
    taken: Taken = NOTHING

    def told(self, start: int, digest: bytes, frames: Sequence[Buffer], vocab_size: int) -> bool:
        """Take in a hint of the device, as `HintChain.add`."""
        return self.chain is not None and self.chain.add(start, digest, frames, vocab_size)

    def take(self, most: int, price: float) -> Sequence[int]:
        """Choose the drafts of the next pass, at most ``most``: of the source that wins most."""
        self.taken = NOTHING
        most = min(most, MOST_DRAFTS)
        for account in sorted(self.accounts, key=lambda each: -each.expected):
            affordable = most if price <= 0.0 else min(most, int(account.purse / price))
            if affordable > 0 and (
                count := _worth(offer := account.source.offer(affordable), price)
            ):
                self.taken = Taken(account, offer.ids[:count], price)
                break
        return self.taken.ids

    def landed(self, ids: Sequence[int], accepted: int) -> Taken:
        """Note what the pass committed, and how many of its drafts; returns what it had taken."""
        taken, self.taken = self.taken, NOTHING
        for account in self.accounts:
            drafted = len(taken.ids) if account is taken.account else 0
            if drafted:
                account.landed(drafted, accepted, taken.price)
            account.purse = min(_MOST, account.purse + _ALLOWANCE * len(ids))
            account.source.meet(ids, drafted, accepted if drafted else 0)
        return taken


def hints_of(exchange: Exchange[Any] | None, committed: Committed, window: int) -> Hints | None:
    """Return the sources of a generation; None if it takes no hints.

    window: the most hints of a device that are kept.
    """
    if not isinstance(exchange, Ahead):
        return None
    accounts, chain = [], None
    if exchange.device_drafts:
        chain = HintChain(committed, window)
        accounts.append(Account(DeviceHints(chain), DEVICE, run=2.0))
    return Hints(accounts, chain)


def _worth(offer: Offer, price: float) -> int:
    """Count the drafts whose odds, along the path, are worth their price."""
    path = 1.0
    for at, odds in enumerate(offer.odds):
        path *= odds
        if path < price:
            return at
    return min(len(offer.ids), len(offer.odds))

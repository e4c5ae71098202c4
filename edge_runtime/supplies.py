"""What an edge has for protocols: the options that it chose itself, and what they need of it.

In:  a protocol and the `Begin` of a generation. Out: the exchange of that generation.

A protocol names what it ``needs``; `Supplies` finds it by that name. Today there is one such thing,
the decision heads of `wisv`. What a request leaves open in its options is as the edge has it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from pilotfish.edge_runtime.head import DecisionHead, HeadJudge, shipped
from pilotfish.edge_runtime.relaxation_file import read_relaxation
from pilotfish.engines.artifact import Manifest
from pilotfish.wire.errors import MalformedError, PairMismatchError, UnsupportedError
from pilotfish.wire.messages import Begin, DecisionConditions
from pilotfish.wire.protocols import EXCHANGES, Exchange, ProtocolOptions
from pilotfish.wire.protocols.adaptive import RelaxationOptions
from pilotfish.wire.protocols.judged import Judged, JudgingOptions


class Supply(Protocol):
    """One kind of thing that protocols need of an edge."""

    def serves(self, drafter: str, hidden_size: int) -> bool:
        """Whether there is one for a drafter of this origin and this width of states."""

    def find(self, conditions: DecisionConditions, options: Any) -> Any:
        """Find the one for a generation; `UnsupportedError` if the edge has no such thing."""


class Heads:
    """Decision heads that were made for this edge's target, each for one drafter."""

    def __init__(self, heads: Sequence[DecisionHead] = ()) -> None:
        self.heads = list(heads)

    @classmethod
    def of(cls, target: Manifest, names: Sequence[str] | None) -> "Heads":
        """The heads of these names, or those that ship and were made for the target.

        Raises `HeadError` for what cannot be read, `PairMismatchError` for what was named and made
        for another target.
        """
        heads = []
        for name in shipped() if names is None else names:
            head = DecisionHead.load(name)
            try:
                head.suits(target)
            except PairMismatchError:
                if names is not None:
                    raise
                continue
            heads.append(head)
        return cls(heads)

    def serves(self, drafter: str, hidden_size: int) -> bool:
        """Whether a head was made for this drafter."""
        return any(one.serves(drafter, hidden_size) for one in self.heads)

    def find(self, conditions: DecisionConditions, options: JudgingOptions) -> HeadJudge:
        """The drafter's head, bound to the link and the threshold."""
        for head in self.heads:
            if head.serves(conditions.drafter, conditions.hidden_size):
                return head.judge(conditions.channel, options.threshold)
        raise UnsupportedError(
            "This edge has no decision head for this drafter, so it does not offer wisv-full and "
            "wisv-selective: start it with --head, or use greedy."
        )


class Supplies:
    """heads: its decision heads. options: the edge's own, where requests leave them open."""

    def __init__(self, heads: Heads | None = None, options: Sequence[ProtocolOptions] = ()) -> None:
        self._heads = heads or Heads()
        self._by_need: dict[str, Supply] = {Judged.needs: self._heads}
        self._own = {type(each): each for each in options}

    @classmethod
    def of(
        cls,
        target: Manifest,
        heads: Sequence[str] | None,
        threshold: float | None,
        relaxation: Path | None = None,
    ) -> "Supplies":
        """What an edge's configuration says: see `Heads.of`, and for ``relaxation`` its file.

        Raises `RelaxationError` for a file that cannot be read, `PairMismatchError` for one that
        was calibrated for another target.
        """
        own: list[ProtocolOptions] = [JudgingOptions(threshold=threshold)]
        if relaxation is not None:
            card = read_relaxation(relaxation)
            card.suits(target, relaxation)
            own.append(RelaxationOptions.of(card.relaxation))
        return cls(Heads.of(target, heads), own)

    @property
    def heads(self) -> list[str]:
        """What the decision heads are called."""
        return [head.card.name for head in self._heads.heads]

    def stateless(self) -> "Supplies":
        """The same for a target without hidden states; `UnsupportedError` for heads in vain."""
        if self._heads.heads:
            raise UnsupportedError(
                "This kind of target has no hidden states, so no decision head can judge by them: "
                "leave --head away."
            )
        return self

    def protocols(self, drafter: str, hidden_size: int) -> list[str]:
        """The drafting protocols for a drafter of this origin."""
        there = {need for need, one in self._by_need.items() if one.serves(drafter, hidden_size)}
        return [name for name, one in EXCHANGES.items() if not one.needs or one.needs in there]

    def exchange(self, exchange: Exchange[Any], begin: Begin) -> Exchange[Any]:
        """The protocol for one generation, with its options and what it needs.

        Raises `MalformedError` for options that make no sense, `UnsupportedError` if the edge lacks
        what the protocol needs.
        """
        options = exchange.asked(begin.options).over(self._own.get(exchange.Options))
        exchange = exchange.asking(options)
        if not exchange.needs:
            return exchange
        if begin.conditions is None:
            raise MalformedError(f"Protocol {exchange.name} needs to know drafter and link.")
        if exchange.needs not in self._by_need:
            raise UnsupportedError(f"This edge has no {exchange.needs}.")
        return exchange.supplied(self._by_need[exchange.needs].find(begin.conditions, options))

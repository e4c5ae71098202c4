"""The judges' bench: which decision heads an edge has, and whose windows they can judge."""

from collections.abc import Sequence
from typing import Any

from edge_runtime.head import DecisionHead, shipped
from engines.artifact import Manifest
from wire.errors import MalformedError, PairMismatchError, UnsupportedError
from wire.messages import Judging
from wire.protocols import EXCHANGES, Exchange, Judged


class Bench:
    """Heads that were made for this edge's target, each for one drafter.

    threshold: of requests that name none; None: each head's own.
    """

    def __init__(self, heads: Sequence[DecisionHead] = (), threshold: float | None = None) -> None:
        self._heads = list(heads)
        self._threshold = threshold

    @classmethod
    def of(cls, target: Manifest, names: Sequence[str] | None, threshold: float | None) -> "Bench":
        """The heads of these names, or those that ship and were made for the target.

        Raises `HeadError` for one that cannot be read, `PairMismatchError` for one that was named
        and made for another target.
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
        return cls(heads, threshold)

    @property
    def names(self) -> list[str]:
        """What the heads are called."""
        return [head.card.name for head in self._heads]

    def protocols(self, drafter: str, hidden_size: int) -> list[str]:
        """The drafting protocols for a drafter of this origin: those that judge need a head."""
        found = self._head_for(drafter, hidden_size)
        return [name for name, one in EXCHANGES.items() if found is not None or not one.judged]

    def seat(self, exchange: Exchange[Any], judging: Judging | None) -> Exchange[Any]:
        """The protocol for one generation, with its judge where it has one.

        Raises `UnsupportedError` if there is no head for this drafter.
        """
        if not isinstance(exchange, Judged):
            return exchange
        if judging is None:
            raise MalformedError(f"Protocol {exchange.name} needs to know drafter and link.")
        head = self._head_for(judging.drafter, judging.hidden_size)
        if head is None:
            raise UnsupportedError(
                f"This edge has no decision head for this drafter, so it does not offer "
                f"{exchange.name}: start it with --head, or use greedy."
            )
        threshold = judging.threshold if judging.threshold is not None else self._threshold
        return exchange.seated(head.judge(judging.channel, threshold))

    def _head_for(self, drafter: str, hidden_size: int) -> DecisionHead | None:
        return next((one for one in self._heads if one.serves(drafter, hidden_size)), None)

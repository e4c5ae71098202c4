"""The judges' bench: which decision heads an edge has, and whose windows they can judge.

Also how far an edge relaxes, which needs no head: both turn a protocol's name into the exchange of
one generation.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pilotfish.edge_runtime.head import DecisionHead, shipped
from pilotfish.edge_runtime.relaxation_file import read_relaxation
from pilotfish.engines.artifact import Manifest
from pilotfish.speculation.adaptive import Relaxation
from pilotfish.wire.errors import MalformedError, PairMismatchError, UnsupportedError
from pilotfish.wire.messages import Begin, Judging
from pilotfish.wire.protocols import EXCHANGES, Adaptive, Exchange, Judged
from pilotfish.wire.protocols.adaptive import BUILT_IN


class Bench:
    """Heads that were made for this edge's target, each for one drafter.

    threshold: of requests that name none; None: each head's own. relaxation: likewise, of what a
    request under `adaptive` does not name.
    """

    def __init__(
        self,
        heads: Sequence[DecisionHead] = (),
        threshold: float | None = None,
        relaxation: Relaxation = BUILT_IN,
    ) -> None:
        self._heads = list(heads)
        self._threshold = threshold
        self._relaxation = relaxation

    @classmethod
    def of(
        cls,
        target: Manifest,
        names: Sequence[str] | None,
        threshold: float | None,
        relaxation: Path | None = None,
    ) -> "Bench":
        """The heads of these names, or those that ship and were made for the target.

        relaxation: the file of one that was calibrated for the target. Raises `HeadError` or
        `RelaxationError` for what cannot be read, `PairMismatchError` for what was named and made
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
        if relaxation is None:
            return cls(heads, threshold)
        card = read_relaxation(relaxation)
        card.suits(target, relaxation)
        return cls(heads, threshold, card.relaxation)

    def headless(self) -> "Bench":
        """The same for a target that has no hidden states; `UnsupportedError` for heads in vain."""
        if self._heads:
            raise UnsupportedError(
                "This kind of target has no hidden states, so no decision head can judge by them: "
                "leave --head away."
            )
        return Bench((), self._threshold, self._relaxation)

    @property
    def names(self) -> list[str]:
        """What the heads are called."""
        return [head.card.name for head in self._heads]

    def protocols(self, drafter: str, hidden_size: int) -> list[str]:
        """The drafting protocols for a drafter of this origin: those that judge need a head."""
        found = self._head_for(drafter, hidden_size)
        return [name for name, one in EXCHANGES.items() if found is not None or not one.judged]

    def seat(self, exchange: Exchange[Any], begin: Begin) -> Exchange[Any]:
        """The protocol for one generation, with its judge or its relaxation where it has one.

        Raises `UnsupportedError` if there is no head for this drafter.
        """
        if isinstance(exchange, Adaptive):
            return exchange.relaxed(self._relaxation, begin.relaxing)
        return self._judged(exchange, begin.judging) if isinstance(exchange, Judged) else exchange

    def _judged(self, exchange: Judged, judging: Judging | None) -> Judged:
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

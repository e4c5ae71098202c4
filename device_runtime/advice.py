"""The device's half of a constraint: advice, for the edge decides what is allowed.

In:  a plan's grammar. Out: what constrains drafts, as long as this end's parser can follow.
"""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.plan import Plan
from pilotfish.engines.errors import GrammarError
from pilotfish.engines.grammar import Constraint
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.distributions import Floats
from pilotfish.wire.errors import BadGrammarError
from pilotfish.wire.protocols import LOCAL

_log = logging.getLogger("pilotfish.device")


class Advice:
    """Constrains drafts until its parser gives up. strict: then raises `BadGrammarError`.

    Two ends may have different versions of the parser: what this one cannot follow, the other may.
    """

    def __init__(self, constraint: Constraint, *, strict: bool) -> None:
        self._constraint: Constraint | None = constraint
        self._strict = strict

    @property
    def followed(self) -> bool:
        """Whether it constrains still."""
        return self._constraint is not None

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> None:
        """Set to −∞, in place, what must not follow; see `Constraint.forbid`."""
        if self._constraint is None:
            return
        try:
            self._constraint.forbid(logits, answer, paths)
        except GrammarError as error:
            self._give_up(error)

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> Sequence[int]:
        """Return the tokens that alone may follow; see `Constraint.forced`."""
        if self._constraint is None:
            return ()
        try:
            return self._constraint.forced(answer, path)
        except GrammarError as error:
            self._give_up(error)
            return ()

    def _give_up(self, error: GrammarError) -> None:
        if self._strict:
            raise BadGrammarError(str(error)) from error
        _log.warning("drafts are not constrained any more: %s", error)
        self._constraint = None


def advice(plan: Plan, target: Vocabulary) -> Advice | None:
    """Return what constrains an answer's drafts; None for an answer that may be anything.

    Raises `BadGrammarError` under `local`, where no edge decides, if this end cannot read it.
    """
    if (grammar := plan.law.shaping.grammar) is None:
        return None
    strict = plan.protocol == LOCAL
    try:
        return Advice(target.grammars.constraint(grammar), strict=strict)
    except GrammarError as error:
        if strict:
            raise BadGrammarError(str(error)) from error
        _log.warning("drafts are not constrained: %s", error)
        return None

"""The device's half of a constraint: advice, for the edge decides what is allowed.

In:  a plan's grammar. Out: what constrains drafts, as long as this end's parser can follow; and the
     device's own tokens, where no edge decides.
"""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import BadGrammarError, BusyError
from pilotfish.device_runtime.plan import Plan
from pilotfish.engines.constraint import GrammarConstraint
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.distributions import Floats

_log = logging.getLogger("pilotfish.answers")


class DraftAdvice:
    """Constrains drafts until its parser gives up; of a device alone, raises `BadGrammarError`.

    Two ends may have different versions of the parser: what this one cannot follow, the other may.
    constraint: None, and why, where it cannot even begin. Where this machine was too busy to, a
    device alone raises `BusyError`.
    """

    def __init__(
        self, constraint: GrammarConstraint | None, why: GrammarError | None = None
    ) -> None:
        self._constraint = constraint
        self._error = why
        self.decides_alone = False  # no edge decides

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> Sequence[int]:
        """Set to −∞, in place, what must not follow; see `GrammarConstraint.forbid`."""
        if self._constraint is not None:
            try:
                return self._constraint.forbid(logits, answer, paths)
            except GrammarError as error:
                self._give_up(error)
        if self.decides_alone:
            refused = BusyError if isinstance(self._error, GrammarBusyError) else BadGrammarError
            raise refused(f"This device cannot keep to the grammar alone: {self._error}")
        return ()

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> Sequence[int]:
        """Return the tokens that alone may follow; see `GrammarConstraint.forced`."""
        if self._constraint is not None:
            try:
                return self._constraint.forced(answer, path)
            except GrammarError as error:
                self._give_up(error)
        return ()

    def _give_up(self, why: GrammarError) -> None:
        _log.info("drafts are not constrained any more: %s", why)
        self._constraint, self._error = None, why


def draft_advice(plan: Plan, target: Vocabulary) -> DraftAdvice | None:
    """Return what constrains an answer's drafts; None for an answer that may be anything."""
    if (grammar := plan.sampling.logits_options.grammar) is None:
        return None
    try:
        return DraftAdvice(target.grammars.constraint(grammar))
    except GrammarError as error:
        _log.info("drafts are not constrained: %s", error)
        return DraftAdvice(None, error)

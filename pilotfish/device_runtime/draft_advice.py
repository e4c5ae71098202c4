"""Constrain the device's drafts by the plan's grammar. The edge decides what is allowed.

In:  a plan's grammar. Out: a constraint on drafts, as long as the device's parser supports the
     grammar, and on the tokens of a device that generates alone.
"""

import logging
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import BadGrammarError, BusyError
from pilotfish.device_runtime.plan import Plan
from pilotfish.engines.constraint import GrammarConstraint
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.engines.grammar_trial import TRIAL
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import Grammar

_log = logging.getLogger("pilotfish.answers")


class DraftAdvice:
    """Constrains drafts until the parser fails.

    After a failure drafts are unconstrained: the edge may have a version of the parser that
    supports the grammar. A device that generates alone raises `BadGrammarError`, or `BusyError` if
    the machine was too busy to compile the grammar. constraint: None if compiling raised ``error``.
    """

    def __init__(
        self, constraint: GrammarConstraint | None, error: GrammarError | None = None
    ) -> None:
        self._constraint = constraint
        self._error = error
        self.decides_alone = False  # True while no edge verifies the tokens

    def forbid(
        self, logits: Floats, answer: NDArray[np.uint32], paths: Sequence[Sequence[int]]
    ) -> Sequence[int]:
        """Set forbidden tokens to −∞ in place; see `GrammarConstraint.forbid`."""
        if self._constraint is not None:
            try:
                return self._constraint.forbid(logits, answer, paths)
            except GrammarError as error:
                self._give_up(error)
        if self.decides_alone:
            refused = BusyError if isinstance(self._error, GrammarBusyError) else BadGrammarError
            raise refused(f"This device cannot follow the grammar without an edge: {self._error}")
        return ()

    def forced(self, answer: NDArray[np.uint32], path: Sequence[int]) -> Sequence[int]:
        """Return the tokens that the grammar forces next; see `GrammarConstraint.forced`."""
        if self._constraint is not None:
            try:
                return self._constraint.forced(answer, path)
            except GrammarError as error:
                self._give_up(error)
        return ()

    def _give_up(self, error: GrammarError) -> None:
        _log.info("drafts are no longer constrained: %s", error)
        self._constraint, self._error = None, error


def check_grammar(grammar: Grammar | None) -> None:
    """Raise `BadGrammarError` for a grammar that does not compile.

    Nothing is checked if this machine has no parser, or is too busy: the edge decides anyway.
    """
    if grammar is None or find_spec("llguidance") is None:
        return
    try:
        TRIAL.attempt(grammar)
    except GrammarBusyError as error:
        _log.info("the grammar is not checked: %s", error)
    except GrammarError as error:
        raise BadGrammarError(str(error)) from error


def draft_advice(plan: Plan, target: Vocabulary) -> DraftAdvice | None:
    """Return the constraint on an answer's drafts; None without a grammar."""
    if (grammar := plan.sampling.logits_options.grammar) is None:
        return None
    try:
        return DraftAdvice(target.grammars.constraint(grammar))
    except GrammarError as error:
        _log.info("drafts are not constrained: %s", error)
        return DraftAdvice(None, error)

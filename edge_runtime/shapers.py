"""Make what shapes the target's logits in a generation, as a device's `Begin` asks for it.

In:  a `Begin` and its law. Out: a `Shaper`, or a typed refusal; a client whose grammar was costly
     has none taken for a while, since it stalls all others.
"""

import time

from pilotfish.engines.errors import GrammarError
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.shaping import Constraint, Shaper
from pilotfish.wire import messages as m
from pilotfish.wire.errors import (
    BadGrammarError,
    MalformedError,
    TokenOutOfRangeError,
    UnsupportedError,
)
from pilotfish.wire.protocols import Law

_BARRED_S, _BARRED = 10.0, 1024  # for a grammar that was costly; most owners


class Shapers:
    """Of one target. shapes: whether its logits are the model's own."""

    def __init__(self, vocabulary: Vocabulary, *, shapes: bool) -> None:
        self._vocab = vocabulary.vocab_size
        self._grammars = vocabulary.grammars
        self._shapes = shapes
        self._barred: dict[bytes, float] = {}  # until when an owner's grammars are not taken

    def expect_unshaped(self) -> None:
        """Raise `UnsupportedError` if the target's logits are not the model's own."""
        if not self._shapes:
            raise UnsupportedError(
                "This edge averages what its workers tell of their likeliest tokens; it does not "
                "know the log-probabilities of a prompt."
            )

    def of(self, begin: m.Begin, law: Law, length: int, owner: bytes) -> Shaper | None:
        """Return what shapes the logits of a generation that begins with ``length`` tokens."""
        if (told := begin.shape) is None:
            return None
        if not self._shapes:
            raise UnsupportedError(
                "This edge averages what its workers tell of their likeliest tokens; it takes no "
                "penalties and no logit_bias, and no grammar."
            )
        if told.since > length:
            raise MalformedError(f"A prompt of {told.since} tokens is no part of {length}.")
        if (token := max(law.shaping.logit_bias, default=0)) >= self._vocab:
            raise TokenOutOfRangeError(
                f"logit_bias names token {token}; the target has {self._vocab}."
            )
        return law.shaper(told.since, self._constraint(law, owner))

    def _constraint(self, law: Law, owner: bytes) -> Constraint | None:
        if (grammar := law.shaping.grammar) is None:
            return None
        if (rest_s := self._barred.get(owner, 0.0) - time.monotonic()) > 0.0:
            raise BadGrammarError(
                f"A grammar of this client has cost too much; the next is taken in {rest_s:.0f} s."
            )
        try:
            return self._grammars.constraint(grammar)
        except GrammarError as error:
            if error.costly:
                self.bar(owner)
            raise BadGrammarError(str(error)) from error

    def bar(self, owner: bytes) -> None:
        """Take no grammars of this client for a while."""
        self._barred.pop(owner, None)
        self._barred[owner] = time.monotonic() + _BARRED_S  # the newest is last
        if len(self._barred) > _BARRED:
            del self._barred[next(iter(self._barred))]

"""Check a generation's logits options, create its `LogitsProcessor`, and apply it.

In:  a `Begin`, its sampling parameters, and the constraint of its grammar. Out: a
     `LogitsProcessor`, or a typed refusal.
"""

from collections.abc import Sequence

from pilotfish.base.errors import (
    BadGrammarError,
    BusyError,
    MalformedError,
    TokenOutOfRangeError,
    UnsupportedError,
)
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.logits_options import Constraint, LogitsProcessor
from pilotfish.wire import messages as m
from pilotfish.wire.protocols import SamplingParams
from pilotfish.wire.protocols.protocol import Ids


class LogitsProcessors:
    """Creates logits processors.

    model_logits: whether the target's logits come from one model (not from an ensemble).
    """

    def __init__(self, vocabulary: Vocabulary, *, model_logits: bool) -> None:
        self._vocab = vocabulary.vocab_size
        self._grammars = vocabulary.grammars
        self._model_logits = model_logits

    def expect_model_logits(self) -> None:
        """Raise `UnsupportedError` if the target's logits are an ensemble's average."""
        if not self._model_logits:
            raise UnsupportedError(
                "This edge's target averages only the likeliest tokens of its workers, so it "
                "cannot compute the log-probabilities of a prompt."
            )

    def check(self, begin: m.Begin, sampling_params: SamplingParams, length: int) -> None:
        """Raise an error if the logits options of a generation are invalid.

        length: tokens of its prompt. The grammar is checked without compiling it.
        """
        if (shape := begin.shape) is None:
            return
        if not self._model_logits:
            raise UnsupportedError(
                "This edge's target averages only the likeliest tokens of its workers, so it "
                "accepts no penalties, no logit_bias and no grammar."
            )
        if shape.since > length:
            raise MalformedError(
                f"The prompt has {shape.since} tokens, but the whole text only {length}."
            )
        if (token := max(sampling_params.logits_options.logit_bias, default=0)) >= self._vocab:
            raise TokenOutOfRangeError(
                f"logit_bias names token {token}, but the target has {self._vocab} tokens."
            )
        grammar = sampling_params.logits_options.grammar
        if grammar is not None and (wrong := self._grammars.refusal(grammar)):
            raise BadGrammarError(wrong)

    def create(
        self, begin: m.Begin, sampling_params: SamplingParams, constraint: Constraint | None
    ) -> LogitsProcessor | None:
        """Create the processor of a generation; return None if no option changes its logits."""
        return (
            None
            if begin.shape is None
            else sampling_params.logits_processor(begin.shape.since, constraint)
        )


def process_logits(
    logits_processor: LogitsProcessor, logits: Floats, text: Ids, paths: Sequence[Sequence[int]]
) -> Sequence[int]:
    """Change logits [rows, V] in place; return the rows that no token may follow.

    text, paths: as in `LogitsProcessor.process`. Raises `BadGrammarError` if the grammar cannot
    follow the text, `BusyError` if the machine has no room for it at the moment.
    """
    try:
        return logits_processor.process(logits, text, paths)
    except GrammarBusyError as error:
        raise BusyError(str(error)) from error
    except GrammarError as error:
        raise BadGrammarError(str(error)) from error

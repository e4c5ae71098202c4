"""Target in this process: a decoder that computes each pass in `start`."""

from collections.abc import Sequence

import numpy as np

from pilotfish.edge_runtime.targets.target import Scores, Span, Target, TargetOptions
from pilotfish.engines.language_model import LanguageModel, open_model
from pilotfish.engines.passes import Pass


class LocalTarget(Target):
    """Target that is a decoder; the serving thread runs it."""

    def __init__(self, decoder: LanguageModel) -> None:
        self._decoder = decoder
        self._finished: list[Scores] = []
        self._chains = [0] * decoder.slots  # number of tokens before the tree in a slot's last pass
        self.context = decoder.context
        self.digest = decoder.artifact.manifest.digest
        self.execution = decoder.execution

    def start(self, number: int, spans: Sequence[Span]) -> None:
        """Compute the pass; `collect_scores` returns the scores or the error."""
        try:
            for span in spans:
                self._decoder.rollback(span.slot, span.base)
                self._chains[span.slot] = span.size - span.nodes
            outputs = self._decoder.forward([as_pass(span) for span in spans])
        except Exception as error:
            self._finished.append(Scores(number, error=error))
        else:
            self._finished.append(Scores(number, outputs))

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Move the path's cached K/V directly after the chain; no token is computed again."""
        chain = self._chains[slot]
        self._decoder.keep_path(slot, [*range(chain), *(chain + node for node in path)])

    def collect_scores(self) -> Sequence[Scores]:
        """Return the scores of the passes since the last call."""
        finished, self._finished = self._finished, []
        return finished


def open_target(options: TargetOptions) -> LocalTarget:
    """Load the artifact's weights, and return the target."""
    config = options.config
    return LocalTarget(
        open_model(
            options.artifact,
            slots=config.limits.sessions,
            context=config.limits.context,
            threads=config.target_threads,
            provider=config.provider,
        )
    )


def as_pass(span: Span) -> Pass:
    """Convert a span to a decoder's pass; the tokens before a tree become nodes of the tree."""
    tokens = span.tokens[span.base :].astype(np.int64)
    if span.parents is None:
        return Pass(span.slot, tokens, span.rows)
    chain = span.size - span.nodes
    parents = np.concatenate([np.arange(-1, chain - 1), span.parents + chain])
    return Pass(span.slot, tokens, span.rows, parents)

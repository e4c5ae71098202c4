"""The target in this process: a decoder, which has landed when `start` returns."""

from collections.abc import Sequence

import numpy as np

from pilotfish.edge_runtime.targets.target import Ask, Landing, Opening, Target
from pilotfish.engines.decoder import Decoder, Pass


class LocalTarget(Target):
    """A decoder with its slots. The serving thread computes."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._landed: list[Landing] = []
        self._chains = [0] * decoder.slots  # tokens of each slot's last pass before its tree
        self.context = decoder.context
        self.digest = decoder.artifact.manifest.digest

    def start(self, number: int, asks: Sequence[Ask]) -> None:
        """Compute."""
        try:
            for ask in asks:
                self._decoder.rollback(ask.slot, ask.base)
                self._chains[ask.slot] = ask.size - ask.nodes
            answers = self._decoder.forward([as_pass(ask) for ask in asks])
        except Exception as error:
            self._landed.append(Landing(number, error=error))
        else:
            self._landed.append(Landing(number, answers))

    def keep(self, slot: int, path: Sequence[int]) -> None:
        """Its keys and values move behind the chain; nothing is computed again."""
        chain = self._chains[slot]
        self._decoder.keep(slot, [*range(chain), *(chain + node for node in path)])

    def landed(self) -> Sequence[Landing]:
        """What was computed since the last call."""
        landed, self._landed = self._landed, []
        return landed


def open_target(opening: Opening) -> LocalTarget:
    """The artifact's weights, loaded here."""
    config = opening.config
    return LocalTarget(
        Decoder(
            opening.artifact,
            slots=config.limits.sessions,
            context=config.limits.context,
            threads=config.threads,
            provider=config.provider,
        )
    )


def as_pass(ask: Ask) -> Pass:
    """The same for a decoder; to it the chain before a tree is part of the tree."""
    tokens = ask.tokens[ask.base :].astype(np.int64)
    if ask.parents is None:
        return Pass(ask.slot, tokens, ask.rows)
    chain = ask.size - ask.nodes
    parents = np.concatenate([np.arange(-1, chain - 1), ask.parents + chain])
    return Pass(ask.slot, tokens, ask.rows, parents)

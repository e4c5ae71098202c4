"""Drafting a chain of tokens with the small model."""

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from engines.artifact import Artifact
from engines.decoder import Decoder, Pass
from engines.tokenizer import Tokenizer
from speculation.distributions import Floats
from wire.protocols import Draft, Exchange, Law

Ids = NDArray[np.uint32]


class Drafter:
    """The small model of one session: its K/V follow the committed tokens and the open window."""

    def __init__(
        self, artifact: Artifact, *, provider: str, threads: int | None, context: int | None
    ) -> None:
        self.manifest = artifact.manifest
        self.tokenizer = Tokenizer(artifact)
        self._decoder = Decoder(
            artifact, slots=1, context=context, threads=threads, provider=provider
        )
        self.context = self._decoder.context

    def forget(self, keep: int) -> None:
        """Only the first ``keep`` tokens still hold; what was read after them is void."""
        self._decoder.rollback(0, min(keep, self._decoder.length(0)))

    def read(self, committed: Ids) -> None:
        """Read all committed tokens but the last, whose logits the first draft needs."""
        held = self._decoder.length(0)
        if held < len(committed) - 1:
            self._decoder.prefill(0, committed[held:-1].astype(np.int64), rows=0)

    def logits(self, committed: Ids) -> Floats:
        """The drafter's logits [V] after the committed tokens; valid until the next call."""
        self.read(committed)
        return self._step(committed[self._decoder.length(0) :])

    def _step(self, tokens: NDArray[np.integer]) -> Floats:
        passed = Pass(slot=0, tokens=tokens.astype(np.int64), rows=1)
        logits: Floats = self._decoder.forward([passed])[0].logits[0]
        return logits

    def draft(
        self, committed: Ids, window: int, exchange: Exchange, law: Law, ends: Collection[int]
    ) -> Draft:
        """A chain of at most ``window`` tokens after the committed ones; an end token ends it."""
        start = len(committed)
        ids: list[int] = []
        rows: list[NDArray[np.float32]] = []
        while len(ids) < window:
            logits = self._step(np.array(ids[-1:])) if ids else self.logits(committed)
            token, q = exchange.draw(logits, law, round_start=start, position=start + len(ids))
            ids.append(token)
            if q is not None:
                rows.append(q)
            if token in ends:
                break
        # [γ, V], the rows that were sampled from
        return Draft(np.array(ids, dtype=np.uint32), np.stack(rows) if rows else _no_rows(self))


def _no_rows(drafter: Drafter) -> NDArray[np.float32]:
    return np.empty((0, drafter.manifest.vocab_size), dtype=np.float32)
